# SPDX-License-Identifier: Apache-2.0
"""Forces a request to produce a recorded response token by token, also where a server verifies drafted tokens.

The server needs ``--enable-custom-logit-processor`` and must be able to import this module; a request carries
the module's name, not its code."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

#: The key of the response's token ids in a request's ``custom_params``.
FORCED = "forced_tokens"


class ForcedTokens(CustomLogitProcessor):
    """Makes every token except the next recorded token impossible. The index of that token follows from the
    request's length in the KV cache, even after a retraction. After the record's end, logits stay unchanged."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Changes ``logits`` in place; their shape is ``[requests, vocabulary]``."""
        _force_verifications()
        params = custom_param_list or ()
        force(logits, params, [each["__req__"].kv.kv_committed_len for each in params])
        return logits


def force(
    logits: torch.Tensor, params: Sequence[dict[str, Any] | None], ends: Sequence[int]
) -> None:
    """Make every token impossible, in place, except the recorded one where a record goes on.

    Args:
        logits: ``[rows, vocabulary]``.
        params: For each row, ``custom_params`` of its request.
        ends: For each row, how many tokens of its request, prompt included, are before the token to decide on.
    """
    rows = []
    tokens = []
    for row, (mine, end) in enumerate(zip(params, ends, strict=True)):
        forced = (mine or {}).get(FORCED, ())
        place = end - len(mine["__req__"].origin_input_ids) if mine and forced else -1
        if 0 <= place < len(forced):
            rows.append(row)
            tokens.append(forced[place])
    if rows:
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0


@functools.cache
def _force_verifications() -> None:
    """Wrap what verifies drafted tokens: SGLang does not call logit processors there."""
    from sglang.srt.speculative import eagle_utils

    verify = eagle_utils.eagle_sample

    @functools.wraps(verify)
    def forced(
        verify_input: Any, batch: Any, logits_output: Any, *others: Any, **named: Any
    ) -> Any:
        params = batch.sampling_info.custom_params
        if params and not batch.forward_mode.is_idle():
            # Drafts of one depth have one position, also in trees.
            ends = [position + 1 for position in verify_input.positions.tolist()]
            of_drafts = [each for each in params for _ in range(len(ends) // len(params))]
            force(logits_output.next_token_logits, of_drafts, ends)
        return verify(verify_input, batch, logits_output, *others, **named)

    # The workers have imported the function by name.
    for module in list(sys.modules.values()):
        if getattr(module, "eagle_sample", None) is verify:
            module.eagle_sample = forced  # type: ignore[attr-defined]


def forced_request(token_ids: list[int]) -> dict[str, Any]:
    """Request fields that force the response to be these tokens. Raises ValueError if there are none."""
    if not token_ids:
        raise ValueError("a response to replay needs at least one token, got none")
    return {
        "custom_logit_processor": ForcedTokens.to_str(),
        "custom_params": {FORCED: list(token_ids)},
        "ignore_eos": True,
        "temperature": 0.0,
        # Otherwise SGLang leaves special tokens out of the text, but the record may have them.
        "skip_special_tokens": False,
    }

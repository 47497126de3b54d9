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
        rows = []
        tokens = []
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            place = request.kv.kv_committed_len - len(request.origin_input_ids)
            forced = params[FORCED]
            if 0 <= place < len(forced):
                rows.append(row)
                tokens.append(forced[place])
        _force(logits, rows, tokens)
        return logits


def _force(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """Make every token of ``rows`` impossible, except that row ``rows[i]`` has ``tokens[i]``."""
    if rows:
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0


def force_drafts(
    logits: torch.Tensor, positions: Sequence[int], params: Sequence[dict[str, Any] | None]
) -> None:
    """Change the logits of a verification in place, so that it accepts the drafts that agree with the record.

    Args:
        logits: ``[requests * drafts, vocabulary]``.
        positions: The position of each drafted token, ``[requests * drafts]``. Of a tree, drafts of one depth
            have one position.
        params: ``custom_params`` of each request.
    """
    drafts = len(logits) // max(len(params), 1)
    rows = []
    tokens = []
    for row, position in enumerate(positions):
        mine = params[row // drafts] or {}
        forced = mine.get(FORCED, ())
        if forced:
            place = position + 1 - len(mine["__req__"].origin_input_ids)
            if 0 <= place < len(forced):
                rows.append(row)
                tokens.append(forced[place])
    _force(logits, rows, tokens)


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
            positions = verify_input.positions.tolist()
            force_drafts(logits_output.next_token_logits, positions, params)
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

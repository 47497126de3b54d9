# SPDX-License-Identifier: Apache-2.0
"""Forces a request to produce a recorded response token by token.

The server needs ``--enable-custom-logit-processor`` and must be able to import this module; a request carries
the module's name, not its code."""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

#: Key in ``custom_params``: the response's token ids.
FORCED = "forced_tokens"


class ForcedTokens(CustomLogitProcessor):
    """Makes every token except the recorded one impossible. The place in the record follows from the number of
    tokens with KV, also after a retraction. Once the record has ended, logits are not changed."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Changes ``logits`` ``[requests, vocabulary]`` in place."""
        rows, tokens = [], []
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            place = request.kv.kv_committed_len - len(request.origin_input_ids)
            forced = params[FORCED]
            if 0 <= place < len(forced):
                rows.append(row)
                tokens.append(forced[place])
        if rows:
            logits[rows] = float("-inf")
            logits[rows, tokens] = 0.0
        return logits


def forced_request(token_ids: list[int]) -> dict[str, Any]:
    """Body of a request whose response is forced to be these tokens. Raises ValueError if there are none."""
    if not token_ids:
        raise ValueError("a response to replay needs at least one token, got none")
    return {
        "custom_logit_processor": ForcedTokens.to_str(),
        "custom_params": {FORCED: list(token_ids)},
        "ignore_eos": True,
        "temperature": 0.0,
        # Otherwise SGLang puts spaces between special tokens, which the record does not have.
        "skip_special_tokens": False,
    }

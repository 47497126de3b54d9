# SPDX-License-Identifier: Apache-2.0
"""Forces a request to produce a recorded response token by token.

The server needs ``--enable-custom-logit-processor`` and must be able to import this module; a request carries
the module's name, not its code."""

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
        rows = []
        tokens = []
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

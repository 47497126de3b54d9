# SPDX-License-Identifier: Apache-2.0
"""Scores of neighbours taken together."""

import torch
from torch.nn import functional


def pooled(weights: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """``max`` or ``avg`` of the ``kernel`` weights around each, so that what is kept hangs together.
    Beyond the ends lie zeros; an even ``kernel`` reaches one further back than forth.

    ``weights``: fp32 ``[held]``, none below 0, neighbours in the cache side by side.
    """
    if not len(weights):
        return weights
    padded = functional.pad(weights, (kernel // 2, kernel - 1 - kernel // 2))[None, None]
    run = functional.max_pool1d if kind == "max" else functional.avg_pool1d
    return run(padded, kernel, stride=1)[0, 0]

# SPDX-License-Identifier: Apache-2.0
"""Pools the scores of neighbouring positions."""

import torch
from torch.nn import functional


def pooled(weights: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """The ``max`` or ``avg`` of the ``kernel`` weights around each position, so that neighbours get similar
    scores. Weights before the first and after the last position count as 0. An even ``kernel`` reaches one
    position further back than ahead.
    ``weights``: fp32 ``[held]``, none below 0, in the order of the held positions.
    """
    if not len(weights):
        return weights
    padded = functional.pad(weights, (kernel // 2, kernel - 1 - kernel // 2))[None, None]
    run = functional.max_pool1d if kind == "max" else functional.avg_pool1d
    return run(padded, kernel, stride=1)[0, 0]

# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch and their plan, as attention statistics and selection read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class BatchRows(NamedTuple):
    """Of one forward."""

    plan: Any  # a RowPlan; on a GPU PlanBuffers with positions
    requests: torch.Tensor  # int [batch], rows
    lengths: torch.Tensor  # int [batch], their positions, new ones included
    longest: int  # upper bound on lengths

# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch and their plan, as attention statistics and selection read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class BatchRows(NamedTuple):
    """Of one forward.

    Attributes:
        plan: Entries of the rows: a ``RowPlan``, on a GPU ``PlanBuffers`` with ``positions``.
        requests, lengths: int ``[batch]``, rows and their positions, new ones included.
        longest: Upper bound on ``lengths``.
    """

    plan: Any
    requests: torch.Tensor
    lengths: torch.Tensor
    longest: int

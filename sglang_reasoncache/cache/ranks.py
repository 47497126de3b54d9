# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel ranks must decide alike. They make every call here together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RankFailed(BaseException):
    """A rank failed: raised on all ranks by the same call. No ``except Exception`` of a policy
    swallows it."""


class Ranks:
    """``group``: CPU process group of the ranks, None when alone.

    Every reduction tells, first of all, whether all ranks are well: one that ``failed`` says so in
    its next call, whichever the others make.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.failed = self._ended = False

    @property
    def alone(self) -> bool:
        return self._group is None

    def least(self, value: int) -> int:
        """The least ``value``. Raises RankFailed where a rank has failed."""
        return value if self._group is None else self._least(value)

    def agree(self) -> None:
        """Go on if all ranks can. Raises RankFailed."""
        if self._group is not None:
            self._least(0)

    def _least(self, value: int) -> int:
        if not self._ended:
            box = torch.tensor([int(value), not self.failed], dtype=torch.int64)
            dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._group)
            least, well = box.tolist()
            if well:
                return int(least)
        # No rank comes to another reduction.
        self._ended = True
        raise RankFailed

    def add(self, sums: torch.Tensor) -> None:
        """Add up over the ranks, in place. Raises RankFailed."""
        # A rank that failed does not know the shape of what the others add.
        self.agree()
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)

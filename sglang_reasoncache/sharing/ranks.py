# SPDX-License-Identifier: Apache-2.0
"""What tensor-parallel ranks must decide alike. They make every call here together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """``group``: CPU process group of the ranks, None when alone."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def least(self, value: int) -> int:
        if self._group is None:
            return value
        box = torch.tensor(int(value), dtype=torch.int64)
        dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._group)
        return int(box)

    def first(self, value: Any) -> Any:
        """The first rank's ``value``, any picklable object."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

# SPDX-License-Identifier: Apache-2.0
"""Reductions that let tensor-parallel ranks make the same decisions. All ranks must make the same calls."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(BaseException):
    """A rank failed. All ranks raise this exception at the same reduction. It derives from ``BaseException``,
    so that no ``except Exception`` swallows it."""


class RanksTorn(Exception):
    """This rank failed to do what all ranks had agreed to do, so its block tables or free slots may differ from
    the others'. ``Containment`` lets this exception end the scheduler: ranks that differ compute different
    tokens, or wait for each other forever."""


def alike(number: float) -> float:
    """``number``, rounded: powers differ in the last bit from CPU to CPU, and ranks on two machines must decide
    alike."""
    return float(f"{number:.12g}")


class Ranks:
    """Makes one rank's reductions with the other ranks of its tensor-parallel group.

    Every call also checks whether a rank has failed. A rank that has ``failed`` set tells the others so in
    its next call, whichever method they call.

    Args:
        group: CPU process group of the ranks; None if this is the only rank.

    Attributes:
        alone: Whether this is the only rank.
        failed: Set by the caller when this rank has failed.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._size = 1 if group is None else group.size()
        self.alone = group is None
        self.failed = self._ended = False

    def least(self, value: int) -> int:
        """The smallest ``value`` that any rank passed. Raises RankFailed if one of several ranks failed."""
        if self.alone:
            return value
        if not self._ended:
            box = torch.tensor([int(value), not self.failed], dtype=torch.int64)
            least, well = self._smallest(box).tolist()
            if well:
                return int(least)
        # From now on no rank makes a reduction.
        self._ended = True
        raise RankFailed

    def _smallest(self, box: torch.Tensor) -> torch.Tensor:
        """The smallest of each number over all ranks. ``box``: this rank's, int64 ``[numbers]``. Gloo's
        all_reduce takes 2 (ranks - 1) messages one after the other; among more than two ranks, rank 0 of the
        group gathers the numbers and broadcasts the result, much like SGLang's ``exchange_sync_rows``."""
        if self._size <= 2:
            dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self._group)
            return box
        if self._group.rank() == 0:
            boxes = [torch.empty_like(box) for _ in range(self._size)]
            dist.gather(box, boxes, group=self._group, group_dst=0)
            box = torch.stack(boxes).amin(0)
        else:
            dist.gather(box, group=self._group, group_dst=0)
        dist.broadcast(box, group=self._group, group_src=0)
        return box

    def agree(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if not self.alone:
            self.least(0)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A context for a change that all ranks make, after :meth:`agree`. With several ranks an exception in
        it becomes RanksTorn."""
        try:
            yield
        except Exception as error:
            if self.alone:
                raise
            raise RanksTorn(f"{type(error).__name__}: {error}") from error

    def add(self, sums: torch.Tensor) -> None:
        """Add up ``sums`` over the ranks, in place. Raises RankFailed if a rank has failed."""
        # Failures are exchanged first, because a failed rank may have no tensor of this shape to add.
        self.agree()
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)

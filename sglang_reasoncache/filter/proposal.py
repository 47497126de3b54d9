# SPDX-License-Identifier: Apache-2.0
"""What the filter hands over: plain data, nothing is shared yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_reasoncache.filter.align import AcrossPair, BlockPair
from sglang_reasoncache.filter.segment import Step


@dataclass(slots=True)
class FilterCounters:
    """What happened to one finished step in the filter.

    Attributes:
        candidates: earlier steps above the lexical threshold, or blocks of equal runs.
        dropped_structure: candidates whose formal content differs.
        over_bound: steps, itself included, whose structure went over a bound when it was read.
    """

    candidates: int = 0
    dropped_structure: int = 0
    over_bound: int = 0


class Proposal(NamedTuple):
    """A finished step, and the block pairs that may be shared now, ascending in ``dst_start``.

    With a least age these are pairs of earlier steps. ``across``: those with blocks of the
    request's group.
    """

    step: Step
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    across: tuple[AcrossPair, ...] = ()


class StepResult(NamedTuple):
    """A :class:`Proposal` for one of many requests, as :class:`FilterProcess` gives it back.

    Attributes:
        request: id that :meth:`FilterProcess.open` gave.
        seconds: CPU time that was spent on the step.
    """

    request: int
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    seconds: float
    across: tuple[AcrossPair, ...] = ()

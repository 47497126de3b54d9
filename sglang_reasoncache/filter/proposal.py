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
        steps_compared: 1 if there was an earlier step to compare it with.
        steps_with_candidates: 1 if it has a lexical candidate, or a block of an equal run.
        candidates: earlier steps above the lexical threshold.
        dropped_structure: candidates whose formal content differs.
        dropped_over_bound: candidates left out because one of the two steps is over a bound of
            reading structure; not in ``dropped_structure``.
        dropped_excess: candidates beyond ``max_structure_checks``, ``max_candidates`` or what
            may be read for one step, or not needed because all blocks had a pair.
        over_bound: signatures that went over a bound.
    """

    steps_compared: int = 0
    steps_with_candidates: int = 0
    candidates: int = 0
    dropped_structure: int = 0
    dropped_over_bound: int = 0
    dropped_excess: int = 0
    over_bound: int = 0


class Proposal(NamedTuple):
    """A finished step, and the block pairs that may be shared now, ascending in ``dst_start``.

    With a least age these are pairs of earlier steps, and ``across`` those with blocks of the
    request's group.
    """

    step: Step
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    across: tuple[AcrossPair, ...] = ()


class StepResult(NamedTuple):
    """A :class:`Proposal` for one of many requests, as :class:`FilterProcess` gives it back.

    Attributes:
        request: id the engine gave the request.
        start: logical position of the step's first token.
        end: one past its last.
        seconds: CPU time that was spent on it.
    """

    request: int
    start: int
    end: int
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    seconds: float
    across: tuple[AcrossPair, ...] = ()

# SPDX-License-Identifier: Apache-2.0
"""Results of the filter, as plain data."""

from dataclasses import dataclass
from typing import NamedTuple

from sglang_reasoncache.filter.align import AcrossPair, BlockPair
from sglang_reasoncache.filter.segment import Step


@dataclass(slots=True)
class FilterCounters:
    """Counts of what happened to one finished step.

    Attributes:
        candidates: Earlier steps above the lexical threshold (``match=steps``), or paired blocks
            (``match=runs``).
        dropped_structure: Candidates whose formal content differs.
        over_bound: Steps that exceeded a bound of ``Limits`` when they were parsed to compare this step.
    """

    candidates: int = 0
    dropped_structure: int = 0
    over_bound: int = 0


class Proposal(NamedTuple):
    """A finished step, and the block pairs that may share now, ascending in ``dst_start``.

    With ``min_age`` above 0 most of the pairs were found in earlier steps. ``across``: pairs with blocks of the
    request's group.
    """

    step: Step
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    across: tuple[AcrossPair, ...] = ()


class StepResult(NamedTuple):
    """A :class:`Proposal` without its step, as :meth:`FilterProcess.take` returns it.

    Attributes:
        request: Id from :meth:`FilterProcess.open`.
        seconds: CPU seconds that the step took.
    """

    request: int
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    seconds: float
    across: tuple[AcrossPair, ...] = ()

# SPDX-License-Identifier: Apache-2.0
"""The formal content of a step as SymPy expressions, and whether that of two steps is equal (ReasonCache, stage
1). Text is never evaluated, and parsing is bounded.

SymPy is imported on first use, because it takes half a second to load and only the filter process needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sympy import Tuple


class OverBound(Exception):
    """A step exceeds a bound. The argument names the field of :class:`Limits`. Never leaves this package."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one step. A step over a bound matches no step, because it was not parsed."""

    max_chars: int = 8192  # of the decoded step
    max_depth: int = 32  # of nested brackets, arguments and signs; SymPy recurses
    max_nodes: int = 1024  # lexical tokens of the step


LIMITS = Limits()


class Signature(NamedTuple):
    """Formal content of one step.

    ``content``: its expressions in their order; None for prose, or if a bound is exceeded. ``bound``:
    the field of :class:`Limits` that the step exceeds, or empty.
    """

    content: Tuple | None = None
    bound: str = ""


def signature(text: str, limits: Limits = LIMITS, *, in_code: bool = False) -> Signature:
    """Parse the formal content of a decoded step. No text makes this raise, and none is executed.

    ``in_code``: the step begins inside a code fence.
    """
    from sglang_reasoncache.filter.structure.expression import read

    try:
        return Signature(read(text, limits, in_code))
    except OverBound as over:
        return Signature(bound=over.args[0])


def same_structure(a: Signature, b: Signature) -> bool:
    """Whether two steps pass the structure check (ReasonCache, stage 1, item 4).

    A step over a bound passes with no step. Prose passes with every other step.
    """
    if a.bound or b.bound:
        return False
    if a.content is None or b.content is None:
        return True
    # Hashes first, which is fast: SymPy keeps them, and different content mostly has different hashes.
    return hash(a.content) == hash(b.content) and bool(a.content == b.content)

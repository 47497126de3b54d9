# SPDX-License-Identifier: Apache-2.0
"""Formal content of a step as SymPy expressions (ReasonCache, stage 1). Text is read, never
evaluated, and every read is bounded."""

from dataclasses import dataclass


class OverBound(Exception):
    """A step exceeds a field of :class:`Limits`, its only argument. Never leaves the package."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one step. A step over a bound matches nothing: nobody has compared it."""

    max_chars: int = 8192  # of the decoded step
    max_depth: int = 32  # of brackets, arguments and signs in one another; SymPy recurses
    max_nodes: int = 1024  # lexical tokens of the step
    max_edit_nodes: int = 32  # SymPy nodes of a step whose edit distance is computed

# SPDX-License-Identifier: Apache-2.0
"""Parses the formal content of a step into SymPy expressions (ReasonCache, stage 1). Text is never
evaluated, and parsing is bounded."""

from dataclasses import dataclass


class OverBound(Exception):
    """A step exceeds a bound. The argument names the field of :class:`Limits`. Never leaves this package."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one step. A step over a bound matches no step, because it was not parsed."""

    max_chars: int = 8192  # of the decoded step
    max_depth: int = 32  # of nested brackets, arguments and signs; SymPy recurses
    max_nodes: int = 1024  # lexical tokens of the step

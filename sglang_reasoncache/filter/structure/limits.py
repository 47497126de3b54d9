# SPDX-License-Identifier: Apache-2.0
"""Bounds of reading a step's structure."""

from __future__ import annotations

from dataclasses import dataclass


class OverBound(Exception):
    """A step exceeds a bound; ``bound`` names the field of :class:`Limits`.

    Control flow inside this package: it never leaves :func:`signature`.
    """

    def __init__(self, bound: str) -> None:
        super().__init__(bound)
        self.bound = bound


@dataclass(frozen=True)
class Limits:
    """How much of a step is read before it is given up.

    A step over a bound gets a signature that matches nothing: it may be formal content that
    nobody has compared, so sharing it would not be safe.

    Attributes:
        max_chars: characters of the decoded step.
        max_depth: nesting of brackets, arguments, prefixes and indentation; at most 128, for
            the parser recurses about three frames a level.
        max_nodes: lexical tokens, hence tree nodes, of all trees together.
        max_edit_nodes: nodes of either step when a tree edit distance is computed (tolerance
            above 0); its cost grows faster than the product.
    """

    max_chars: int = 8192
    max_depth: int = 64
    max_nodes: int = 1024
    max_edit_nodes: int = 32

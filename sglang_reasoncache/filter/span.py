# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a response are reasoning, when the model marks it (``<think>``, ``</think>``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ReasoningSpan:
    """Follows one response token by token, O(1) each. Not thread safe.

    A marker is a single token and belongs to no reasoning. A token that is both a
    start and an end marker counts as an end.

    Attributes:
        inside: whether the next token is reasoning, unless it is a marker.
    """

    __slots__ = ("_end_ids", "_start_ids", "inside")

    def __init__(self, start_ids: frozenset[int], end_ids: frozenset[int], inside: bool) -> None:
        self._start_ids = start_ids
        self._end_ids = end_ids
        self.inside = inside

    def push(self, token_id: int) -> bool:
        """Take the next token; whether it is reasoning. One that is not ends the open step."""
        if token_id in self._end_ids or token_id in self._start_ids:
            self.inside = token_id not in self._end_ids
            return False
        return self.inside


class ReasoningMarkers(NamedTuple):
    """What a model's reasoning parser says about its markers.

    Attributes:
        start_ids: tokens that open reasoning.
        end_ids: tokens that close it.
        force: a response begins inside, the prompt having no marker.
    """

    start_ids: frozenset[int]
    end_ids: frozenset[int]
    force: bool

    def inside_after(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the response to a prompt begins inside reasoning.

        The last marker of the prompt decides, for many templates open reasoning there, or
        open and close it where the client wants none; without a marker, ``force``. An earlier
        turn's end marker counts too: a response whose reasoning then starts without a marker
        is taken as having none, and shares nothing.
        """
        # Vectorised: a prompt may have 100 000 tokens, and the scheduler waits.
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        marks = np.flatnonzero(np.isin(prompt, [*self.start_ids, *self.end_ids]))
        return int(prompt[marks[-1]]) not in self.end_ids if len(marks) else self.force

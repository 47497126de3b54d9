# SPDX-License-Identifier: Apache-2.0
"""Requests that search with beams (``beam_width``). SGLang ends them if slots are missing, instead of
retracting them, so while they run admission reserves what SGLang reserves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from sglang_reasoncache.compat.types import Request


class Beams:
    """The requests with beams that hold slots, from the first chunk of their prompt on. True while there are
    any."""

    def __init__(self) -> None:
        self._requests: weakref.WeakSet[Request] = weakref.WeakSet()

    def begin(self, reqs: Iterable[Request]) -> None:
        """A prefill of ``reqs`` begins."""
        self._requests.update(req for req in reqs if req.beam_group is not None)

    def __bool__(self) -> bool:
        # Python collects a group of beams some time later, on each rank at another time. So a request counts by
        # what it holds: SGLang frees what it aborts, and says of some of these never that they are finished.
        return any(not req.finished() and req.kv.holds_kv for req in self._requests)

# SPDX-License-Identifier: Apache-2.0
"""Policies that act only while the pool is short, by how much of it is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sglang_reasoncache.eviction.policies.contract import NamedPolicy


class PoolPressure:
    """Which policies with ``when`` above 0 may act now.

    Its use is read at every poll and release: what filled the pool may be gone before a request
    has too much again.
    """

    def __init__(self, evictors: Iterable[NamedPolicy], use: Callable[[], float]) -> None:
        self._use = use
        #: ``when`` and ``until`` of the policies that wait; others may always act.
        self.bounds = {
            name: (when, float(getattr(policy, "until", when)))
            for name, policy in evictors
            if (when := float(getattr(policy, "when", 0.0)))
        }
        self._acting: set[str] = set()

    def poll(self) -> None:
        """See which policies begin or end to act."""
        if self.bounds:
            use = self._use()
            for name in self.bounds:
                self._acts(name, use)

    def lets(self, name: str) -> bool:
        """Whether the policy may act now. Called when it would: evictions change the use."""
        return name not in self.bounds or self._acts(name, self._use())

    def _acts(self, name: str, use: float) -> bool:
        when, until = self.bounds[name]
        if use > (until if name in self._acting else when):
            self._acting.add(name)
        else:
            self._acting.discard(name)
        return name in self._acting

    def reset(self) -> None:
        """The pool is empty."""
        self._acting.clear()


def pool_use(allocator: Any, tree: Any) -> float:
    """Share of the slots that are neither free nor evictable, as SGLang's log line has it."""
    return 1.0 - (allocator.available_size() + tree.evictable_size()) / allocator.size

# SPDX-License-Identifier: Apache-2.0
"""Policies that act only while the pool is short, by how much of it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_reasoncache.policies.contract import Policy


class PoolPressure:
    """One per scheduler.

    A policy with ``when`` above 0 begins to act when more than that share of the pool's
    slots is in use, and goes on until no more than ``until`` is. In use is neither free
    nor evictable, by SGLang's own counts, which are the same on all ranks.

    Args:
        use: The share in use, asked anew each time: a drop changes it.
    """

    def __init__(self, use: Callable[[], float]) -> None:
        self._use = use
        self._acting: set[str] = set()

    def lets(self, name: str, policy: Policy) -> bool:
        """Whether the policy may act now. Asked when it would."""
        when = waits_for(policy)
        if not when:
            return True
        bound = getattr(policy, "until", when) if name in self._acting else when
        if self._use() > bound:
            self._acting.add(name)
            return True
        self._acting.discard(name)
        return False


def waits_for(policy: Policy) -> float:
    """The share of the pool above which the policy acts; 0: at any."""
    return float(getattr(policy, "when", 0.0))


def pool_use(allocator: Any, tree: Any) -> float:
    """Share of the slots that are neither free nor evictable, as SGLang's log line has it."""
    return 1.0 - (allocator.available_size() + tree.evictable_size()) / allocator.size

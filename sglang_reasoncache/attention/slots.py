# SPDX-License-Identifier: Apache-2.0
"""What an attention backend asks about the slots that it reads. The slots' allocator knows the answers."""

from typing import Any, Protocol

from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.owner import NO_OWNER, SlotOwner
from sglang_reasoncache.cache.repair import Repairs


class Slots(Protocol):
    """Answers may change between two forwards, so they must be read before each forward."""

    @property
    def has_shifted_slots(self) -> bool:
        """Whether a row may name a slot at a position other than the one its key was rotated for."""

    @property
    def has_evicted(self) -> bool:
        """Whether rows may have entries below 0 (evicted positions)."""

    @property
    def repairs(self) -> Repairs:
        """The tokens of cached documents that prefills compute again."""

    @property
    def owner(self) -> SlotOwner:
        """Whom the allocator asks; here for :meth:`SlotOwner.once_more`."""


class StockSlots:
    """Slots of SGLang's own allocator, without ``--enable-reasoncache``: each is read at the position that its
    key was rotated for, no position is evicted, no prompt is repaired, and an error ends the scheduler."""

    has_shifted_slots = False
    has_evicted = False
    owner = NO_OWNER

    def __init__(self) -> None:
        self.repairs = Repairs()


def slots_of(allocator: Any) -> Slots:
    """The slots of an ``allocator``, which is ours or one of SGLang's."""
    return allocator if isinstance(allocator, Shared) else StockSlots()

# SPDX-License-Identifier: Apache-2.0
"""What all our parts of the prefix cache use: the allocator with its continuations, and rows' host copies."""

import dataclasses
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.continuation import Continued, Part
from sglang_reasoncache.cache.continuations import Continuations
from sglang_reasoncache.cache.freed import NOTHING_SHARED, FreedEntries
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.owner import SlotOwner
from sglang_reasoncache.cache.swap import Restored
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import takes_part


@dataclasses.dataclass
class ContinuedLock(compat.TreeLock):
    """SGLang's lock of a path in the tree, and the continuations that are pinned beside it.

    Attributes:
        parts: These continuations. None are pinned if it is empty.
        reads_ending: Whether the request needs their ending.
    """

    parts: tuple[Part, ...] = ()
    reads_ending: bool = False


class OverSharedSlots(compat.UnifiedRadixCache):
    """``UnifiedRadixCache`` over one of our allocators."""

    token_to_kv_pool_allocator: Shared

    @property
    def owner(self) -> SlotOwner:
        """Whom this tree asks."""
        return self.token_to_kv_pool_allocator.owner

    @property
    def _continuations(self) -> Continuations:
        return self.token_to_kv_pool_allocator.continuations

    @property
    def _freed(self) -> FreedEntries:
        return self.token_to_kv_pool_allocator.freed

    def reset(self) -> None:
        self.owner.flushed()
        super().reset()

    @property
    def _window_in_pages(self) -> int:
        """Number of slots in the whole pages of a window that ends with a page."""
        return -(-int(self.sliding_window_size) // self.page_size) * self.page_size

    def _freed_of_window(self, req: Request) -> int:
        """The position up to which ``req`` has lost its slots in the window pool."""
        return compat.freed_of_window(req.kv, self.page_size)[1]

    def _host_row(self, kv: Any) -> HostRow:
        return self.token_to_kv_pool_allocator.rows.get(kv.req_pool_idx, NOTHING_SHARED)

    def _first_approximate(self, req: Request, row: HostRow) -> int | None:
        """The first position whose KV is approximate: it or one before it was redirected, or it was decoded by
        layers that read some pages only. None if all is exact."""
        first = first_shared(req, row)
        read_whole = self.token_to_kv_pool_allocator.read_whole
        if read_whole is None or not req.output_ids or not takes_part(req):
            return first
        chosen = max(read_whole, len(req.origin_input_ids))
        if chosen >= len(req.origin_input_ids) + len(req.output_ids):
            return first
        return chosen if first is None else min(first, chosen)

    def insert(self, params: Any) -> Any:
        with self._freed.inserting(params.value):
            return super().insert(params)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        row = self._host_row(kv)
        if row.repaired is not None:
            entries = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
            self.owner.once_more(row.repaired.restore, entries)
            row.repaired = None
        with self._freed.of(row):
            super().free_kv_row(kv, ranges)


def first_shared(req: Request, row: HostRow) -> int | None:
    """The lowest position of a request that was ever redirected, in ``row``, before the request was swapped out
    or in a continuation. From there on its KV is approximate. None if all is exact."""
    positions = [row.first_shared]
    node = req.last_node
    if isinstance(node, Restored):
        positions.append(node.first_shared)
        node = node.node
    if isinstance(node, Continued):
        positions.append(node.first_approximate)
    return min((first for first in positions if first is not None), default=None)

# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified prefix cache (radix tree) over rows that share slots.

Exact publishing inserts a row up to its first position that is shared, evicted, or names a slot that
another request had too. So a node names no slot twice, every slot of an unlocked node has one
reference, and both of SGLang's tree cores (Rust and Python) count correctly without change. Aliased
publishing inserts shared positions too (``cache/aliased.py``) and needs the Python core.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.aliased import PLAIN, AliasedComponent, Leaf, leaf_of
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import CacheInitParams, RadixKey, Request

_NOTHING_SHARED = HostRow()


def publish_aliased(params: CacheInitParams) -> None:
    """Change ``params`` so that the tree made with them publishes finished rows beyond their first
    shared position. SGLang then uses its Python core."""
    params.component_registry_override = {compat.ComponentType.FULL: AliasedComponent}


class SharedRadixCache(compat.UnifiedRadixCache):
    """``UnifiedRadixCache`` over one of our allocators."""

    def __init__(self, params: CacheInitParams) -> None:
        # The ``Controller``, set once it is made.
        self.controller: Any = None
        #: Records that a path's slots are cached at positions 0 and on. Set with the controller.
        self.record_path: Callable[[torch.Tensor], None] = lambda slots: None
        # While slots are freed: the row that they come from; while the tree inserts a row: its slots.
        self._row: HostRow = _NOTHING_SHARED
        self._inserted: torch.Tensor | None = None
        super().__init__(params)
        found = self.components[compat.ComponentType.FULL]
        self._aliased = found if isinstance(found, AliasedComponent) else None
        self.token_to_kv_pool_allocator.tree = self

    def reset(self) -> None:
        if self.controller is not None:
            self.controller.reset()
        super().reset()
        for component in self.components.values():
            if isinstance(component, AliasedComponent):
                component.aliased = 0

    def count_aliases(self) -> int:
        """Entries of nodes whose slot is counted at another entry of their path."""
        return 0 if self._aliased is None else self._aliased.aliased

    def checkpoint_into_tree(self, req: Request, *, up_to: int, **kwargs: Any) -> None:
        """Publish the row of ``req`` up to position ``up_to``, without what must not be published; nothing
        if deciding that fails. All our code that may fail runs before the tree changes.

        A running request publishes its prompt only: positions that the tree owns cannot be redirected.
        If a policy may evict positions of the prompt, a running request publishes nothing.
        """
        running = not req.finished()
        if running and self.controller is not None and self.controller.keeps_prompt(req):
            # Not for the last chunk, which ``after_prefill`` sees, and not inside a free group.
            grouped = self.token_to_kv_pool_allocator.free_group is not None
            if up_to < len(req.full_untruncated_fill_ids) and not grouped:
                self.controller.after_chunk(req, up_to)
            return
        end, leaf = req.kv.cache_protected_len, PLAIN
        with self._contained():
            known = req, up_to, running
            end, leaf = self.token_to_kv_pool_allocator.once_more(self._publishable, *known)
        if self.is_mamba_enabled and end < up_to:
            # The state of the state layers is that of the whole length.
            if running:
                return
            if not self.enable_mamba_extra_buffer:
                # With a copy of an earlier state SGLang looks for one that is short enough itself.
                end = 0
        self._row = self._host_row(req.kv)
        if self._aliased is not None:
            self._aliased.leaf = leaf
        try:
            super().checkpoint_into_tree(req, up_to=end, **kwargs)
        finally:
            self._row = _NOTHING_SHARED
            if self._aliased is not None:
                self._aliased.leaf = PLAIN

    def _publishable(self, req: Request, up_to: int, running: bool) -> tuple[int, Leaf]:
        """Up to which position the row may be published, and what the tree notes of the new node."""
        if running and len(req.output_ids):
            # After a retraction a prefilling request has output already.
            up_to = min(up_to, len(req.origin_input_ids))
        row = self._host_row(req.kv)
        first_shared = row.first_shared
        # KV after the first evicted position was computed without it.
        up_to = min([up_to, *row.evicted_from(0)[:1].tolist()])
        # The tree would count a slot that another row names as evictable, but evicting it frees nothing.
        up_to = row.first_in_other_rows(up_to)
        if first_shared is not None:
            assert not running, "a shared row is not published while its request runs"
            if self._aliased is None:
                up_to = min(up_to, first_shared)
        protected = req.kv.cache_protected_len
        if self._aliased is None:
            return max(up_to, protected), PLAIN
        up_to = max(min(up_to, self._exact_length(req, _key(req, up_to))), protected)
        key = _key(req, up_to).page_aligned(self.page_size)
        matched = sum(found for _, _, found in self._path(key))
        inexact = None if first_shared is None else max(first_shared - matched, 0)
        known = row.between(0, up_to)
        of_leaf, aliases = known[matched : len(key)], list[int]()
        # Entries before ``protected`` belong to the tree; up to ``matched`` it has its own copy.
        seen = set(known[:protected].tolist())
        for offset in np.flatnonzero(of_leaf).tolist():
            slot = int(of_leaf[offset])
            if slot in seen:
                aliases.append(offset)
            seen.add(slot)
        return up_to, Leaf(of_leaf if of_leaf.any() else None, tuple(aliases), inexact)

    def insert(self, params: Any) -> Any:
        self._inserted = params.value
        try:
            return super().insert(params)
        finally:
            self._inserted = None

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        self._row = self._host_row(kv)
        try:
            super().free_kv_row(kv, ranges)
        finally:
            self._row = _NOTHING_SHARED

    def _host_row(self, kv: Any) -> HostRow:
        return self.token_to_kv_pool_allocator.rows.get(kv.req_pool_idx, _NOTHING_SHARED)

    def known_of(self, slots: torch.Tensor, start: int) -> np.ndarray:
        """For each entry of a row or node, int64 ``[entries]``: the slot if it may be shared, ``EVICTED``, or
        0 if the entry shares nothing. ``start``: position of the first entry.

        While a row is inserted, the tree frees slots of tokens that the tree already holds. These are
        views of the inserted tensor, so their address tells the position (``tests/contract``)."""
        if self._inserted is not None:
            start = (slots.data_ptr() - self._inserted.data_ptr()) // slots.element_size()
            assert 0 <= start <= len(self._inserted) - len(slots), "not a part of the row"
        return self._row.between(start, start + len(slots))

    def on_release(self, req: Request, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        row = self.token_to_kv_pool_allocator.rows.pop(req.kv.req_pool_idx, _NOTHING_SHARED)
        if self.controller is not None:
            self.controller.on_release(req, row)

    def load_back(self, node_id: Any, mem_quota: int | None = None, req: Any = None) -> bool:
        """Load evicted nodes of a path from the host. The tree holds exact KV only, so their keys are rotated
        for their positions in the path, which are recorded."""
        loaded: bool = super().load_back(node_id, mem_quota, req=req)
        if loaded:
            self.token_to_kv_pool_allocator.once_more(self._record_path, node_id, req)
        return loaded

    def _record_path(self, node_id: Any, req: Request | None) -> None:
        root = self.root_node_handle(None if req is None else req.extra_key)
        self.record_path(self.tree_core.collect_full_device_indices(node_id, root))

    def reads_shifted(self, reqs: Iterable[Request]) -> bool:
        """Whether the row of any of ``reqs`` may name a slot away from its cached position: after a
        redirect, or if its cached prefix ends in a node with approximate KV."""
        return self.token_to_kv_pool_allocator.has_shifted_slots and any(
            self._is_inexact(req.last_node) or self._host_row(req.kv).first_shared is not None
            for req in reqs
        )

    def _is_inexact(self, node_id: Any) -> bool:
        """Whether a path that ends in this node has approximate KV. Nodes below an inexact one are
        inexact."""
        if self._aliased is None or node_id is None:
            return False
        return leaf_of(self.tree_core.node_by_id(node_id)).inexact is not None

    def evicted_of(self, reqs: Sequence[Request]) -> list[int]:
        """Evicted positions of each of ``reqs``, a number each. The tree holds none."""
        return [self._host_row(req.kv).evicted for req in reqs]

    def match_prefix(self, params: Any) -> Any:
        if params.req is not None and self._aliased is not None:
            length = 0
            with self._contained():
                known = params.req, params.key
                length = self.token_to_kv_pool_allocator.once_more(self._exact_length, *known)
            if length < len(params.key):
                params = dataclasses.replace(params, key=params.key[:length])
        return super().match_prefix(params)

    def _contained(self) -> Any:
        """The context for work on the tree. A single rank contains exceptions. With several ranks they
        are raised and end the scheduler: a rank whose tree differs from the others' would admit
        different requests."""
        alone = self.controller is not None and self.controller.containment.alone
        return self.controller.containment if alone else contextlib.nullcontext()

    def _is_exact_only(self, req: Request) -> bool:
        return self.controller is not None and not self.controller.allows(req)

    def _exact_length(self, req: Request, key: RadixKey) -> int:
        """Length of the prefix of ``key`` that ``req`` may read: all of it, or, if ``req`` opted out, up to
        the first position with approximate KV, rounded down to whole pages."""
        if not self._is_exact_only(req):
            return len(key)
        for at, node, matched in self._path(key):
            inexact = leaf_of(node).inexact
            if inexact is not None and inexact < matched:
                return (at + inexact) // self.page_size * self.page_size
        # The request computes the rest itself.
        return len(key)

    def _path(self, key: RadixKey) -> Iterator[tuple[int, Any, int]]:
        """Nodes of the Python core along ``key``: first position, node, and how many of its tokens match."""
        node, at, rest = self.tree_core.root_node, 0, key.page_aligned(self.page_size)
        while len(rest):
            child = node.children.get(rest.child_key(self.page_size))
            if child is None:
                return
            matched = child.key.match(rest, page_size=self.page_size)
            yield at, child, matched
            if matched < len(child.key):
                return
            at, node, rest = at + matched, child, rest[matched:]


def _key(req: Request, up_to: int) -> RadixKey:
    tokens = req.full_untruncated_fill_ids[:up_to]
    return compat.RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)

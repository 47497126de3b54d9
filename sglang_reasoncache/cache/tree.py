# SPDX-License-Identifier: Apache-2.0
"""Prefix cache whose nodes may name a slot more than once; a slot counts once, where it is topmost.

That position is unique: a second reference comes from a request with the slot in its own row, so
it is published below the first, and a path ends before its row's first evicted position, and before
the first whose slot another request had, too. Locks
and leaf-first eviction run along paths: the topmost holder is locked with any, and evicted last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.slot_names import SlotNames
from sglang_reasoncache.compat.types import CacheInitParams, RadixKey, Request, TreeNode


class _Leaf(NamedTuple):
    """What there is to say about the leaf that publishing a row adds."""

    names: np.ndarray | None = None
    aliases: Sequence[int] = ()
    inexact: int | None = None  # the row's first position whose KV is an approximation


_NOTHING_SHARED, _PLAIN = SlotNames(), _Leaf()


class SharedRadixCache(compat.RadixCache):
    """``RadixCache`` with slots shared inside a path; the allocator must be one of ours.

    ``publish_aliased``: a finished request's row is published beyond its first shared position.
    """

    def __init__(self, params: CacheInitParams, *, publish_aliased: bool) -> None:
        self.publish_aliased = publish_aliased
        # ``plugin/controller.py``, once it is made.
        self.controller: Any = None
        super().__init__(params)
        self.token_to_kv_pool_allocator.names_of = self._names_of
        self.token_to_kv_pool_allocator.aliases_of_tree = self.count_aliases

    def reset(self) -> None:
        # Offsets of a node that do not count.
        self._aliases: dict[TreeNode, list[int]] = {}
        # The first offset whose KV is an approximation, as all behind a shared position is.
        self._inexact: dict[TreeNode, int] = {}
        # What the host knows of a node's slots, where it shares any; by the identity of its value.
        self._names: dict[int, np.ndarray] = {}
        self._row, self._leaf = _NOTHING_SHARED, _PLAIN
        self._alias_evictable = self._alias_protected = 0
        if self.controller is not None:
            self.controller.reset()
        super().reset()

    def evictable_size(self) -> int:
        """In slots, as the next one."""
        return super().evictable_size() - self._alias_evictable

    def protected_size(self) -> int:
        return super().protected_size() - self._alias_protected

    def count_aliases(self) -> int:
        """Positions in the tree that reuse a slot counted elsewhere on their path."""
        return self._alias_evictable + self._alias_protected

    alias_positions = property(count_aliases)

    def checkpoint(self, req: Request, *, up_to: int, **kwargs: Any) -> None:
        """Publish the row up to ``up_to``, less what may not be published yet; nothing where that
        cannot be told. All of ours that may fail comes before the tree changes.

        A running request publishes no output: positions the tree owns cannot be redirected any
        more. Where a policy may evict positions of the prompt, it publishes nothing.
        """
        running = not req.finished()
        if running and self.controller is not None and self.controller.keeps_prompt(req):
            # The last chunk is seen later, outside of the group in which its result frees.
            grouped = self.token_to_kv_pool_allocator.free_group is not None
            if up_to < len(req.full_untruncated_fill_ids) and not grouped:
                self.controller.after_chunk(req, up_to)
            return
        end, leaf = req.kv.cache_protected_len, _PLAIN
        with self._contained():
            known = req, up_to, running
            end, leaf = self.token_to_kv_pool_allocator.once_more(self._publishable, *known)
        self._row, self._leaf = self._names_of_row(req.kv), leaf
        try:
            super().checkpoint(req, up_to=end, **kwargs)
        finally:
            self._row, self._leaf = _NOTHING_SHARED, _PLAIN

    def _publishable(self, req: Request, up_to: int, running: bool) -> tuple[int, _Leaf]:
        """How much of a row may be published, and what becomes of it."""
        if running and len(req.output_ids):
            # It may have some after a retraction.
            up_to = min(up_to, len(req.origin_input_ids))
        state = self._state_of(req)
        if state is not None and state.evicted.first is not None:
            # What was computed behind an evicted position did not see it.
            up_to = min(up_to, state.evicted.first)
        if state is not None and state.across:
            # Evicting what another request reads would free nothing, and be counted on.
            up_to = min(up_to, state.slot_aliases.first(state.across.values(), up_to))
        first_shared = None if state is None else state.first_shared
        if first_shared is not None:
            assert not running, "a shared row is not published while its request runs"
            if not self.publish_aliased:
                up_to = min(up_to, first_shared)
        if self._inexact:
            up_to = min(up_to, self._exact_length(req, _key(req, up_to)))
        protected = req.kv.cache_protected_len
        up_to = max(up_to, protected)
        names = self._names_of_row(req.kv).between(0, up_to)
        if not names.any():
            return up_to, _Leaf(inexact=first_shared)
        key = _key(req, up_to).page_aligned(self.page_size)
        matched = sum(found for _, _, found in self._path(key))
        of_leaf, aliases = names[matched : len(key)], list[int]()
        # What is above belongs to the tree, or is another request's copy of the same tokens.
        seen = set(names[:protected].tolist())
        for offset in np.flatnonzero(of_leaf).tolist():
            slot = int(of_leaf[offset])
            if slot in seen:
                aliases.append(offset)
            seen.add(slot)
        return up_to, _Leaf(of_leaf if of_leaf.any() else None, aliases, first_shared)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        self._row = self._names_of_row(kv)
        try:
            super().free_kv_row(kv, ranges)
        finally:
            self._row = _NOTHING_SHARED

    def _names_of_row(self, kv: Any) -> SlotNames:
        return self.token_to_kv_pool_allocator.names.get(kv.req_pool_idx, _NOTHING_SHARED)

    def _names_of(self, slots: torch.Tensor, start: int) -> np.ndarray:
        """See ``names_of`` of the allocator."""
        names = self._names.get(id(slots))
        return self._row.between(start, start + len(slots)) if names is None else names

    def on_release(self, req: Request, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.token_to_kv_pool_allocator.names.pop(req.kv.req_pool_idx, None)
        if self.controller is not None:
            self.controller.on_release(req)

    def _insert_helper(self, node: TreeNode, key: RadixKey, *args: Any, **kwargs: Any) -> Any:
        matched, last = super()._insert_helper(node, key, *args, **kwargs)
        # A leaf was added exactly when the key was not matched to its end.
        if matched < len(key):
            names, aliases, inexact = self._leaf
            if names is not None:
                self._names[id(last.value)] = names
            if aliases:
                self._aliases[last] = list(aliases)
                # A new leaf is unlocked, so it is evictable.
                self._alias_evictable += len(aliases)
            if last.parent in self._inexact:
                self._inexact[last] = 0
            elif inexact is not None and inexact < len(key):
                self._inexact[last] = max(inexact - matched, 0)
        return matched, last

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> Any:
        names, inexact = self._names.get(id(child.value)), self._inexact.get(child)
        aliases = self._aliases.get(child, ())
        above = [offset for offset in aliases if offset < split_len]
        below = [offset - split_len for offset in aliases if offset >= split_len]
        before = id(child.value)
        upper = super()._split_node(key, child, split_len)
        if names is not None:
            del self._names[before]
            self._names[id(upper.value)] = names[:split_len]
            self._names[id(child.value)] = names[split_len:]
        # Both halves keep the lock state, so the two sums do not change.
        for node, offsets in ((upper, above), (child, below)):
            self._aliases.pop(node, None)
            if offsets:
                self._aliases[node] = offsets
        if inexact is not None:
            if inexact < split_len:
                self._inexact[upper] = inexact
            self._inexact[child] = max(inexact - split_len, 0)
        return upper

    def inc_lock_ref(self, node: TreeNode) -> Any:
        self._move_aliases(node, from_lock_ref=0, sign=1)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, params: Any = None) -> Any:
        self._move_aliases(node, from_lock_ref=1, sign=-1)
        return super().dec_lock_ref(node, params)

    def _move_aliases(self, node: TreeNode, *, from_lock_ref: int, sign: int) -> None:
        """Mirror what a lock change does to SGLang's two sums, for aliased offsets."""
        if self.disable or not self._aliases:
            return
        while node is not self.root_node:
            if node.lock_ref == from_lock_ref:
                shifted = sign * len(self._aliases.get(node, ()))
                self._alias_evictable -= shifted
                self._alias_protected += shifted
            node = node.parent

    def evict(self, params: Any) -> Any:
        """Evict until ``params.num_tokens`` *slots* came back or nothing is left to evict."""
        wanted, freed = params.num_tokens, 0
        while True:
            before = self._alias_evictable
            result = super().evict(compat.EvictParams(num_tokens=wanted - freed))
            freed += result.num_tokens_evicted - (before - self._alias_evictable)
            if freed >= wanted or result.num_tokens_evicted == 0:
                return compat.EvictResult(num_tokens_evicted=freed)

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self._alias_evictable -= len(self._aliases.pop(node, ()))
        self._inexact.pop(node, None)
        self._names.pop(id(node.value), None)

    def reads_shifted(self, reqs: Iterable[Request]) -> bool:
        """Whether the row of any of ``reqs`` may name a slot away from its cached position: behind
        its first inexact position, and what is below an inexact node is inexact."""
        return self.token_to_kv_pool_allocator.has_shifted_slots and any(
            req.last_node in self._inexact
            or ((state := self._state_of(req)) is not None and state.first_shared is not None)
            for req in reqs
        )

    def evicted_of(self, reqs: Sequence[Request]) -> list[int]:
        """How many positions of each of ``reqs`` were evicted; a path of the tree has none."""
        if not self.token_to_kv_pool_allocator.has_evicted:
            return [0] * len(reqs)
        states = [self._state_of(req) for req in reqs]
        return [0 if state is None else state.evicted.count for state in states]

    def _state_of(self, req: Request) -> Any:
        return None if self.controller is None else self.controller.state_of(req)

    def match_prefix(self, params: Any) -> Any:
        if params.req is not None and self._inexact:
            length = 0
            with self._contained():
                known = params.req, params.key
                length = self.token_to_kv_pool_allocator.once_more(self._exact_length, *known)
            if length < len(params.key):
                params = compat.MatchPrefixParams(key=params.key[:length], req=params.req)
        return super().match_prefix(params)

    def _contained(self) -> Any:
        """For what ranks do alike without asking one another: a tree of its own would lead a rank
        astray, so it ends where there are others."""
        alone = self.controller is not None and self.controller.containment.alone
        return self.controller.containment if alone else contextlib.nullcontext()

    def _is_exact_only(self, req: Request) -> bool:
        return self.controller is not None and not self.controller.allows(req)

    def _exact_length(self, req: Request, key: RadixKey) -> int:
        """Longest prefix of ``key`` that meets no inexact position of the tree, if ``req`` minds."""
        if not self._is_exact_only(req):
            return len(key)
        for at, node, matched in self._path(key):
            inexact = self._inexact.get(node)
            if inexact is not None and inexact < matched:
                return (at + inexact) // self.page_size * self.page_size
        # What the tree does not hold is the request's own.
        return len(key)

    def _path(self, key: RadixKey) -> Iterator[tuple[int, TreeNode, int]]:
        """Where ``key`` meets nodes: position, node, and how much of it."""
        node, at, rest = self.root_node, 0, key.page_aligned(self.page_size)
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

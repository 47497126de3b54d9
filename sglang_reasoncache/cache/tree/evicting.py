# SPDX-License-Identifier: Apache-2.0
"""Counts and evicts continuations beside SGLang's tree core."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.tree.base import OverSharedSlots


class EvictsContinuations(OverSharedSlots):
    """A prefix cache whose sizes and evictions include continuations."""

    #: Slots of continuations that are to be evicted next, because as large a share of the core's were.
    _owed = 0.0
    #: Slots of continuations that were freed while the core evicted.
    _freed_before = 0

    def reset(self) -> None:
        super().reset()
        self._owed = 0.0

    def evictable_size(self) -> int:
        return int(super().evictable_size()) + self._continuations.evictable

    def full_evictable_size(self) -> int:
        return int(super().full_evictable_size()) + self._continuations.evictable

    def protected_size(self) -> int:
        return int(super().protected_size()) + self._continuations.protected

    def full_protected_size(self) -> int:
        return int(super().full_protected_size()) + self._continuations.protected

    def mamba_evictable_size(self) -> int:
        mine = self._continuations.evictable_endings if self.is_mamba_enabled else 0
        return int(super().mamba_evictable_size()) + mine

    def mamba_protected_size(self) -> int:
        mine = self._continuations.protected_endings if self.is_mamba_enabled else 0
        return int(super().mamba_protected_size()) + mine

    def swa_evictable_size(self) -> int:
        mine = self._continuations.evictable_endings if self.is_swa_enabled else 0
        return int(super().swa_evictable_size()) + mine

    def swa_protected_size(self) -> int:
        mine = self._continuations.protected_endings if self.is_swa_enabled else 0
        return int(super().swa_protected_size()) + mine

    @property
    def _of_endings(self) -> tuple[str, str]:
        """SGLang's names for how many endings to evict, and how many were: states, or slots of windows."""
        if self.is_mamba_enabled:
            return "mamba_num", "mamba_num_evicted"
        return "swa_num_tokens", "swa_num_tokens_evicted"

    def evict(self, params: Any) -> Any:
        return self._evict_both(super().evict, params)

    def evict_for_alloc(self, params: Any, **named: Any) -> Any:
        return self._evict_both(super().evict_for_alloc, params, **named)

    def _evict_both(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict the slots that continuations owe, then nodes of the core, each with the continuations of its
        path, then, if these are too few, more continuations. Of either the least recently used go first. For
        what the core gives, continuations owe as large a share as they have of what is evictable, because
        neither knows when the other's were used. A later call evicts it."""
        mine = self._continuations
        requested, evicted = self._of_endings
        if not len(mine):
            self._owed = 0.0
            return evict(params, **named)
        if getattr(params, requested) > 0:
            return self._evict_with_endings(evict, params, **named)
        wanted = params.num_tokens
        if wanted <= 0:
            return evict(params, **named)
        had = mine.evictable_endings
        of_core = int(super().full_evictable_size())
        of_mine = mine.evictable
        paid = self._pay() if wanted < of_mine + of_core else 0
        freed = paid
        endings = had - mine.evictable_endings
        while True:
            # Half of what is missing at a time, because continuations may give the rest.
            left = max(wanted - freed, 0)
            left = max(left // 2, 1) if left and mine.evictable else left
            result = self._evict_core(evict, dataclasses.replace(params, num_tokens=left), **named)
            endings += getattr(result, evicted)
            freed += result.num_tokens_evicted
            if freed >= wanted or not result.num_tokens_evicted:
                break
        # Those of nodes of the core went with them.
        went = max(of_mine - paid - mine.evictable, 0)
        owed = self._owed + (freed - paid - went) * of_mine / max(of_core, 1) - went
        self._owed = max(owed, 0.0)
        had = mine.evictable_endings
        freed += mine.evict(wanted - freed, self._free_continued)
        endings += had - mine.evictable_endings
        return dataclasses.replace(result, num_tokens_evicted=freed, **{evicted: endings})

    def _pay(self) -> int:
        """Evict the slots of continuations that are owed, once they are as many as go of a continuation at
        once. Returns how many."""
        mine = self._continuations
        self._owed = min(self._owed, mine.evictable)
        if self._owed < 1 or self._owed < mine.least_evicted():
            return 0
        freed = mine.evict(int(self._owed), self._free_continued)
        self._owed = max(self._owed - freed, 0.0)
        return freed

    def _evict_core(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict nodes or endings of the core, and the continuations that go with them. The result counts
        both."""
        mine = self._continuations
        _, evicted = self._of_endings
        had = mine.evictable_endings
        self._freed_before = 0
        result = evict(params, **named)
        slots = mine.drop(self._is_cached, self._free_continued) + self._freed_before
        endings = getattr(result, evicted) + had - mine.evictable_endings
        return dataclasses.replace(
            result, num_tokens_evicted=result.num_tokens_evicted + slots, **{evicted: endings}
        )

    def _evict_with_endings(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict endings, of continuations and of the core, whichever have more, because neither knows when the
        other's were used. Then slots (:meth:`_evict_both`)."""
        mine = self._continuations
        requested, evicted = self._of_endings
        wanted = getattr(params, requested)
        had = mine.evictable_endings
        core = super().mamba_evictable_size if self.is_mamba_enabled else super().swa_evictable_size
        more = had - int(core())
        slots = mine.evict_endings(min(wanted, max((more + wanted) // 2, 0)), self._free_continued)
        endings = had - mine.evictable_endings
        # What went with the endings counts.
        others = {"num_tokens": max(params.num_tokens - slots, 0), requested: 0}
        result = self._evict_both(evict, dataclasses.replace(params, **others), **named)
        slots += result.num_tokens_evicted
        endings += getattr(result, evicted)
        if endings < wanted:
            left: dict[str, int] = {requested: wanted - endings}
            of_core = self._evict_core(evict, compat.EvictParams(**left))
            slots += of_core.num_tokens_evicted
            endings += getattr(of_core, evicted)
            had = mine.evictable_endings
            slots += mine.evict_endings(wanted - endings, self._free_continued)
            endings += had - mine.evictable_endings
        return dataclasses.replace(result, num_tokens_evicted=slots, **{evicted: endings})

    def _evict_device_leaf(self, node_id: int, *rest: Any) -> Any:
        """SGLang's walks evict KV of full attention only here, or behind this call, whichever the core is."""
        self._continuations.leaves(node_id)
        return super()._evict_device_leaf(node_id, *rest)

    def _is_cached(self, node: int) -> bool:
        try:
            return not self.tree_core.is_full_device_evicted(node)
        except KeyError:  # The tree has no node with this id any more.
            return False

    def _free_continued(
        self, slots: torch.Tensor, known: np.ndarray, ending: torch.Tensor | None
    ) -> int:
        if ending is not None and self.is_mamba_enabled:
            self.req_to_token_pool.mamba_allocator.free(ending)
        elif ending is not None:
            self.token_to_kv_pool_allocator.release_window(ending)
        if not len(known):
            return 0
        allocator = self.token_to_kv_pool_allocator
        return allocator.commit(self.owner.once_more(allocator.prepare_known, slots, known))

    def _free_values(self, *freed: Any) -> None:
        if self._continuations.borrowed:
            # What goes on with the nodes that are freed may name their slots.
            self._freed_before += self._continuations.drop(self._is_cached, self._free_continued)
        with self._freed.of_nodes():
            super()._free_values(*freed)

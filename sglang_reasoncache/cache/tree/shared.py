# SPDX-License-Identifier: Apache-2.0
"""Matches, locks and reads prefixes: of SGLang's tree, of continuations, and composed of documents."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.composition import (
    CachedDocuments,
    Composition,
    CompositionLock,
    marked,
)
from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.repair import RepairedRow, missed
from sglang_reasoncache.cache.states import begin_with
from sglang_reasoncache.cache.swap import Restored, Swapped, computed_length, swapped_of
from sglang_reasoncache.cache.tree.base import ContinuedLock, first_shared
from sglang_reasoncache.cache.tree.retracting import SwapsOut
from sglang_reasoncache.compat.carriers import CONTINUED, DIGESTS, SWAPPED
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import only_scores, takes_part

#: With a host tier a prompt reads at most so many approximate tokens. Behind more it is computed, and then goes
#: to the host as far as it is exact: only there is a conversation safe from eviction.
MOST_BESIDE_TIER = 16_384


class SharedRadixCache(SwapsOut):
    """SGLang's prefix cache over rows that share slots (see the package)."""

    #: A continuation is read if (new tokens of a prompt) x (tokens before them) is at most this. None: always.
    most_pairs: int | None = None

    def match_prefix(self, params: Any) -> Any:
        if params.cow_mamba and len(self._continuations):
            with self.owner.contained_alone():
                self._note_use(params)
        result = super().match_prefix(params)
        swapped = swapped_of(params.req)
        # SGLang ends the key of a request that asks for log-probabilities where they begin. They are there: the
        # request was prefilled before it was retracted.
        if swapped is not None and swapped.length > computed_length(params.req):
            # SGLang dropped the tokens behind the prompt.
            setattr(params.req, SWAPPED, None)
            swapped = None
        if swapped is not None and result.device_prefix_len < swapped.length:
            with self.owner.contained_alone():
                result = self._behind_continuation(swapped, params, result)
            missing = swapped.length - result.device_prefix_len
            return result._replace(
                host_hit_length=missing,
                swa_host_hit_length=min(missing, swapped.in_window),
                swa_branching_seqlen=None,
                mamba_branching_seqlen=None,
            )
        documents = marked(params.req) if self.owner.composes else None
        if documents is not None:
            with self.owner.contained_alone():
                return self._composed(documents, params, result)
            return result
        if swapped is None and params.req is not None and len(self._continuations):
            with self.owner.contained_alone():
                return self._continued(params, result)
        return result

    def _note_use(self, params: Any) -> None:
        """If SGLang will evict a state to give the request a slot, let it not be the state that the request is
        about to begin with."""
        states = self.req_to_token_pool.mamba_allocator
        if not params.req.kv.holds_mamba and not states.available_size():
            exact = not _may_read_approximate(params.req)
            self._continuations.use(self._continuations.match(params.key, len(params.key), exact))

    def _continued(self, params: Any, result: Any) -> Any:
        """``result``, which the core matched, or a continued prefix if that is longer."""
        held = result.device_prefix_len
        if self.is_mamba_enabled or self.is_swa_enabled:
            # SGLang's prefix ends at the last cached state or window; the tree may have KV behind it.
            held = result.full_kv_hit_length
        usable = result.device_prefix_len + result.host_hit_length
        parts = self._continuations.match(
            params.key,
            held,
            exact=not _may_read_approximate(params.req),
            matched=usable,
            digests=_digests_of(params),
        )
        if not parts:
            return result
        prefix = Continued(parts)
        first = prefix.first_approximate
        if first is not None and prefix.length - usable < usable - first:
            # It would make more exact positions approximate than it saves from being computed.
            return result
        approximate = 0 if first is None else prefix.length - first
        if self.cache_controller is not None and approximate > MOST_BESIDE_TIER:
            return result
        if self.most_pairs is not None:
            new = len(params.key) - prefix.length
            if new * prefix.length > self.most_pairs:
                return result
        if (
            params.cow_mamba
            and prefix.ending is not None
            and not begin_with(self, params.req, prefix)
        ):
            return result
        self._continuations.use(parts)
        return _ending_in(result, prefix)

    def _behind_continuation(self, swapped: Swapped, params: Any, result: Any) -> Any:
        """``result``, which the core matched, or the continued prefix that the request read before it was
        retracted, if that is longer and still cached."""
        parts = swapped.parts
        if (
            not parts
            or parts[-1].end <= result.device_prefix_len
            or parts[-1].end >= swapped.length
            or parts[0].node.start > result.device_prefix_len
            or not self._continuations.has(
                parts,
                np.asarray(params.key.token_ids, dtype=np.int64),
                exact=not _may_read_approximate(params.req),
            )
        ):
            return result
        prefix = Continued(parts)
        if not _is_as_exact(prefix.first_approximate, swapped.first_shared):
            return result
        self._continuations.use(parts)
        return _ending_in(result, prefix)

    def _composed(self, documents: CachedDocuments, params: Any, result: Any) -> Any:
        """``result``, which the tree matched, or a composed prefix if that is longer."""
        prefix = documents.compose(params.key, super().match_prefix, self.tree_core)
        if prefix is None:
            return result
        allocator = self.token_to_kv_pool_allocator
        req = params.req
        prefix.again = allocator.repairs.choose(req, prefix, self.owner.ranks)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        wanted = tokens + len(prefix.again) + self._output_of(req)
        if wanted > allocator.size_full:
            # A repair takes slots beside the cached ones, which the request locks. SGLang lets in no prompt
            # that is larger than the pool, but would keep this one waiting for ever, and all behind it.
            prefix.again = prefix.again[:0]
        if prefix.kept <= result.device_prefix_len:
            return result
        allocator.has_shifted_slots = True
        return result._replace(device_prefix_len=prefix.kept, **_nodes(prefix))

    def _output_of(self, req: Request) -> int:
        """The most slots that SGLang reserves for the output of a request, and for what pages round up."""
        future = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        return int(min(future, compat.CLIP_MAX_NEW_TOKENS)) + 3 * self.page_size

    def prefix_device_indices(self, req: Request) -> torch.Tensor:
        prefix = req.last_node
        # The request is about to be computed: a copy that was not loaded is of no use.
        setattr(req, SWAPPED, None)
        if isinstance(prefix, Restored):
            root = self.root_node_handle(req.extra_key)
            node = prefix.node
            path = self.tree_core.collect_full_device_indices(int(node), root)
            held = path[: req.prefix_len - len(prefix.slots)]
            if isinstance(node, Continued):
                held = node.slots(path)
            slots = torch.cat((held, prefix.slots))
            assert len(slots) == req.prefix_len, (len(slots), req.prefix_len)
            if self.is_swa_enabled and prefix.in_window < len(prefix.slots):
                # The positions before the last window have no slots there.
                compat.set_freed_of_window(req.kv, req.prefix_len - prefix.in_window)
            return slots
        setattr(req, CONTINUED, None)
        if isinstance(prefix, Continued):
            root = self.root_node_handle(req.extra_key)
            path = self.tree_core.collect_full_device_indices(int(prefix), root)
            if prefix.first_approximate is not None:
                setattr(req, CONTINUED, (prefix.first_approximate, prefix.length))
                self.owner.continued(prefix.length - prefix.first_approximate)
            return prefix.slots(path)
        if not isinstance(prefix, Composition):
            return super().prefix_device_indices(req)
        root = self.root_node_handle(req.extra_key)
        slots = prefix.slots(lambda node: self.tree_core.collect_full_device_indices(node, root))
        assert len(slots) == prefix.length, (len(slots), prefix.length)
        if len(prefix.again):
            prefix.repaired = RepairedRow(slots, prefix.kept)
        self.owner.composed(
            documents=len(prefix.nodes),
            tokens=prefix.kept,
            repaired=len(prefix.again),
            missed=missed(req, prefix),
        )
        return slots[: req.prefix_len]

    def lock(self, *where: Any, **named: Any) -> Any:
        """Lock the path of a node, all paths of a composition, or a path and its continuations."""
        if where and isinstance(where[0], Restored):
            where = where[0].node, *where[1:]
        if where and isinstance(where[0], Composition):
            return CompositionLock(map(super().lock, where[0].nodes))
        if where and isinstance(where[0], Continued):
            prefix = where[0]
            if prefix.ending is not None:
                # Of all states and windows, the request needs only the one that it begins with.
                kind = (
                    compat.ComponentType.MAMBA
                    if self.is_mamba_enabled
                    else compat.ComponentType.SWA
                )
                named["skip_lock_components"] = (kind,)
            lock = super().lock(int(prefix), *where[1:], **named)
            assert lock is not None, "a continued prefix begins on a path of the tree"
            reads = self._continuations.pin(prefix.parts)
            return ContinuedLock(lock.node, lock.receipt, parts=prefix.parts, reads_ending=reads)
        return super().lock(*where, **named)

    def unlock(self, lock: Any) -> None:
        if isinstance(lock, ContinuedLock):
            if lock.reads_ending:
                self._continuations.unread(lock.parts)
            self._continuations.unpin(lock.parts)
        for each in lock if isinstance(lock, CompositionLock) else [lock]:
            super().unlock(each)

    def prefetch_from_storage(
        self, request: Any, last_host_node_id: Any, *args: Any, **named: Any
    ) -> Any:
        """Load what storage has behind a cached prefix. Behind a continuation nothing is loaded: storage finds
        KV by the hash of the path of the tree, which does not hold the continuation's tokens."""
        if isinstance(last_host_node_id, Continued):
            return None
        return super().prefetch_from_storage(request, last_host_node_id, *args, **named)

    def load_back(self, node_id: Any, mem_quota: int | None = None, req: Any = None) -> bool:
        """Load evicted nodes of a path from the host. Records each slot's position in the path as its cached
        position: the tree holds exact KV only, so the slot's key was rotated for that position."""
        loaded: bool = super().load_back(node_id, mem_quota, req=req)
        if loaded:
            self.owner.once_more(self._path_loaded, node_id, req)
        return loaded

    def _path_loaded(self, node_id: Any, req: Request | None) -> None:
        root = self.root_node_handle(None if req is None else req.extra_key)
        self.owner.path_loaded(self.tree_core.collect_full_device_indices(node_id, root))

    def reads_shifted(self, reqs: Iterable[Request]) -> bool:
        """Whether any of ``reqs`` has a redirected position or a composed prefix. Only such requests may read a
        slot at a position other than the one for which the slot's key was rotated. Asked for each batch, so a
        server that never shared does not look at them."""
        return self.token_to_kv_pool_allocator.has_shifted_slots and any(
            isinstance(req.last_node, Composition)
            or first_shared(req, self._host_row(req.kv)) is not None
            for req in reqs
        )

    def evicted_of(self, reqs: Sequence[Request]) -> list[int] | None:
        """Number of evicted positions of each of ``reqs``. The tree holds no evicted positions. None if a
        request has ended since the batch was made: nobody knows here what its row, which the forward reads,
        still names."""
        if not self.token_to_kv_pool_allocator.has_evicted:
            return [0] * len(reqs)
        if not all(req.kv.holds_kv for req in reqs):
            return None
        return [self._host_row(req.kv).evicted for req in reqs]

    @property
    def least_window_pool(self) -> int:
        """The fewest slots of the window pool with which SGLang admits a request that comes back from the host,
        however little else is there: for the window that comes back, and for one to decode, beside the nodes
        that its cached prefix locks there, a window and the rest of the node where it begins. 0 without such a
        pool."""
        if not self.is_swa_enabled:
            return 0
        in_pages = self._window_in_pages
        interval: int = compat.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
        needed = self.sliding_window_size + self.page_size + in_pages
        locked = self.sliding_window_size + max(in_pages, interval + self.page_size)
        return int(needed + locked + 1)


def _is_as_exact(first: int | None, before: int | None) -> bool:
    """Whether KV that is approximate from ``first`` on may take the place of KV that was so from ``before`` on.
    None: all is exact. A continuation may have been cut and extended by a response that shared."""
    return first is None or (before is not None and before <= first)


def _ending_in(result: Any, prefix: Continued) -> Any:
    """SGLang's ``result`` of a match, with ``prefix`` in the place of what the core matched."""
    return result._replace(
        device_prefix_len=prefix.length,
        host_hit_length=0,
        swa_host_hit_length=0,
        swa_branching_seqlen=None,
        mamba_branching_seqlen=None,
        **_nodes(prefix),
    )


def _nodes(prefix: Continued | Composition) -> dict[str, Any]:
    """The fields of SGLang's result of a match that hold nodes."""
    return dict.fromkeys(("last_device_node", "last_host_node", "best_match_node"), prefix)


def _digests_of(params: Any) -> dict[int, bytes] | None:
    """Digests kept on a request for :meth:`Continuations.match`: a new dict if its prompt was replaced. None if
    the key goes on behind the prompt."""
    req = params.req
    prompt = req.origin_input_ids
    if len(params.key) > len(prompt):
        return None
    kept: tuple[Any, dict[int, bytes]] | None = getattr(req, DIGESTS, None)
    if kept is None or kept[0] is not prompt:
        kept = (prompt, {})
        setattr(req, DIGESTS, kept)
    return kept[1]


def _may_read_approximate(req: Request) -> bool:
    """Whether a request may read what other requests shared. Its log-probabilities of prompt tokens, its hidden
    states and its scores must be exact."""
    asks_prompt = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    needs_exact = asks_prompt or req.return_hidden_states or only_scores(req)
    return takes_part(req) and not needs_exact

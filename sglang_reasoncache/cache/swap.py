# SPDX-License-Identifier: Apache-2.0
"""Keeps the KV of retracted requests in host memory, so that it need not be computed again.

SGLang retracts a running request when slots run out, and later computes all its KV again. Instead, the KV is
copied to the host before the request's slots are reused. When SGLang admits the request again, the copy counts
as a host hit of the prefix cache: SGLang's admission reserves its slots and asks the tree to load it.

If a model has state layers (such as Mamba), the copy ends where SGLang has a state of the request, which is
copied, too. If sliding-window layers have a KV pool of their own, the last window is copied from there."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.continuation import Continued, Part
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.states import LastState, take_slot
from sglang_reasoncache.compat.carriers import SWAPPED
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.device.upload import upload

if TYPE_CHECKING:
    from sglang_reasoncache.cache.tree import SharedRadixCache


class CopiedRun(NamedTuple):
    """SGLang's copies (``tensors``) of the KV of positions ``[start, end)``: one for each pool."""

    start: int
    end: int
    tensors: Any


class Swapped:
    """The KV of a retracted request on the host. SGLang's request carries it.

    Attributes:
        length: Number of positions.
        runs: SGLang's copies of their KV, and of draft models' KV.
        cached_at: The position that each key was rotated for, int32 ``[length]`` in host memory. None if keys
            are read as cached.
        first_shared: The lowest position that was ever redirected. From there on the KV is approximate. None if
            all is exact.
        state: SGLang's copy of the state after the last position. None if the model has no state layers.
        window: SGLang's copies of the last positions' KV in the window pool, and in those of draft models.
            None without such a pool.
        in_window: Number of these positions. 0 without such a pool.
        parts: The continuations that the request read, whose KV need not be loaded while they are cached.
        num_bytes: Size of the copies.
        is_valid: Whether the KV may be used.
    """

    def __init__(
        self,
        length: int,
        runs: Sequence[CopiedRun],
        cached_at: torch.Tensor | None,
        first_shared: int | None,
        state: Any = None,
        window: Any = None,
        in_window: int = 0,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.length = length
        self.runs = runs
        self.cached_at = cached_at
        self.first_shared = first_shared
        self.state = state
        self.window = window
        self.in_window = in_window
        self.parts = parts
        self.is_valid = True
        self.num_bytes = _bytes_of((state, window, [run.tensors for run in runs]))

    def drop(self) -> None:
        """Free the copies, which may not be used any more."""
        self.is_valid = False
        self.runs = ()
        self.state = None
        self.window = None
        self.parts = ()
        self.num_bytes = 0


def swapped_of(req: Request | None) -> Swapped | None:
    """The KV of ``req`` that is on the host. None if there is none, or if the cache was flushed since."""
    swapped: Swapped | None = getattr(req, SWAPPED, None)
    return swapped if swapped is not None and swapped.is_valid else None


def copied_of(req: Request) -> int:
    """Number of positions of a retracted request whose KV our copy on the host has. What SGLang copies on the
    decode server of a PD pair does not count: fewer retractions ran as many requests there, with a shorter
    wait for the slowest (docs/benchmarks.md)."""
    swapped = swapped_of(req)
    return 0 if swapped is None else swapped.length


class Restored(NamedTuple):
    """Takes the place of a node of the tree in ``Request.last_node``: the path of ``node``, or the prefix that
    ends in a continuation, then the ``slots`` into which the request's own KV was loaded, int64 ``[loaded]`` on
    the device.

    ``first_shared``: see :class:`Swapped`. Known here until the row has a copy on the host that knows it.
    ``in_window``: how many of the last slots have a peer in the window pool.
    """

    node: Any
    slots: torch.Tensor
    first_shared: int | None
    in_window: int = 0


class HostSwap:
    """Copies KV of retracted requests to the host and back. All ranks call its methods together.

    Args:
        limit: Most bytes on the host, of this rank.
        rows: SGLang's pool of rows.
        cached_at: None if keys are read as cached.
        draft_pools: The pools of draft models, whose KV is in slots of the same numbers.
    """

    def __init__(
        self,
        limit: int,
        rows: ReqToTokenPool,
        cached_at: CachedPositions | None,
        draft_pools: Sequence[Any] = (),
    ) -> None:
        self._limit = limit
        self._rows = rows
        # How often each row was in use when weights changed last: rows still in use have KV of older weights.
        self._older: torch.Tensor | None = None
        self._cached_at = cached_at
        self._draft_pools = draft_pools
        #: Whether nothing is copied, because SGLang pauses.
        self.rests = False
        self._there: weakref.WeakSet[Swapped] = weakref.WeakSet()
        # The most bytes that a copy of a page, of a slot in the window pool and of a state takes, once known.
        self._sizes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(copy.num_bytes for copy in self._there)

    def forget(self) -> None:
        """Use no KV that is on the host now, because SGLang flushes its cache: weights may have changed."""
        for copy in self._there:
            copy.drop()

    def weights_changed(self) -> None:
        """As :meth:`forget`. Requests that run now keep KV of the older weights while they run, as with SGLang
        alone: if they are retracted later, their KV is computed again."""
        self.forget()
        self._older = self._rows.req_generation.clone()

    def _is_older(self, row: int) -> bool:
        """Whether the request in ``row`` has had the row since before weights changed."""
        older = self._older
        return older is not None and bool(older[row] == self._rows.req_generation[row])

    def give_back(self) -> None:
        """As :meth:`forget`, and give back the pinned memory: a trainer beside the server may want it."""
        self.forget()
        give_back_pinned()

    def out(
        self,
        tree: SharedRadixCache,
        req: Request,
        row: HostRow,
        first_shared: int | None,
        state: LastState | None,
        window: torch.Tensor | None,
    ) -> Swapped | None:
        """Copy the KV of a request that is being retracted. None if positions were evicted, if some KV is not
        computed or of older weights, if some of the last window was freed, or if the copy would exceed the
        limit.

        Args:
            first_shared: See :class:`Swapped`.
            state: The request's last state, in models with state layers. Its slot is free already, but only a
                later forward rewrites it.
            window: The slots in the window pool of the last positions, int64 ``[n]``. They are free already,
                too. None without such a pool, or if some were freed before.
        """
        length = computed_length(req)
        length -= length % tree.page_size
        if tree.is_mamba_enabled:
            length = 0 if state is None else state.length
        allocator = tree.token_to_kv_pool_allocator
        if (
            self.rests
            or row.evicted
            or length <= 0
            or not req.output_ids
            or self._is_older(req.kv.req_pool_idx)
            or length > req.kv.kv_allocated_len
            or (tree.is_swa_enabled and (window is None or not (window > 0).all()))
        ):
            return None
        slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length].long()
        # Some pools copy whole pages.
        page = tree.page_size
        wanted = length * self._size("page", lambda: self._copies(allocator, slots[:page])) // page
        if state is not None:
            copy_state = functools.partial(
                tree.req_to_token_pool.mamba_pool.get_cpu_copy, state.slot
            )
            wanted += self._size("state", copy_state)
        if window is not None:
            first = window[:1]
            size = self._size("window", lambda: self._window_copies(allocator, first))
            wanted += len(window) * size
        if self.num_bytes + wanted > self._limit:
            return None
        if slots.is_cuda:
            limit_pinned(self.num_bytes + wanted, self._limit)
        kept_state = None if state is None else copy_state()
        kept_window = None if window is None else self._window_copies(allocator, window)
        # Two copies: the tree may still have the first part when the request returns.
        kept = min(req.kv.cache_protected_len, length)
        runs = [
            CopiedRun(start, end, self._copies(allocator, slots[start:end]))
            for start, end in ((0, kept), (kept, length))
            if end > start
        ]
        # The copies waited for the device, so all positions are recorded.
        cached_at = None if self._cached_at is None else self._cached_at.positions[slots].cpu()
        swapped = Swapped(
            length,
            runs,
            cached_at,
            first_shared,
            state=kept_state,
            window=kept_window,
            in_window=0 if window is None else len(window),
            parts=req.last_node.parts if isinstance(req.last_node, Continued) else (),
        )
        self._there.add(swapped)
        return swapped

    def _size(self, what: str, copy: Callable[[], Any]) -> int:
        """Most bytes on the host for one ``what``, which is copied to find out, once."""
        if what not in self._sizes:
            self._sizes[what] = most_bytes_of(copy())
        return self._sizes[what]

    def _copies(self, allocator: Any, slots: torch.Tensor) -> list[Any]:
        """Of the served model's KV, then of each draft model's."""
        return [pool.get_cpu_copy(slots) for pool in self._pools(allocator)]

    def _pools(self, allocator: Any) -> list[Any]:
        drafts = (pool if _follows_slots(pool) else pool.full_kv_pool for pool in self._draft_pools)
        return [allocator.shared_pool, *drafts]

    def _window_copies(self, allocator: Any, peers: torch.Tensor) -> list[Any]:
        """As :meth:`_copies`, of slots in the window pool, and in those of draft models."""
        return [pool.get_cpu_copy(peers) for pool in self._window_pools(allocator)]

    def _window_pools(self, allocator: Any) -> list[Any]:
        drafts = (pool.swa_kv_pool for pool in self._draft_pools if not _follows_slots(pool))
        return [allocator.window_pool, *drafts]

    def room(self, tree: SharedRadixCache, swapped: Swapped, req: Request) -> Restored | None:
        """New slots for the positions that the tree does not hold, and a slot for the state. None if slots are
        missing. Evicts from the cache, so ranks whose trees are equal must not go on if one of them fails."""
        if swapped.state is not None and not take_slot(tree, req, req.last_node):
            return None
        allocator = tree.token_to_kv_pool_allocator
        count = swapped.length - req.prefix_len
        in_window = min(swapped.in_window, count)
        slots = allocator.alloc_restored(tree, count, in_window)
        if slots is None:
            return None
        return Restored(None, slots, swapped.first_shared, in_window)

    def load(
        self, tree: SharedRadixCache, swapped: Swapped, restored: Restored, req: Request
    ) -> bool:
        """Load the positions that the tree does not hold into the slots of ``restored``, and the state into the
        request's slot for it, which the next forward would still clear or replace. Returns True. If this
        raises, nobody may read the slots."""
        held = req.prefix_len
        allocator = tree.token_to_kv_pool_allocator
        slots = restored.slots
        in_window = restored.in_window
        allocator.reads.hold_stream()
        whole = behind(held, slots)
        for run in swapped.runs:
            if run.end > held:
                pools = self._pools(allocator)
                for pool, tensors in zip(pools, run.tensors, strict=True):
                    pool.load_cpu_copy(tensors, whole[run.start : run.end])
        if in_window:
            peers = allocator.translate_loc_from_full_to_swa(slots[len(slots) - in_window :])
            whole_window = behind(swapped.in_window - in_window, peers)
            windows = zip(self._window_pools(allocator), swapped.window, strict=True)
            for pool, tensors in windows:
                pool.load_cpu_copy(tensors, whole_window)
        if swapped.state is not None and req.kv.mamba_pool_idx is not None:
            pool = tree.req_to_token_pool.mamba_pool
            pool.load_cpu_copy(swapped.state, req.kv.mamba_pool_idx.unsqueeze(0))
        if self._cached_at is not None and swapped.cached_at is not None:
            self._cached_at.record(slots, upload(swapped.cached_at[held:].numpy(), slots.device))
        return True


def _follows_slots(pool: Any) -> bool:
    """Whether all KV of a draft model is in slots of the same numbers as the served model's rows name. If not,
    that of its windows is in the peers of these slots."""
    return not compat.window_layers(pool) or bool(pool.swa_uses_full_indices)


def behind(held: int, slots: torch.Tensor) -> torch.Tensor:
    """Where to load a copy whose first ``held`` positions the tree holds: to SGLang's padding slot 0, which
    nobody reads, then ``slots``, int64 ``[n]``."""
    return torch.cat((slots.new_zeros(held), slots))


def computed_length(req: Request) -> int:
    """Number of positions of a running request whose KV is computed, without a step in flight."""
    return len(req.origin_input_ids) + len(req.output_ids) - 1


def limit_pinned(wanted: int, limit: int) -> None:
    """Called before ``wanted`` bytes are in use: PyTorch keeps freed pinned memory, and uses it again for
    tensors of a similar size only. Gives it back if both were more than twice ``limit``."""
    if wanted + idle_pinned() > 2 * limit:
        give_back_pinned()


def give_back_pinned() -> None:
    """Give back the pinned memory that nobody uses."""
    if torch.cuda.is_initialized():
        torch.accelerator.memory.empty_host_cache()


def idle_pinned() -> int:
    """Bytes of pinned memory that PyTorch keeps and nobody uses, in this process."""
    stats = torch.cuda.host_memory_stats()
    return int(stats["allocated_bytes.current"] - stats["active_bytes.current"])


def _tensors_of(copies: Any) -> Iterator[torch.Tensor]:
    if isinstance(copies, torch.Tensor):
        yield copies
    elif isinstance(copies, dict):
        yield from _tensors_of(list(copies.values()))
    elif isinstance(copies, list | tuple):
        for each in copies:
            yield from _tensors_of(each)


def _is_pinned(copies: Any) -> bool:
    return any(tensor.nbytes > 0 and tensor.is_pinned() for tensor in _tensors_of(copies))


def most_bytes_of(copies: Any) -> int:
    """Most host memory that such copies take as parts of larger ones."""
    # Pinned copies take up to twice as much.
    return _bytes_of(copies) * (2 if _is_pinned(copies) else 1)


def _bytes_of(copies: Any) -> int:
    """Host memory that copies take. PyTorch puts those of a GPU in pinned memory, whose size is rounded up to a
    power of two."""
    return sum(
        1 << (tensor.nbytes - 1).bit_length() if _is_pinned(tensor) else tensor.nbytes
        for tensor in _tensors_of(copies)
    )

# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one scheduler, small and usually on the CPU, with SGLang's classes and ours. Most tests
script which blocks the filter proposes and what a policy evicts, so it does not matter which tokens repeat."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocation import (
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.swap import HostSwap
from sglang_reasoncache.cache.tree import SharedRadixCache
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig
from sglang_reasoncache.custom_params import OPT_OUT_KEY
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.eviction.policies.contract import NamedPolicy, View
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.filter.matcher import BlockPair, FilterCounters
from sglang_reasoncache.filter.messages import StepResult
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.plugin.assemble import assemble
from sglang_reasoncache.sharing.blocks import BlockProposal
from sglang_reasoncache.sharing.meter import BlockMeter, Measurement
from sglang_reasoncache.sharing.request import record_of
from sglang_reasoncache.sharing.stats import SharingStats

LAYERS = 2
MAX_ROWS = 4
MAX_CONTEXT = 160
#: A *content* is a number that stands for the KV of a slot. ``NOTHING``: content of an unused slot.
NOTHING = -1
PROMPT = list(range(1, 7))
OUTPUT = 24
#: Every way in which a row (a request's block table) is given back.
ENDS = ("finish", "abort", "retract")


@dataclass(frozen=True)
class Setup:
    """A configuration of the memory. ``page`` and ``block`` are in tokens. ``need_sort``: freed pages wait
    unsorted until an allocation runs short. ``prompts``: policies may evict positions of prompts. ``when``:
    ``--reasoncache-when``. ``core``: SGLang's ``tree_core_backend``, "python" or "rust". ``swap``: bytes of
    host memory for KV of retracted requests. ``continues``: whether what finished requests shared stays
    cached. ``decodes``: this is the decode server of a PD pair. ``drafts``: how many drafted tokens of a
    request a step verifies; 0 without speculation. ``quotes``: whether responses read their prompts. ``pairs``:
    whether the tree's keys are pairs of tokens, as they are where EAGLE drafts."""

    page: int
    block: int
    slots: int
    need_sort: bool = False
    prompts: bool = False
    when: str = "always"
    core: str = "python"
    swap: int = 0
    continues: bool = False
    decodes: bool = False
    drafts: int = 0
    quotes: bool = False
    pairs: bool = False

    def __str__(self) -> str:
        flags = ["sorted"] * self.need_sort + ["prompts"] * self.prompts
        flags += ["swap"] * (self.swap > 0) + ["continues"] * self.continues
        flags += ["decodes"] * self.decodes + [f"drafts{self.drafts}"] * (self.drafts > 0)
        flags += ["quotes"] * self.quotes + ["pairs"] * self.pairs
        return "-".join([f"page{self.page}", f"block{self.block}", *flags, self.when, self.core])


class Pair(NamedTuple):
    """First positions, in prompt plus output, of a block and of its source, whose slots the block will read."""

    dst_start: int
    src_start: int


class ScriptedEngine(FilterProcess):
    """Stands in for the filter process. When a request's new tokens are fed, proposes the blocks that the test
    put into ``waiting``. While ``slow``, no result can be taken; while ``broken``, the engine has failed. If
    ``nearest``, the blocks proposed at once are alternatives, of which those with the least distance share."""

    steps_shed = restarts = 0
    given_up = slow = broken = nearest = False

    def __init__(self) -> None:
        self.waiting: dict[int, list[Pair]] = {}
        self.closed: set[int] = set()
        self._results: list[StepResult] = []

    @property
    def outstanding(self) -> int:  # type: ignore[override]
        return len(self._results)

    def open(self, start_position: int, inside: bool, prompt: Any = ()) -> int:
        request = len(self.waiting)
        self.waiting[request] = []
        return request

    def close(self, request: int, on_all: bool = True) -> None:
        self.waiting[request] = []
        self.closed.add(request)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        for request in requests:
            pairs = self.waiting[request]
            self.waiting[request] = []
            if pairs:
                found = tuple(BlockPair(dst, src) for dst, src in pairs)
                counters = FilterCounters(candidates=1)
                proposed = (
                    {"pairs": (), "alternatives": (found,)} if self.nearest else {"pairs": found}
                )
                self._results.append(
                    StepResult(request=request, counters=counters, seconds=0.0, **proposed)
                )

    def late(self, request: int) -> list[Pair]:
        """Blocks that were proposed for a request and not taken yet."""
        results = (result for result in self._results if result.request == request)
        return [Pair(pair.dst_start, pair.src_start) for result in results for pair in result.pairs]

    def ready(self) -> int:
        if self.broken:
            return -1
        return 0 if self.slow else len(self._results)

    def shut_down(self) -> None:
        self._results.clear()

    def restart(self) -> None:
        self.restarts += 1
        self.broken = False
        self._results.clear()

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        taken = self._results[:limit]
        self._results = self._results[limit:]
        return taken


class SlowMeter(BlockMeter):
    """A meter whose measured KV distances are not ready until the test sets ``arrived``."""

    arrived = False

    def measure(self, blocks: Sequence[BlockProposal]) -> Measurement:
        measured = super().measure(blocks)
        meter = self

        class Slow(type(measured)):  # type: ignore[misc]
            is_immediate = False

            def ready(self) -> bool:
                return meter.arrived

        measured.__class__ = Slow
        return measured


class Eviction(NamedTuple):
    """A run of positions to evict."""

    start: int
    length: int


@dataclass(frozen=True)
class ScriptedEvictor(Evictor):
    """A policy that evicts what the test put into ``waiting`` for the polled request, except positions that
    must not be evicted. ``about[0]``: the name of the request that is polled."""

    budget: int | None = 1
    slack: int = 0
    waiting: dict[str, list[Eviction]] = field(default_factory=dict)
    about: list[str] = field(default_factory=lambda: [""])

    def allowed(self, positions: int) -> int:
        return 0 if self.about[0] in self.waiting else positions

    def excess(self, view: View, slots: int) -> int:
        return view.written

    def candidates(self, view: View) -> np.ndarray:
        runs = self.waiting.pop(self.about[0])
        asked = [at for start, length in runs for at in range(start, start + length)]
        last = (view.written - 1) // view.page * view.page
        found = np.intersect1d(asked, view.held[(view.held >= view.owned) & (view.held < last)])
        pages, counts = np.unique(found // view.page, return_counts=True)
        return found[np.isin(found // view.page, pages[counts == view.page])].astype(np.int64)

    def scores(self, view: View) -> torch.Tensor:
        return torch.zeros(len(view.held))


class NamingEvictor(EvictionController):
    """An eviction controller that tells the scripted policy the name of the polled request."""

    def poll(self, req: Any, *rest: Any) -> Any:
        for _, policy in self._evictors:
            if isinstance(policy, ScriptedEvictor):
                policy.about[0] = req.rid
        return super().poll(req, *rest)


def allocator_of(
    page: int, slots: int, pool: Any = None, need_sort: bool = False, device: str = "cpu"
) -> Any:
    made: Any = TokenToKVPoolAllocator
    if page > 1:
        made = functools.partial(PagedTokenToKVPoolAllocator, page_size=page)
    stock = made(slots, dtype=torch.float32, device=device, kvcache=pool, need_sort=need_sort)
    return shared_allocator_of(stock)


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in host memory. Copied only from a real GPU, not if ``tests/strict_device.py`` made it."""
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(torch.Tensor).cpu()


class World:
    """Pools, allocator, tree and controller of one scheduler."""

    #: Device of the pools. ``test_no_wait.py`` sets "cuda", for a GPU or for a stand-in.
    device = "cpu"

    def __init__(
        self, setup: Setup, meter_type: type[BlockMeter] = BlockMeter, ranks: Ranks | None = None,
        interval: int = 1, evictors: Sequence[NamedPolicy] = (), no_tree: bool = False,
        engine: Any = None, min_age: int = 0, queries: Any = None, max_rows: int = MAX_ROWS,
    ) -> None:  # fmt: skip
        """``evictors``: policies that replace the scripted one. ``no_tree``: no prefix cache
        (``--disable-radix-cache``). ``queries``: a ``RecentQueries`` for policies that read queries.
        ``engine``: replaces the scripted engine; requests with the same prompt then may share."""
        self.setup = setup
        self.page = setup.page
        self.max_rows = max_rows
        self.drafts = setup.drafts
        #: ``lowest_free``: the smallest number of free slots after any allocation for a prefill.
        self.total = self.lowest_free = setup.slots
        self.pool = self.make_pool()
        self.allocator = self.make_allocator()
        self.rows = self.make_rows()
        params = CacheInitParams(no_tree, self.rows, self.allocator, setup.page)
        params.tree_components = (ComponentType.FULL,)
        self.set_components(params)
        params.tree_core_backend = setup.core
        params.is_eagle = setup.pairs
        self.tree = SharedRadixCache(params)
        self.cached_at = cached_at = CachedPositions(setup.slots + setup.page, self.device)
        self.ranks = Ranks() if ranks is None else ranks
        reads: Any = self.pool, self.rows.req_to_token, cached_at, None, 1, self.ranks
        self.meter = meter = meter_type(*reads)
        #: All requests that Python has not garbage-collected.
        self.requests: weakref.WeakSet[Req] = weakref.WeakSet()
        self.engine: Any = ScriptedEngine() if engine is None else engine
        self.evictor = ScriptedEvictor(prompt=setup.prompts)
        # Percentile 100 accepts every block.
        config = ReasonCacheConfig(
            block=setup.block, when=setup.when, percentile=100, warmup=0, min_age=min_age,
            scope="response" if engine is None else "prompt", reads_prompt=setup.quotes,
        )  # fmt: skip
        stats = SharingStats()
        eviction = NamingEvictor(
            evictors or [NamedPolicy("scripted", self.evictor)],
            self.allocator,
            self.rows,
            KeySource(self.pool, self.rows.req_to_token, cached_at, queries=queries),
            stats.eviction,
            self.ranks,
        )
        self.controller = assemble(
            ResolvedConfig(config, page=setup.page),
            allocator=self.allocator,
            rows=self.rows,
            ranks=self.ranks,
            stats=stats,
            meter=meter,
            eviction=eviction,
            process=self.engine,
            room=lambda: 0,
            path_loaded=cached_at.record_path,
            swap=HostSwap(setup.swap, self.rows, cached_at) if setup.swap else None,
            continues=setup.continues,
            handover=Handover(self.rows, cached_at, None) if setup.decodes else None,
            interval=interval,
            documents_off="the test chooses",
        )
        # The pool counts as full, so that blocks are measured, but no block shares ahead of need.
        self.controller.room = lambda: setup.slots
        # NumPy views (on a GPU copies) of pool and rows, because NumPy reads small pieces faster than PyTorch.
        self._sides = [
            (in_host(buffer).numpy(), sign, layer)
            for layer in range(LAYERS)
            for buffer, sign in self.buffers(layer)
        ]
        self.row_table = in_host(self.rows.req_to_token).numpy()
        #: Position at which each slot was written.
        self.written_at = np.zeros(setup.slots + setup.page, dtype=np.int64)
        self.write(np.arange(setup.slots + setup.page), [NOTHING] * (setup.slots + setup.page))

    def make_pool(self) -> Any:
        return MHATokenToKVPool(
            **dict(size=self.setup.slots, page_size=self.page, dtype=torch.float32),
            **dict(head_num=1, head_dim=4, layer_num=LAYERS, device=self.device),
            enable_memory_saver=False,
        )

    def buffers(self, layer: int) -> list[tuple[torch.Tensor, int]]:
        """The buffers in which a slot shows its content, and its sign there."""
        return [(self.pool.k_buffer[layer], 1), (self.pool.v_buffer[layer], -1)]

    def make_allocator(self) -> Any:
        setup = self.setup
        return allocator_of(setup.page, setup.slots, self.pool, setup.need_sort, self.device)

    def make_rows(self) -> Any:
        return ReqToTokenPool(self.max_rows, MAX_CONTEXT, self.device, False)

    def set_components(self, params: CacheInitParams) -> None:
        """Lets a subclass add components that the tree keeps beside keys and values."""

    def request(
        self, name: str, prompt: Sequence[int], opted_out: bool = False, salt: str | None = None
    ) -> Req:
        params = SamplingParams(custom_params={OPT_OUT_KEY: False} if opted_out else None)
        req = Req(name, "", array("q", prompt), params, cache_salt=salt)
        self.requests.add(req)
        return req

    def write(self, slots: np.ndarray, contents: Sequence[int]) -> None:
        """Store each slot's content in K and V of all layers, as a different number in each."""
        values = np.asarray(contents, dtype=np.float32)[:, None, None]
        for buffer, sign, layer in self._sides:
            buffer[slots] = sign * (values * LAYERS + layer)

    def contents(self) -> np.ndarray:
        """The content of every slot. Fails if K and V of all layers do not agree on a slot's content."""
        contents = self._sides[0][0][:, :1, :1] / LAYERS
        for buffer, sign, layer in self._sides:
            assert (buffer == sign * (contents * LAYERS + layer)).all(), "sides of a slot disagree"
        return contents[:, 0, 0].astype(np.int64)

    def extend(self, req: Req) -> np.ndarray:
        """Allocate slots for positions ``[prefix_len, extend_end)``, as ``alloc_for_extend`` does, and return
        the slots. The caller has locked the request's prefix in the tree."""
        if req.kv.holds_kv:
            prefix = self.rows.req_to_token[req.kv.req_pool_idx, : req.prefix_len].to(torch.int64)
        else:
            prefix = self.tree.prefix_device_indices(req)
            assert self.rows.alloc([req]) is not None
        if self.page == 1:
            out = alloc_token_slots(self.tree, req.extend_len)
        else:
            before = torch.tensor([req.prefix_len])
            after = torch.tensor([req.extend_end])
            minus = torch.tensor([-1], device=self.device)
            out = alloc_paged_token_slots_extend(
                tree_cache=self.tree, prefix_lens=before.to(self.device), prefix_lens_cpu=before,
                seq_lens=after.to(self.device), seq_lens_cpu=after,
                last_loc=prefix[-1:] if len(prefix) else minus, extend_num_tokens=req.extend_len,
            )  # fmt: skip
        row = req.kv.req_pool_idx
        self.rows.write((row, slice(0, req.prefix_len)), prefix.to(torch.int32))
        self.rows.write((row, slice(req.prefix_len, req.extend_end)), out.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end
        req.is_retracted = False
        self.lowest_free = min(self.lowest_free, self.allocator.available_size())
        slots = in_host(out).numpy()
        self.written_at[slots] = np.arange(req.prefix_len, req.extend_end)
        return slots

    def can_decode(self, reqs: Sequence[Req]) -> bool:
        if self.drafts:
            _, _, needed = self._ahead(reqs)
            return self.allocator.check_decode_capacity(num_tokens=needed, tree_cache=self.tree)
        pages = sum(req.kv.kv_allocated_len % self.page == 0 for req in reqs)
        return self.allocator.check_decode_capacity(
            num_tokens=pages * self.page, tree_cache=self.tree
        )

    def _ahead(self, reqs: Sequence[Req]) -> Any:
        """SGLang's slots for drafted tokens: the rows' lengths now and then, and how many slots are needed."""
        return page_aligned_decode_alloc_lens(reqs, reserve=2 * self.drafts, page_size=self.page)

    def draft(self, reqs: Sequence[Req]) -> None:
        """Allocate slots for drafted tokens, as ``alloc_for_spec_decode`` does."""
        before, after, needed = self._ahead(reqs)
        slots = alloc_token_slots(self.tree, needed) if needed else torch.empty(0)
        at = 0
        for req, start, end in zip(reqs, before, after, strict=True):
            own = slots[at : at + end - start]
            self.rows.write((req.kv.req_pool_idx, slice(start, end)), own.to(torch.int32))
            self.written_at[in_host(own).long().numpy()] = np.arange(start, end)
            req.kv.kv_allocated_len = end
            at += end - start

    def accept(self, req: Req, tokens: int) -> np.ndarray:
        """Commit ``tokens`` tokens of a verification; return the slots that hold their KV."""
        start = req.kv.kv_committed_len
        req.kv.kv_committed_len += tokens
        return self.row_table[req.kv.req_pool_idx, start : start + tokens]

    def decode(self, reqs: Sequence[Req]) -> np.ndarray:
        """Allocate one slot for each request, as ``alloc_for_decode`` does; return the slots."""
        lengths = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs]).to(self.device)
        ends = lengths.to(self.device)
        if self.page == 1:
            out = alloc_token_slots(self.tree, len(reqs))
        else:
            out = alloc_paged_token_slots_decode(
                tree_cache=self.tree,
                seq_lens=ends + 1,
                seq_lens_cpu=lengths + 1,
                last_loc=self.rows.req_to_token[rows, ends - 1],
            )
        self.rows.write((rows, ends), out.to(torch.int32))
        slots = in_host(out).numpy()
        self.written_at[slots] = lengths.numpy()
        for req in reqs:
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1
        return slots

    def admits(self, prompt: int, output: int = 0) -> bool:
        """Whether SGLang would admit a request with these numbers of tokens."""
        budget = self.allocator.create_prefill_budget(self.tree)
        asked = dict(extend_input_len=prompt, input_tokens=prompt, total_tokens=prompt + output)
        asked |= dict(max_new_tokens=output, swa_host_hit_length=0)
        return bool(budget.check_prefill(**asked, chunk_limit=None)[0])

    def to_have(self) -> int:
        """Number of free slots, plus the number that blocks of the ledger can free by sharing."""
        shareable: int = self.controller.pipeline.ledger.slots
        return self.allocator.free_size() + shareable

    def nodes(self) -> Iterator[tuple[Any, Any]]:
        """All nodes below the root (Python tree core only), each with its full-attention component."""
        waiting = [*self.tree.root_node.children.values()]
        for node in waiting:
            yield node, node.component_data[ComponentType.FULL]
            waiting += node.children.values()

    def free_pages(self) -> np.ndarray:
        return in_host(self.allocator.get_all_free_pages()).numpy()

    def row(self, req: Req) -> np.ndarray:
        return self.row_table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]

    def has_shifted(self, req: Req) -> bool:
        """Whether the request's row contains a slot that was written for another position."""
        row = self.row(req)
        return bool(((self.written_at[row] != np.arange(len(row))) & (row >= 0)).any())

    # -- what a scheduler does with one request -----------------------------------

    def start(self, name: str = "r", first: int = 100) -> Req:
        """Start a request: write the KV of its prompt and response except for the newest token, then poll."""
        req = self.request(name, PROMPT)
        self.respond(req, range(first, first + 1 + OUTPUT))
        self.controller.after_decode([req])
        return req

    def respond(self, req: Req, tokens: Iterable[int]) -> None:
        """Write the KV of the prompt and of all response tokens but the newest."""
        self.prefill(req)
        first, *others = tokens
        req.output_ids.append(first)
        for token in others:
            self.step(req, token)

    def prefill(self, req: Req) -> None:
        """Write the KV of the prompt and, after a retraction, of the tokens generated before it."""
        req.init_next_round_input(self.tree)
        req.extend_end = len(req.full_untruncated_fill_ids)
        req.lock = self.tree.lock(req.last_node)
        slots = self.extend(req)
        self.write(slots, [1] * len(slots))
        checkpoint_kv_cache(req, self.tree)

    def step(self, req: Req, token: int = 7) -> None:
        assert self.can_decode([req])
        self.write(self.decode([req]), [token])
        req.output_ids.append(token)

    def propose(self, req: Req, *pairs: Pair) -> None:
        """Generate a token and poll, so that the engine is fed and proposes ``pairs``."""
        state: Any = record_of(req)
        self.engine.waiting[state.followed.id] += pairs
        self.step(req)
        assert self.controller.after_decode([req]) == 0

    def end(self, req: Req, how: str) -> None:
        """End a request; ``how``: one of :data:`ENDS`."""
        getattr(self, how)(req)

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.tree, checkpoint=True)

    def abort(self, req: Req) -> None:
        req.finished_reason = FINISH_ABORT("client left")
        release_kv_cache(req, self.tree, checkpoint=False)

    def retract(self, req: Req) -> None:
        release_kv_cache(req, self.tree, checkpoint=False)
        req.reset_for_retract()

    def come_back(self, req: Req) -> None:
        """Prefill a retracted request again, then decode a token."""
        self.prefill(req)
        self.step(req)

    def assert_empty(self) -> None:
        self.tree.reset()
        self.allocator.clear()
        assert self.allocator.free_size() == self.total
        assert self.controller.pipeline.saved == 0

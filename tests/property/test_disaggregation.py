# SPDX-License-Identifier: Apache-2.0
"""Random operations on the decode server of a PD pair, whose queue is SGLang's own ``DecodePreallocQueue``. A
prompt that it admitted must find its slots: a failed allocation ends a scheduler.

Contents of slots are checked as in ``test_groups.py``, and the position that each slot's key was rotated for,
also after SGLang copied a request to the host and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, release_req
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    discard_kv_cache_backup,
    release_kv_cache,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context, get_disagg

from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.plugin import disaggregation
from tests.property.test_groups import PHRASES, PICK, GroupMachine, RandomMeter, engine_of
from tests.property.test_memory import explore
from tests.property.test_states import name_of
from tests.property.windows import WINDOW, WindowWorld
from tests.property.world import MAX_CONTEXT, MAX_ROWS, Setup, World
from tests.server.faulty.waiting_reasoncache import wait_for

#: A setup, and whether the decode server has a prefix cache.
CASES = [
    (Setup(page=1, block=3, slots=150, when="short", need_sort=True, decodes=True), False),
    (Setup(page=1, block=3, slots=150, when="always", need_sort=True, decodes=True), True),
    (
        Setup(page=4, block=2, slots=164, when="short", need_sort=True, core="rust", decodes=True),
        True,
    ),
]
WINDOW_CASES = [
    (Setup(page=1, block=3, slots=150, when="short", decodes=True), False),
    (Setup(page=1, block=3, slots=150, core="rust", decodes=True), True),
    (Setup(page=4, block=2, slots=200, when="short", core="rust", decodes=True), True),
    (Setup(page=4, block=2, slots=200, decodes=True), False),
]
QUICK_OPERATIONS = 2_400
BACKUP = "cpu_tensor"


class Receiver:
    """Receives a prompt's KV. ``state``: see ``KVPoll``."""

    state = KVPoll.WaitingForInput
    supports_host_destination = require_staging = False

    def send_metadata(self, *_: Any, **__: Any) -> None:
        self.state = KVPoll.Transferring

    def clear(self) -> None:
        pass


class Queue(decode.DecodePreallocQueue):
    """SGLang's queue with our hooks, over a ``World``. It needs no network."""

    pp_size = 1
    tp_rank = 0
    host_pool = None
    gloo_group = None

    def __init__(self, world: World, scheduler: Any, reserve: int) -> None:
        self.world = world
        self.scheduler = scheduler
        self.num_reserved_decode_tokens = reserve
        self.req_to_token_pool = world.rows
        self.tree_cache = world.tree
        self.token_to_kv_pool_allocator = world.allocator
        self.token_to_kv_pool = world.pool
        self.max_total_num_tokens = world.total
        self.transfer_queue: Any = SimpleNamespace(queue=[], enable_staging=False)
        self.queue: list[Any] = []
        self.retracted_queue: list[Req] = []
        self.pending_reqs: list[Any] = []
        self._prefill_dp_rank_queries: dict[str, Any] = {}
        self._num_published_destinations = 0
        self.kv_manager: Any = SimpleNamespace(kv_args=SimpleNamespace(state_types=[]))
        self.req_to_metadata_buffer_idx_allocator: Any = SimpleNamespace(
            available_size=lambda: 1, alloc=lambda: 0
        )
        self.reclaimed = 0
        self.admission = disaggregation.PreallocAdmission(world.controller)

    def _pre_alloc(self, req: Req, *args: Any) -> Any:
        slots = super()._pre_alloc(req, *args)
        self.world.allocator.preallocated(req)
        return slots

    def _allocatable_token_budgets(self, *args: Any, **named: Any) -> int:
        stock = decode.DecodePreallocQueue._allocatable_token_budgets
        there = self.world.allocator.free_size() + self.world.tree.evictable_size()
        left = self.admission.around_budget(stock, self, *args, **named)
        assert left <= there, "more than is free or evictable"
        return left

    def _required_admission_tokens(self, *args: Any, **named: Any) -> int:
        stock = decode.DecodePreallocQueue._required_admission_tokens
        return self.admission.around_required(stock, self, *args, **named)

    def _prealloc_reservation_fits(self, *args: Any, **named: Any) -> bool:
        stock = decode.DecodePreallocQueue._prealloc_reservation_fits
        before = self.world.allocator.free_size()
        fits = self.admission.around_fits(stock, self, *args, **named)
        self.reclaimed += self.world.allocator.free_size() > before
        return fits


class PDWorld(World):
    def make_rows(self) -> Any:
        return decode.DecodeReqToTokenPool(self.max_rows, MAX_CONTEXT, self.device, False, 2)


class PDWindowWorld(PDWorld, WindowWorld):
    """A world with a window pool, too, which is smaller, unless it is what SGLang's admission overlooks."""

    @property
    def window_slots(self) -> int:
        overlooked = self.page == 1 and get_disagg().disaggregation_decode_enable_radix_cache
        return self.setup.slots if overlooked else self.setup.slots * 3 // 5 // 4 * 4


class DecodeMachine(GroupMachine):
    """The scheduler of a decode server.

    ``coming``: admitted requests whose KV is being transferred. ``loaded``: requests that SGLang will take into
    the running batch."""

    admitted = resumed = reclaimed = shared_resumed = left = left_early = ran_early = 0

    def __init__(self, setup: Setup, engine: FilterProcess, caches: bool) -> None:
        self.caches = caches
        super().__init__(setup, engine)
        #: The position that the key in each slot was rotated for.
        self.rotated_for = self.world.written_at
        self.copied: dict[Req, np.ndarray] = {}
        self.coming: list[Req] = []
        self.loaded: list[Req] = []
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=self.running),
            waiting_queue=self.loaded, last_batch=None, tp_worker=SimpleNamespace(is_hybrid_swa=False),
            enable_overlap=False, enable_lora=False, enable_hisparse=False,
            enable_priority_scheduling=False, enable_decode_hicache=False,
        )  # fmt: skip
        self.queue = Queue(self.world, self.scheduler, reserve=4)
        self.scheduler.disagg_decode_prealloc_queue = self.queue
        self.scheduler.disagg_decode_transfer_queue = SimpleNamespace(pop_transferred=self._arrived)

    def _make_world(self, setup: Setup, **named: Any) -> World:
        return PDWorld(setup, RandomMeter, no_tree=not self.caches, **named)

    # -- arrivals -----------------------------------------------------------------------

    def _prefill(self, req: Req) -> bool:
        """The request arrives. SGLang admits it later, perhaps now."""
        req.sampling_params.max_new_tokens = 20
        entry = decode.DecodeRequest(req=req, kv_receiver=Receiver())
        self.queue.queue.append(entry)
        self._pass()
        self._pass()
        return req in self.running

    @rule(passes=st.integers(1, 3))
    def arrive(self, passes: int) -> None:
        """KV arrives, and requests are taken into the running batch."""
        for _ in range(passes):
            self._pass()

    def _arrived(self) -> list[Req]:
        """The requests whose KV has been transferred."""
        arrived = list(self.coming)
        for req in arrived:
            req.output_ids.append(PHRASES[0][0])
        self.coming.clear()
        return arrived

    def _pass(self) -> None:
        """What ``process_decode_queue``, with our hook, and ``get_new_prebuilt_batch`` do."""
        queue = self.queue
        self.loaded += self._resume()
        if queue.retracted_queue:
            before = len(self.coming)
            queue.admission.after_queue(self.scheduler)
            type(self).ran_early += before - len(self.coming)
        else:
            self.loaded += self._arrived()
            popped, failed = queue.pop_preallocated()
            assert not failed
            for entry in popped:
                self._transfer(entry.req)
            type(self).admitted += len(popped)
            queue.transfer_queue.queue[:] = popped
        count = max(MAX_ROWS - len(self.running), 0)
        batch = self.loaded[:count]
        self.loaded[:] = self.loaded[count:]
        for req in batch:
            if self.caches and req.last_node is None:
                decode._bind_root_prefix(req, self.world.tree)
            req.init_next_round_input(None if self.caches else self.world.tree)
            req.extend_end = req.kv.kv_committed_len
        for req in batch:
            req.is_retracted = False
            checkpoint_kv_cache(req, self.world.tree)
        self.running += batch

    def _transfer(self, req: Req) -> None:
        row = self.world.row(req)
        start = req.prefix_len
        self._compute(req, row[start:])
        self.rotated_for[row[start:]] = np.arange(start, len(row))
        self.coming.append(req)

    def _resume(self) -> list[Req]:
        resumed = self.queue.resume_retracted_reqs()
        for req in resumed:
            row = self.world.row(req)
            copied = self.copied.pop(req)
            assert len(row) == len(copied)
            self.rotated_for[row] = copied
            type(self).resumed += 1
            type(self).shared_resumed += bool((copied != np.arange(len(copied))).any())
        return resumed

    # -- departures ---------------------------------------------------------------------

    def _retract(self, req: Req) -> None:
        self.running.remove(req)
        self.copied[req] = self.rotated_for[self.world.row(req)[: req.seqlen - 1]].copy()
        assert release_req(
            req=req, remaing_req_count=len(self.running), req_to_token_pool=self.world.rows,
            token_to_kv_pool_allocator=self.world.allocator, tree_cache=self.world.tree,
            hisparse_coordinator=None,
        )  # fmt: skip
        self.queue.retracted_queue.append(req)

    @precondition(lambda self: self.queue.retracted_queue)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        """The client of a retracted request leaves."""
        req = self.queue.retracted_queue.pop(pick % len(self.queue.retracted_queue))
        discard_kv_cache_backup(req, self.world.tree, BACKUP)
        del self.copied[req]
        type(self).left += 1

    @precondition(lambda self: self.coming)
    @rule()
    def transfer_fails(self) -> None:
        """The transfer of a prompt fails after SGLang gave it slots."""
        self.queue.transfer_queue.queue.clear()
        self.world.abort(self.coming.pop())

    @precondition(lambda self: self.loaded)
    @rule(pick=PICK)
    def leave_before_it_runs(self, pick: int) -> None:
        """The client leaves when the KV is there. SGLang then publishes what it can."""
        req = self.loaded.pop(pick % len(self.loaded))
        req.finished_reason = FINISH_ABORT("client left")
        req.extend_end = req.kv.kv_committed_len
        if self.caches and req.last_node is None:
            decode._bind_root_prefix(req, self.world.tree)
        release_kv_cache(req, self.world.tree, checkpoint=True)
        type(self).left_early += 1

    @precondition(
        lambda self: not (self.running or self.coming or self.loaded or self.queue.retracted_queue)
    )
    @rule()
    def flush(self) -> None:
        self.queue.queue.clear()
        super().flush()

    readmit = None  # type: ignore[assignment]

    # -- checks -------------------------------------------------------------------------

    def holding(self) -> list[Req]:
        return [*self.running, *self.coming, *self.loaded]

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()

    @invariant()
    def keys_are_known(self) -> None:
        for req in self.holding():
            row = self.world.row(req)
            rotated_for = self.rotated_for[row]
            found = self.world.cached_at.positions[row].numpy()
            assert found.tolist() == rotated_for.tolist()
            moved = np.flatnonzero(rotated_for != np.arange(len(row)))
            if len(moved):
                first = self.world.allocator.row_of(req.kv.req_pool_idx).first_shared
                assert first is not None and first <= moved[0], "exact, yet rotated"
                assert self.world.tree.reads_shifted([req])

    @invariant()
    def the_tree_is_exact(self) -> None:
        """Each slot in the tree has a key that was rotated for its position in the path."""
        if self.world.setup.core != "python":
            return
        waiting = [(node, 0) for node in self.world.tree.root_node.children.values()]
        for node, start in waiting:
            slots = node.component_data[ComponentType.FULL].value
            end = start + len(slots)
            for recorded in (self.rotated_for, self.world.cached_at.positions.numpy()):
                assert recorded[slots.numpy()].tolist() == list(range(start, end))
            waiting += [(child, end) for child in node.children.values()]

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        super()._compute(req, slots)
        if req in self.running:
            # What a forward records.
            end = req.kv.kv_allocated_len
            self.world.cached_at.positions[slots] = int(end - 1)

    def _count(self) -> None:
        super()._count()
        type(self).reclaimed += self.queue.reclaimed
        self.queue.reclaimed = 0

    def teardown(self) -> None:
        for req in [*self.coming, *self.loaded]:
            self.world.abort(req)
        self.coming.clear()
        self.loaded.clear()
        self.queue.retracted_queue.clear()
        super().teardown()


class WindowDecodeMachine(DecodeMachine):
    """The same with a window pool, where a slot holds a number that names all tokens up to its own."""

    world: PDWindowWorld

    def __init__(self, setup: Setup, engine: FilterProcess, caches: bool) -> None:
        super().__init__(setup, engine, caches)
        self.scheduler.tp_worker.is_hybrid_swa = True
        self.scheduler.sliding_window_size = WINDOW
        self.queue.token_to_kv_pool = self.world.both

    def _make_world(self, setup: Setup, **named: Any) -> World:
        return PDWindowWorld(setup, RandomMeter, no_tree=not self.caches, **named)

    def _names(self, req: Req, first: int, end: int) -> list[int]:
        return [name_of(req, length) for length in range(first + 1, end + 1)]

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        super()._compute(req, slots)
        end = len(self.world.row(req))
        self.world.write_window(slots, self._names(req, end - len(slots), end))

    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()
        world = self.world
        for req in self.holding():
            end = req.kv.kv_committed_len
            expected = self._names(req, max(end - WINDOW, 0), end)
            assert world.window(world.row(req)[:end]) == expected
        pool = world.allocator
        books = world.tree.swa_evictable_size() + world.tree.swa_protected_size()
        books += pool.swa_available_size() + world.of_requests(self.holding())
        assert books == world.window_slots, "a window slot is lost"


@pytest.fixture
def decode_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes SGLang take this process for a decode server of one rank."""
    monkeypatch.setattr(
        decode, "poll_and_all_reduce", lambda receivers, _: [each.state for each in receivers]
    )

    def configured(caches: bool) -> Any:
        return get_context().override_server_args(
            device="cpu", attention_backend="torch_native", disaggregation_mode="decode",
            disaggregation_decode_retraction_backup=BACKUP,
            disaggregation_decode_enable_radix_cache=caches,
        )  # fmt: skip

    yield configured


@pytest.mark.property
@pytest.mark.parametrize(
    ("kind", "setup", "caches"),
    [
        *((DecodeMachine, *case) for case in CASES),
        *(
            pytest.param(WindowDecodeMachine, *case, marks=pytest.mark.long)
            for case in WINDOW_CASES
        ),
    ],
    ids=str,
)
def test_what_was_admitted_finds_its_slots(
    kind: type[DecodeMachine],
    setup: Setup,
    caches: bool,
    decode_server: Any,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    engine = engine_of(setup)

    class Machine(kind):  # type: ignore[misc,valid-type]
        """A subclass, so that each setup has its own counters."""

        refusals: ClassVar[Counter[str]] = Counter()

        def __init__(self) -> None:
            super().__init__(setup, engine, caches)

    names = "admitted", "resumed", "shared_resumed", "left", "left_early"

    def all_seen() -> bool:
        """Whether what is rare has happened. Without it the run would prove little."""
        rare = [getattr(Machine, name) for name in names]
        return all([*rare, Machine.reclaimed or setup.when != "short"])

    try:
        with decode_server(caches):
            explore(Machine, QUICK_OPERATIONS, len(CASES), rate=1, seen=all_seen)
    finally:
        engine.shut_down()
    record_property("operations", Machine.operations)
    more = "ran_early", "reclaimed", "operations"
    found = {name: getattr(Machine, name) for name in (*names, *more)}
    print(setup, found, Machine.across)
    assert all_seen()

# SPDX-License-Identifier: Apache-2.0
"""Random prefill passes by SGLang's own ``PrefillAdder``: prompts in chunks, siblings whose blocks the ledger
counts, decode steps between two chunks, preemption, aborts and failures of the plugin at any moment.

What an admission promised must be there when the slots are allocated: a failed allocation ends a scheduler.
Contents of slots are checked as in ``test_groups.py``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.swap import Restored
from sglang_reasoncache.filter.process import FilterProcess
from tests.property.adder import adder_of
from tests.property.test_groups import (
    PHRASES,
    PICK,
    PROMPTS,
    SALTS,
    GroupMachine,
    engine_of,
)
from tests.property.test_memory import explore
from tests.property.world import MAX_CONTEXT, Setup
from tests.server.faulty.waiting_reasoncache import wait_for

SETUPS = [
    Setup(page=1, block=3, slots=170, when="short"),
    Setup(page=1, block=2, slots=150, when="short", core="rust"),
    Setup(page=4, block=2, slots=200, need_sort=True, when="short"),
    Setup(page=4, block=3, slots=200, when="short", swap=1 << 14, continues=True),
    Setup(page=1, block=3, slots=170, when="always"),
    Setup(page=1, block=3, slots=150, when="short", swap=1 << 15),
    Setup(page=4, block=3, slots=200, when="always", core="rust", swap=1 << 13),
    Setup(page=1, block=3, slots=170, when="short", swap=1 << 14, continues=True),
    Setup(page=1, block=3, slots=170, core="rust", swap=1 << 14, continues=True, pairs=True),
]
QUICK_OPERATIONS = 7_650
#: Requests that run at once, at most. The world's ``ReqToTokenPool`` has a row more, for a preempting request.
MOST_RUNNING = 4
#: Tokens of a prefill pass (``--chunked-prefill-size``).
CHUNKS = st.sampled_from((8, 16, 16, 48))
#: Tokens of a prompt behind the part that all prompts have.
TAILS = st.sampled_from((0, 0, 0, 30, 60, 100))


class SchedulingMachine(GroupMachine):
    """One scheduler. ``waiting``: requests that are not admitted. ``chunked``: the request whose prompt is
    computed in part; SGLang computes one such prompt at a time."""

    rows = MOST_RUNNING + 1
    passes = chunks = put_off = on_promise = preempted = failed = restored = by_itself = 0

    def __init__(self, setup: Setup, engine: FilterProcess) -> None:
        super().__init__(setup, engine)
        self.chunked: Req | None = None
        # While a request waits, all polls let blocks share ahead of need.
        self.world.controller.room = lambda: 0

    # -- arrivals -------------------------------------------------------------------

    @precondition(lambda self: len(self.waiting) < 8)
    @rule(
        kind=PICK,
        opts_out=st.integers(0, 7),
        count=st.integers(1, 4),
        tail=TAILS,
        output=st.sampled_from((8, 20, 60)),
        priority=st.integers(0, 2),
        chunk=CHUNKS,
        passes=st.integers(1, 6),
    )
    def arrive(
        self, kind: int, opts_out: int, count: int, tail: int, output: int, priority: int,
        chunk: int, passes: int,
    ) -> None:  # fmt: skip
        """Siblings arrive, or one request with a longer prompt, which no other request has."""
        prompt = PROMPTS[kind % 8 == 0]
        salt = SALTS[kind % 8 == 1]
        for _ in range(1 if tail or not opts_out else count):
            self.names += 1
            own = [100 + self.names] * tail
            req = self.world.request(str(self.names), [*prompt, *own], opts_out == 0, salt)
            req.sampling_params.max_new_tokens = output
            req.priority = priority
            self.waiting.append(req)
        self.schedule(chunk, 0.1, False, kind, passes)

    def _begin(self, req: Req) -> bool:
        """The request arrives, and the scheduler admits it first if it can."""
        req.priority = 3
        req.sampling_params.max_new_tokens = 20
        self.waiting.insert(0, req)
        for _ in range(6):
            self._pass(16, 0.1, False)
        return req in self.running

    @precondition(lambda self: self.running and self.chunked is None)
    @rule(part=st.sampled_from((0.3, 0.6, 0.9)), chunk=CHUNKS, ends=st.booleans(), pick=PICK)
    def arrive_and_rely(self, part: float, chunk: int, ends: bool, pick: int) -> None:
        """Requests repeat a phrase while there is room. Then a prompt arrives that fits only if their blocks
        share. Often a request whose blocks are in the ledger leaves once the first chunk is computed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.world.controller, "room", lambda: self.world.total)
            self._decode([pick], 16)
        if not self.promise:
            return
        there = self.world.allocator.available_size() + self.world.tree.evictable_size()
        length = min(there + int(part * self.promise), MAX_CONTEXT - 20)
        self.names += 1
        req = self.world.request(str(self.names), [100 + self.names] * max(length, 1), True)
        req.sampling_params.max_new_tokens = 2
        req.priority = 3
        self.waiting.insert(0, req)
        before = self.promise
        self.schedule(chunk, 0.0, False, 0, 1)
        type(self).on_promise += req.kv.holds_kv and self.promise < before
        if ends and self.running:
            self.end(pick, ("finish", "abort", "retract")[pick % 3])
        self.schedule(chunk, 0.0, False, 0, 8)

    @precondition(lambda self: len(self.waiting) < 8)
    @rule(
        pick=PICK, keep=st.integers(0, 12), repeats=st.booleans(), chunk=CHUNKS, left=st.integers(0, 12),
        how=st.sampled_from(("finish", "abort", "retract", None, None, None)),
    )  # fmt: skip
    def be_alone(
        self, pick: int, keep: int, repeats: bool, chunk: int, left: int, how: str | None
    ) -> None:
        """If ``how``, all others leave. A request that needs nearly the whole pool arrives, often one that goes
        on with a finished response, and must be admitted."""
        if how is None:
            return
        self.names += 1
        output = 4
        room = min(MAX_CONTEXT - 12, self.world.total - output - 2 * self.world.page) - left
        tokens, salt = self.said[-1 - pick % min(4, len(self.said))] if self.said else ([], None)
        if not repeats:
            tokens = tokens[: max(len(tokens) - 8 * keep, 0)]
        tokens = [*tokens, *[100 + self.names] * room][:room]
        req = self.world.request(str(self.names), tokens, False, salt)
        req.sampling_params.max_new_tokens = output
        req.priority = 4
        self.waiting.insert(0, req)
        if self.chunked is not None:
            self.abort_chunked()
        while self.running:
            self.end(0, how)
        self.schedule(chunk, 0.0, False, pick, 2)
        type(self).by_itself += req.kv.holds_kv or req not in self.waiting

    @property
    def promise(self) -> int:
        slots: int = self.world.controller.pipeline.ledger.slots
        return slots

    admit = go_on = readmit = None  # type: ignore[assignment]

    # -- a pass of SGLang's scheduler -------------------------------------------------

    @rule(
        chunk=CHUNKS,
        ratio=st.sampled_from((0.0, 0.1, 0.7)),
        mixed=st.booleans(),
        phrase=PICK,
        passes=st.integers(1, 6),
    )
    def schedule(self, chunk: int, ratio: float, mixed: bool, phrase: int, passes: int) -> None:
        """What ``Scheduler.get_next_batch_to_run`` does: a prefill pass if one can run, else decode steps."""
        for _ in range(passes):
            batch = self._pass(chunk, ratio, mixed)
            if batch is None:
                self._decode([phrase], 4)
            elif mixed:
                self._decode_beside(PHRASES[0][0])

    def _pass(self, chunk: int, ratio: float, mixed: bool) -> list[Req] | None:
        """A prefill pass. Returns the requests that it admitted, or None if there are none."""
        world = self.world
        self.waiting = [
            req for req in self.waiting if len(req.full_untruncated_fill_ids) < MAX_CONTEXT - 8
        ]
        self._stash()
        if not (self.waiting or self.chunked):
            return None
        chunk = max(chunk, world.page + MOST_RUNNING)
        adder = adder_of(world, self.running, chunk, ratio, mixed)
        type(self).passes += 1
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            parked = self.chunked
            self.chunked = adder.add_chunked_req(self.chunked)
            if not adder.can_run_list:
                assert self.chunked is parked
                type(self).put_off += 1
            type(self).chunks += bool(adder.can_run_list)
        for req in list(self.waiting):
            if adder.budget_state() == AddReqResult.OTHER:
                break
            full = len(self.running) + len(adder.can_run_list) >= MOST_RUNNING
            if full and not adder.preempt_to_schedule(req):
                break
            req.init_next_round_input(world.tree)
            result = adder.add_one_req(
                req, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if result != AddReqResult.CONTINUE:
                if req not in adder.can_run_list:
                    self._turned_away(req)
                break
        admitted = list(adder.can_run_list)
        type(self).preempted += len(adder.preempt_list)
        self.running = list(adder.running_batch.reqs)
        self.waiting = [req for req in self.waiting if req not in admitted] + adder.preempt_list
        if not admitted:
            alone = not (self.running or self.chunked) and bool(self.waiting)
            assert not (alone and self._fits(self.waiting[0])), "waits for ever"
            return None
        assert not (adder.new_chunked_req and self.chunked), "two prompts in chunks"
        assert self.chunked is None or self.chunked in admitted, "counted as computed, but put off"
        self.chunked = adder.new_chunked_req or self.chunked
        for req in admitted:
            type(self).restored += isinstance(req.last_node, Restored)
            type(self).continued += isinstance(req.last_node, Continued)
            self._compute(req, world.extend(req))
        for req in admitted:
            if req is not self.chunked:
                checkpoint_kv_cache(req, world.tree)
                req.output_ids.append(PHRASES[0][0])
                self.running.append(req)
        return admitted

    def _fits(self, req: Req) -> bool:
        """Whether stock SGLang admits a request while no other runs."""
        output = req.sampling_params.max_new_tokens - len(req.output_ids)
        needed = len(req.full_untruncated_fill_ids) + max(output, 0) + 2 * self.world.page
        return needed <= self.world.total

    def _make_room(self) -> None:
        if len(self.running) == 1 and self.chunked is None:
            written = self.running[0].kv.kv_committed_len + self.world.page
            there = written > self.world.total or self.world.can_decode(self.running)
            assert there, "runs alone, and finds no slot"
        super()._make_room()

    def _turned_away(self, req: Req) -> None:
        """A request was matched, and not admitted."""

    def _stash(self) -> None:
        """Publish the chunk that was computed last, unless none was computed since."""
        chunked = self.chunked
        if chunked is not None and chunked.extend_end > chunked.prefix_len:
            checkpoint_kv_cache(chunked, self.world.tree)

    def _decode_beside(self, token: int) -> None:
        """The decode half of a mixed batch, if there is room for it."""
        batch = [req for req in self.running if req.kv.kv_allocated_len < MAX_CONTEXT - 2]
        if not batch or not self.world.can_decode(batch):
            return
        slots = self.world.decode(batch)
        for i, req in enumerate(batch):
            self._compute(req, slots[i : i + 1])
            req.output_ids.append(token)

    # -- between two chunks ---------------------------------------------------------

    @precondition(lambda self: self.chunked is not None)
    @rule()
    def abort_chunked(self) -> None:
        """What ``process_pending_chunked_abort`` does."""
        assert self.chunked is not None
        self.world.abort(self.chunked)
        self.chunked = None

    @precondition(lambda self: self.world.controller.report.disabled is None)
    @rule(now=st.sampled_from([True, *[False] * 40]))
    def fail(self, now: bool) -> None:
        """The plugin fails, rarely. From then on nothing that admission counted on can be reclaimed."""
        if now:
            with self.world.controller.containment:
                raise RuntimeError("a failure of the plugin")
            type(self).failed += 1

    @precondition(lambda self: not self.running and self.chunked is None)
    @rule()
    def flush(self) -> None:
        super().flush()

    # -- checks ---------------------------------------------------------------------

    def holding(self) -> list[Req]:
        return self.running + [self.chunked] * (self.chunked is not None)

    def nothing_failed(self) -> None:
        reason = self.world.controller.report.disabled
        assert reason in (None, "RuntimeError: a failure of the plugin")

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()

    def teardown(self) -> None:
        if self.chunked is not None:
            self.abort_chunked()
        super().teardown()


@contextlib.contextmanager
def machine_of(base: type[SchedulingMachine], setup: Setup) -> Iterator[Any]:
    """A subclass of ``base`` for ``setup``, with counters of its own. Its machines share a filter process. A
    failure shuts that process down; the next machine then starts another."""
    processes: list[FilterProcess] = []

    def start(machine: SchedulingMachine) -> None:
        if not processes or processes[-1].given_up:
            processes.append(engine_of(setup))
        base.__init__(machine, setup, processes[-1])

    try:
        yield type("Machine", (base,), {"refusals": Counter(), "__init__": start})
    finally:
        for process in processes:
            process.shut_down()


def counted(machine: Any, *names: str) -> dict[str, int]:
    """The counters ``names`` of a machine."""
    return {name: getattr(machine, name) for name in ("operations", *names)}


@pytest.mark.property
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_was_admitted_finds_its_slots(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    with machine_of(SchedulingMachine, setup) as machine:

        def all_seen() -> bool:
            """Whether what this setup allows has happened. Without it the run would prove little."""
            rare = [machine.preempted]
            rare += [machine.on_promise, machine.failed] * (setup.when == "short")
            rare += [machine.restored] * (setup.swap > 0) + [machine.continued] * setup.continues
            return all(rare) and machine.chunks > machine.operations // 100

        explore(machine, QUICK_OPERATIONS, len(SETUPS), rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    names = (
        "passes",
        "chunks",
        "put_off",
        "on_promise",
        "preempted",
        "failed",
        "restored",
        "by_itself",
    )
    print(setup, counted(machine, *names, "continued", "across"))
    assert all_seen()
    assert setup.swap or not machine.restored
    assert setup.continues or not machine.continued

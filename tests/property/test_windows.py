# SPDX-License-Identifier: Apache-2.0
"""What ``test_scheduling.py`` does, with a model whose window layers have a KV pool of their own. A slot of
that pool holds a number that names all tokens up to its own, so a request that goes on with the window of
another prefix is noticed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_reasoncache.cache import continuations
from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.tree.base import ContinuedLock
from sglang_reasoncache.filter.process import FilterProcess
from tests.property.test_groups import PICK, RandomMeter
from tests.property.test_memory import explore
from tests.property.test_scheduling import SchedulingMachine, counted, machine_of
from tests.property.test_states import name_of
from tests.property.windows import WINDOW, WindowWorld
from tests.property.world import MAX_CONTEXT, MAX_ROWS, Setup
from tests.server.faulty.waiting_reasoncache import wait_for

SETUPS = [
    Setup(1, 3, 190, continues=True, swap=1 << 15),
    Setup(4, 3, 260, continues=True, swap=1 << 15),
    Setup(1, 3, 190, continues=True, swap=1 << 15, pairs=True),
    Setup(4, 3, 260, continues=True, swap=1 << 15, pairs=True),
    *(
        pytest.param(setup, marks=pytest.mark.long)
        for setup in (
            Setup(1, 3, 170, core="rust", continues=True, when="short"),
            Setup(1, 2, 220, core="rust", continues=True, swap=1 << 13),
            Setup(4, 4, 280, core="rust", continues=True),
            Setup(2, 2, 240, core="rust", continues=True, when="short", swap=1 << 13),
        )
    ),
]
QUICK_OPERATIONS = 640


class WindowMachine(SchedulingMachine):
    """``revived``: how often a request began with a window behind shared KV. ``taken``: size of the windows of
    continuations that were evicted. ``extended``: how often a short response moved a window on."""

    revived = taken = extended = 0
    world: WindowWorld

    def _make_world(self, setup: Setup, **named: Any) -> WindowWorld:
        return WindowWorld(setup, RandomMeter, **named)

    def _names(self, req: Req, first: int, end: int) -> list[int]:
        return [name_of(req, length) for length in range(first + 1, end + 1)]

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        super()._compute(req, slots)
        end = req.kv.kv_committed_len
        before = end - len(slots)
        row = self.world.row(req)[:before]
        assert self.world.window(row) == self._names(req, max(before - WINDOW, 0), before)
        type(self).revived += isinstance(req.last_node, Continued) and before == req.prefix_len
        self.world.write_window(slots, self._names(req, before, end))

    def _finish(self, reqs: list[Req]) -> None:
        sizes = {id(node): len(node) for node in self.world.allocator.continuations}
        super()._finish(reqs)
        for node in self.world.allocator.continuations:
            assert node.ending is None or len(node.ending) == self.world.in_pages(WINDOW)
            type(self).extended += len(node) > sizes.get(id(node), len(node))

    @precondition(lambda self: self.said and len(self.running) < MAX_ROWS)
    @rule(pick=PICK, steps=st.integers(1, 4))
    def brief_turn(self, pick: int, steps: int) -> None:
        """A turn that is shorter than a window goes on with a finished response."""
        req = self._next_turn(pick, 0, 2, False)
        if len(req.origin_input_ids) < MAX_CONTEXT - 40 and self._begin(req):
            # At least a page, so that something is kept.
            self._decode([pick] * MAX_ROWS, min(steps * self.world.page, WINDOW - 1))
            if req in self.running:
                self._finish([req])

    @rule(wanted=st.sampled_from((1, 9, 30, 400)), slots=st.sampled_from((0, 0, 12)))
    def evict_windows(self, wanted: int, slots: int) -> None:
        """Evict windows, sometimes with slots of the other pool. As many must become free as the tree counts as
        evictable."""
        tree = self.world.tree
        pool = self.world.allocator
        there = pool.continuations
        before = pool.swa_available_size()
        mine = there.evictable_endings
        evictable = tree.swa_evictable_size()
        full = min(slots, tree.full_evictable_size())
        free = pool.full_available_size()
        params = EvictParams(num_tokens=slots, swa_num_tokens=wanted)
        found = tree.evict(params).swa_num_tokens_evicted
        assert pool.full_available_size() - free >= full
        freed = pool.swa_available_size() - before
        assert freed == found == evictable - tree.swa_evictable_size() >= min(wanted, evictable)
        type(self).taken += mine - there.evictable_endings

    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()
        world = self.world
        tree = world.tree
        pool = world.allocator
        there = pool.continuations
        for req in self.holding():
            end = req.kv.kv_committed_len
            expected = self._names(req, max(end - WINDOW, 0), end)
            assert world.window(world.row(req)[:end]) == expected
        last = [slot for node in there if node.ending is not None for slot in node.ending.tolist()]
        assert len(set(last)) == len(last), "two hold one window"
        assert (world.peers(last) > 0).all()
        assert there.evictable_endings + there.protected_endings == len(last)
        needed = [
            req.lock
            for req in self.holding()
            if isinstance(req.lock, ContinuedLock) and req.lock.reads_ending
        ]
        # A request needs the window that it began with until it has freed a slot of its own.
        for lock, req in ((req.lock, req) for req in self.holding() if req.lock in needed):
            assert req.kv.get_evicted_seqlen(ComponentType.SWA) <= lock.parts[-1].end
        pinned = {id(lock.parts[-1].node) for lock in needed}
        assert there.protected_endings == world.in_pages(WINDOW) * len(pinned)
        assert all(node.needs_ending for node in there)
        books = tree.swa_evictable_size() + tree.swa_protected_size() + pool.swa_available_size()
        assert books + world.of_requests(self.holding()) == world.total, "a window slot is lost"

    def teardown(self) -> None:
        super().teardown()
        self.world.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=self.world.total))
        assert self.world.allocator.swa_available_size() == self.world.total


@pytest.mark.property
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_windows_belong_to_their_prefixes(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    monkeypatch.setattr(continuations, "LEAST_TOKENS", 3)
    with machine_of(WindowMachine, setup) as machine:

        def all_seen() -> bool:
            """Whether what this setup allows has happened. Without it the run would prove little."""
            # With pages, few responses are shorter than a window and yet fill a page.
            extended = machine.extended or setup.page > 1
            restored = machine.restored or not setup.swap
            return all([machine.revived, machine.taken, extended, restored])

        explore(machine, QUICK_OPERATIONS, len(SETUPS), rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    names = (
        "chunks",
        "preempted",
        "failed",
        "continued",
        "revived",
        "taken",
        "extended",
        "restored",
    )
    print(setup, counted(machine, *names, "across"))
    assert all_seen()

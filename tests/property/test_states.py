# SPDX-License-Identifier: Apache-2.0
"""What ``test_scheduling.py`` does, with a model that has state layers. A state holds a number that names all
tokens it has seen, so a request that goes on with the state of another prefix is noticed."""

import zlib
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_server_args

from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.tree.base import ContinuedLock
from sglang_reasoncache.filter.process import FilterProcess
from tests.property.states import STATES, States
from tests.property.test_groups import RandomMeter
from tests.property.test_memory import explore
from tests.property.test_scheduling import SchedulingMachine, counted, machine_of
from tests.property.world import Setup, World
from tests.server.faulty.waiting_reasoncache import wait_for

LONG = [
    ("extra_buffer", Setup(4, 2, 260, core="rust", continues=True, when="short", swap=1 << 15)),
    ("no_buffer", Setup(1, 3, 200, core="rust", continues=True, when="short", swap=1 << 13)),
    ("extra_buffer", Setup(1, 3, 190, continues=True)),
]
SETUPS = [
    ("no_buffer", Setup(1, 3, 190, continues=True, swap=1 << 15)),
    *(pytest.param(*each, marks=pytest.mark.long) for each in LONG),
]
QUICK_OPERATIONS = 480
#: SGLang copies the state of a request after every so many tokens, if it keeps copies.
INTERVAL = 4


def name_of(req: Req, length: int) -> int:
    """A number that names the first ``length`` tokens of a request and its salt, exact in float32."""
    tokens = [*req.origin_input_ids, *req.output_ids][:length]
    return zlib.crc32(f"{req.cache_salt} {tokens}".encode()) % 2**24


class StateWorld(States):
    #: A request's state is computed by the machine.
    write = World.write  # type: ignore[assignment]

    def state(self, slot: Any) -> int:
        return int(self.rows.mamba_pool.mamba_cache.temporal[0, slot].unique().item())


class StateMachine(SchedulingMachine):
    """``revived``: how often a request began with a state behind shared KV. ``taken``: how many such states
    were evicted. ``taken_inside``: how many of these belonged to a continuation with others behind it."""

    strategy: ClassVar[str]
    revived = taken = taken_inside = 0
    world: StateWorld

    def _make_world(self, setup: Setup, **named: Any) -> StateWorld:
        return StateWorld(self.strategy, setup, RandomMeter, **named)

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        super()._compute(req, slots)
        kv = req.kv
        length = kv.kv_committed_len
        before = length - len(slots)
        if kv.mamba_cow_src_index is not None:
            assert self.world.state(kv.mamba_cow_src_index) == name_of(req, before)
            type(self).revived += isinstance(req.last_node, Continued)
        elif kv.mamba_needs_clear:
            assert before == 0, "a prefix without a state"
        else:
            assert self.world.state(kv.mamba_pool_idx) == name_of(req, before)
        kv.mamba_cow_src_index = None
        kv.mamba_needs_clear = False
        self.world.set_state(kv.mamba_pool_idx, name_of(req, length))
        if not self.world.copies:
            return
        # A prefill's state is copied at the last multiple that it reaches.
        copied = length - length % INTERVAL
        if copied > before:
            self.world.track(req, copied)
            slot = kv.mamba_ping_pong_track_buffer[kv.mamba_last_track_idx]
            self.world.set_state(slot, name_of(req, copied))

    def _turned_away(self, req: Req) -> None:
        self.world.give_up(req)

    @rule(wanted=st.sampled_from((1, 2, 5, STATES)))
    def evict_states(self, wanted: int) -> None:
        """Evict states. As many must become free as the tree counts as evictable."""
        tree = self.world.tree
        states = self.world.rows.mamba_allocator
        there = self.world.allocator.continuations
        inside = [node for node in there if node.children and node.ending is not None]
        before = states.available_size()
        mine = there.evictable_endings
        evictable = tree.mamba_evictable_size()
        found = tree.evict(EvictParams(num_tokens=0, mamba_num=wanted)).mamba_num_evicted
        freed = states.available_size() - before
        assert freed == found == evictable - tree.mamba_evictable_size() >= min(wanted, evictable)
        type(self).taken += mine - there.evictable_endings
        type(self).taken_inside += sum(node.ending is None for node in inside)

    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()
        world = self.world
        there = world.allocator.continuations
        kept = [int(node.ending) for node in there if node.ending is not None]
        core = world.tree.all_mamba_values_flatten().tolist()
        of_requests = list[int]()
        for req in self.holding():
            of_requests.append(int(req.kv.mamba_pool_idx))
            assert world.state(req.kv.mamba_pool_idx) == name_of(req, req.kv.kv_committed_len)
            if world.copies:
                of_requests += req.kv.mamba_ping_pong_track_buffer.tolist()
        used = [*kept, *core, *of_requests]
        assert len(set(used)) == len(used), "two hold one state"
        assert len(used) + world.rows.mamba_allocator.available_size() == STATES, "a state is lost"
        # Once its first chunk is computed, a request needs the state that it began with no longer.
        began = {
            id(req.lock.parts[-1].node)
            for req in self.holding()
            if isinstance(req.lock, ContinuedLock) and req.lock.reads_ending
        }
        assert not began or self.chunked is not None
        assert there.protected_endings == len(began)
        assert there.evictable_endings == len(kept) - len(began)
        assert all(node.needs_ending for node in there)

    def flush(self) -> None:
        super().flush()
        self.world.rows.clear()

    def teardown(self) -> None:
        super().teardown()
        tree = self.world.tree
        tree.evict(EvictParams(num_tokens=0, mamba_num=STATES))
        assert self.world.rows.mamba_allocator.available_size() == STATES


@pytest.mark.property
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize(("strategy", "setup"), SETUPS, ids=str)
def test_states_belong_to_their_prefixes(
    strategy: str, setup: Setup, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    get_server_args()._mamba_cache_chunk_size = 1
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    with machine_of(StateMachine, setup) as machine:
        machine.strategy = strategy

        def all_seen() -> bool:
            """Whether what this setup allows has happened. Without it the run would prove little."""
            return all([machine.revived, machine.taken, machine.restored or not setup.swap])

        explore(machine, QUICK_OPERATIONS, len(SETUPS), rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    names = ("chunks", "preempted", "failed", "continued", "restored", "revived", "taken")
    print(strategy, setup, counted(machine, *names, "taken_inside", "across"))
    assert all_seen()

# SPDX-License-Identifier: Apache-2.0
"""Random siblings (requests with the same prompt) run with a real filter process and SGLang's pools and tree.

Instead of KV, each slot holds a number computed from a token and a salt: its *content*. Each position of every
row (block table) and of the tree must read the content of its token and salt, whichever requests have ended."""

import random
import sys
from array import array
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.runtime_context import get_spec

from sglang_reasoncache.cache.continuation import Continued, and_children
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.sharing.meter import Measurement
from sglang_reasoncache.sharing.request import record_of
from tests.filter.words import Words
from tests.property.test_memory import explore
from tests.property.world import MAX_CONTEXT, MAX_ROWS, NOTHING, Setup, SlowMeter, World
from tests.server.faulty.waiting_reasoncache import wait_for

SETUPS = [
    Setup(page=1, block=3, slots=190),
    Setup(page=1, block=2, slots=170, need_sort=True),
    Setup(page=4, block=2, slots=240, need_sort=True),
    Setup(page=1, block=3, slots=170, when="short", core="rust", quotes=True),
    Setup(page=1, block=3, slots=220, continues=True),
    Setup(page=4, block=2, slots=260, core="rust", continues=True, quotes=True),
    Setup(page=4, block=3, slots=200, when="short", continues=True),
    Setup(page=1, block=3, slots=230, drafts=3, continues=True, quotes=True),
    Setup(page=1, block=2, slots=210, when="short", core="rust", drafts=4),
    Setup(page=1, block=3, slots=170, when="short", quotes=True, pairs=True),
    Setup(page=4, block=2, slots=260, continues=True, pairs=True),
    Setup(page=1, block=3, slots=230, core="rust", drafts=3, continues=True, pairs=True),
]
QUICK_RULES = 9_000
MIN_AGE = 6
#: Phrases that responses are made of, so that responses repeat themselves and each other.
PHRASES = [[10 * i + j for j in range(1, 2 + 3 * i)] for i in range(1, 5)]
PROMPTS = [list(range(60, 66)), list(range(60, 69))]
SALTS = (None, "salt")
PICK = st.integers(0, 63)
ENDINGS = ("finish", "finish", "together", "abort", "retract", "retract", "retract")


class RandomMeter(SlowMeter):
    """A meter that returns random KV distances, so that blocks share in random order. Real ones would all be 0.
    Distances arrive at a random poll of the controller, when rows may already be gone."""

    arrived = property(lambda _: random.random() < 0.8)  # type: ignore[assignment]

    def distances(self, measured: Measurement) -> list[float]:
        slots = [(*dst, *src) for dst, src in zip(*measured.slots(), strict=True)]
        return [random.Random(str(each)).random() for each in slots]


def engine_of(setup: Setup) -> FilterProcess:
    """A filter process that finds all repeats of a block."""
    config = FilterConfig(
        match="runs", direction="newest", min_age=MIN_AGE, max_step_tokens=4, reads_prompt=setup.quotes,
        block=setup.block, min_run=setup.block,
    )  # fmt: skip
    return FilterProcess(config, Words.vocabulary)


def _said(phrase: int, at: int) -> int:
    """The token at ``at`` of a response that repeats a phrase."""
    said = PHRASES[phrase // 2 % len(PHRASES)]
    return said[(at + phrase // 16) % len(said)]


class GroupMachine(RuleBasedStateMachine):
    """Random operations of one scheduler that serves siblings."""

    #: ``lent``, ``common``: how often a running request named a page of a continuation beside its own path, and
    #: two continuations named one page. ``quoted``: how often a continuation named a page of its path.
    operations = across = reapplied = continued = aliased = lent = common = quoted = 0
    refusals: ClassVar[Counter[str]]
    #: Rows of the world's ``ReqToTokenPool``.
    rows = MAX_ROWS

    def __init__(self, setup: Setup, engine: FilterProcess) -> None:
        super().__init__()
        self.world = self._make_world(setup, engine=engine, min_age=MIN_AGE, max_rows=self.rows)
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        #: Number of pages of positions that the tree holds.
        self.held_in_tree = 0
        self.names = 0
        #: Tokens and salt of requests that finished, the latest last.
        self.said: list[tuple[list[int], str | None]] = []

    def _make_world(self, setup: Setup, **named: Any) -> World:
        return World(setup, RandomMeter, **named)

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        """Write what a forward would write into the last slots of a row."""
        end = req.kv.kv_committed_len
        self.world.write(slots, self._shown(req, end)[end - len(slots) :])

    def _shown(self, req: Req, end: int) -> list[int]:
        return contents(self._tokens(req, end), req.cache_salt)

    def _tokens(self, req: Req, end: int) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids][:end]

    def _prefill(self, req: Req) -> bool:
        world = self.world
        req.init_next_round_input(world.tree)
        req.extend_end = len(req.full_untruncated_fill_ids)
        req.lock = world.tree.lock(req.last_node)
        free = world.allocator.free_size() + world.tree.evictable_size()
        if req.extend_end - req.prefix_len + 2 * world.page > free:
            world.tree.unlock(req.lock)
            req.lock = None
            return False
        type(self).continued += isinstance(req.last_node, Continued)
        self._compute(req, world.extend(req))
        checkpoint_kv_cache(req, world.tree)
        req.output_ids.append(PHRASES[0][0])
        self.running.append(req)
        return True

    @precondition(lambda self: len(self.running) < MAX_ROWS)
    @rule(kind=PICK, opts_out=st.integers(0, 7), count=st.integers(1, MAX_ROWS))
    def admit(self, kind: int, opts_out: int, count: int) -> None:
        """Admit siblings, sometimes with another prompt or salt, or admit one request that opted out."""
        prompt = PROMPTS[kind % 8 == 0]
        salt = SALTS[kind % 8 == 1]
        for _ in range(min(count, MAX_ROWS - len(self.running)) if opts_out else 1):
            self.names += 1
            self._prefill(self.world.request(str(self.names), prompt, opts_out == 0, salt))

    @precondition(
        lambda self: self.world.setup.continues and self.said and len(self.running) < MAX_ROWS
    )
    @rule(pick=PICK, keep=st.integers(0, 12), tail=st.integers(1, 6), opts_out=st.integers(0, 7))
    def follow_up(self, pick: int, keep: int, tail: int, opts_out: int) -> None:
        """A prompt arrives that goes on with a finished response, or with most of it, as an agent's does."""
        self._begin(self._next_turn(pick, keep, tail, opts_out == 0))

    def _begin(self, req: Req) -> bool:
        """Admit a new request if memory allows."""
        return self._prefill(req)

    @precondition(lambda self: self.world.setup.continues and len(self.running) < MAX_ROWS)
    @rule(phrase=PICK, steps=st.integers(16, 40), turns=st.integers(1, 3), keep=st.integers(0, 12))
    def converse(self, phrase: int, steps: int, turns: int, keep: int) -> None:
        """A request alone, whose response repeats itself, and turns that go on with it."""
        self.names += 1
        req = self.world.request(str(self.names), [*PROMPTS[0], 100 + self.names])
        for turn in range(turns):
            if turn:
                req = self._next_turn(0, keep, 2, False)
            if len(req.origin_input_ids) > MAX_CONTEXT - 60 or not self._begin(req):
                return
            self._decode([phrase] * MAX_ROWS, steps)
            if req not in self.running:
                return
            self._finish([req])

    def _next_turn(self, pick: int, keep: int, tail: int, opts_out: bool) -> Req:
        tokens, salt = self.said[-1 - pick % min(4, len(self.said))]
        self.names += 1
        tokens = [*tokens[: len(tokens) - keep * (keep % 3)], *[100 + self.names] * tail]
        return self.world.request(str(self.names), tokens[: MAX_CONTEXT - 40], opts_out, salt)

    @precondition(lambda self: len(self.running) > 0)
    @rule(phrases=st.lists(PICK, min_size=MAX_ROWS, max_size=MAX_ROWS), steps=st.integers(8, 24))
    def decode(self, phrases: list[int], steps: int) -> None:
        """Run decode steps in which each request repeats a phrase of its own."""
        self._decode(phrases, steps)

    @precondition(lambda self: len(self.running) + len(self.waiting) > 0)
    @rule(phrase=PICK, steps=st.integers(8, 24))
    def go_on(self, phrase: int, steps: int) -> None:
        """Readmit waiting requests, then run decode steps in which all requests repeat the same phrase."""
        for req in self.waiting[: MAX_ROWS - len(self.running)]:
            self.waiting.remove(req)
            self._restart(req)
        self._decode([phrase] * MAX_ROWS, steps)

    def _restart(self, req: Req) -> None:
        length = len(req.origin_input_ids) + len(req.output_ids)
        if length < MAX_CONTEXT - 2 and not self._prefill(req):
            self.waiting.append(req)

    def _decode(self, phrases: list[int], steps: int) -> None:
        for step in range(steps):
            self._make_room()
            most = MAX_CONTEXT - 2 - 2 * self.world.drafts
            batch = [req for req in self.running if req.kv.kv_allocated_len < most]
            if not batch:
                return
            if self.world.drafts:
                self.world.draft(batch)
                slots = None
            else:
                slots = self.world.decode(batch)
            for i, req in enumerate(batch):
                phrase = phrases[i % len(phrases)]
                if slots is None:
                    self._accept(req, phrase, step)
                else:
                    self._compute(req, slots[i : i + 1])
                    req.output_ids.append(_said(phrase, step))
            if step % 4 == 3:
                before = self.world.to_have()
                freed = self.world.controller.after_decode(batch)
                assert self.world.to_have() - before == freed

    def _accept(self, req: Req, phrase: int, step: int) -> None:
        """A verification accepts one to all of the drafted tokens. KV of the others stays behind them."""
        accepted = 1 + (step + phrase) % self.world.drafts
        start = len(req.output_ids)
        req.output_ids.extend(_said(phrase, start + i) for i in range(accepted))
        self._compute(req, self.world.accept(req, accepted))

    def _make_room(self) -> None:
        while self.running and not self.world.can_decode(self.running):
            self._retract(self.running[-1])

    def _retract(self, req: Req) -> None:
        self.running.remove(req)
        self.world.retract(req)
        self.waiting.append(req)

    @precondition(lambda self: self.waiting and len(self.running) < MAX_ROWS)
    @rule(pick=PICK, leaves=st.integers(0, 7))
    def readmit(self, pick: int, leaves: int) -> None:
        """Readmit a retracted request, or drop it silently, as if its client had left."""
        req = self.waiting.pop(pick % len(self.waiting))
        if leaves:
            self._restart(req)

    @precondition(lambda self: len(self.running) > 0)
    @rule(pick=PICK, how=st.sampled_from(ENDINGS))
    def end(self, pick: int, how: str) -> None:
        # Ends a request that shares slots with other rows, if there is one.
        row_of = self.world.allocator.row_of
        sharing = [req for req in self.running if row_of(req.kv.req_pool_idx).in_other_rows]
        req = (sharing or self.running)[pick % len(sharing or self.running)]
        if how == "retract":
            return self._retract(req)
        if how == "abort":
            return self._abort(req)
        self._finish(list(self.running) if how == "together" else [req])

    def _finish(self, reqs: list[Req]) -> None:
        self.world.allocator.free_group_begin()
        for each in reqs:
            each.finished_len = len(each.output_ids)
            self.said.append(([*each.origin_input_ids, *each.output_ids], each.cache_salt))
            self.running.remove(each)
            self.world.finish(each)
        self.world.allocator.free_group_end()

    def _abort(self, req: Req) -> None:
        self.running.remove(req)
        self.world.abort(req)

    @rule(wanted=st.sampled_from((1, 5, 40, 1000)))
    def evict(self, wanted: int) -> None:
        """Evict from the tree, which must be able to free all slots that it counts as evictable."""
        allocator = self.world.allocator
        tree = self.world.tree
        before = allocator.free_size()
        evictable = tree.evictable_size()
        tree.evict(EvictParams(num_tokens=wanted))
        freed = allocator.free_size() - before
        assert freed >= min(wanted, evictable) and freed == evictable - tree.evictable_size()

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.waiting.clear()
        self._count()
        self.world.tree.reset()
        self.world.allocator.clear()

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        type(self).operations += 1
        self.nothing_failed()
        world = self.world
        page = self.world.page
        stored = world.contents()
        in_tree = [*self._check_tree(stored), *self._check_continuations(stored)]
        uses = Counter(in_tree)
        readers = Counter[int]()
        holders = self.held_in_tree
        private = 0
        for req in self.holding():
            row = world.row(req)
            protected = req.kv.cache_protected_len
            # Slots of drafted tokens that were not accepted hold nothing that is read.
            written = req.kv.kv_committed_len
            assert stored[row[:written]].tolist() == self._shown(req, written)
            mine = named_by(row[protected:], page)
            holders += -(-(len(row) - protected) // page)
            uses.update(mine)
            # A page of its own path that a row reads again is shared within the row.
            readers.update(set(mine) - set((row[:protected] // page).tolist()))
            private += kv_private_tokens(req.kv, page)
            # Of the tree's pages, a row names only those on the path that its request locks, and those that a
            # sibling lent it before it finished.
            path = set((row[:protected] // page).tolist())
            state = record_of(req)
            lent = world.allocator.row_of(req.kv.req_pool_idx).in_other_rows
            assert set(mine) & set(in_tree) <= path | {slot // page for slot in lent}
            assert state is None or state.takes_part or not lent
        free = world.free_pages()
        assert len(set(free)) == len(free) and set(free.tolist()).isdisjoint(uses)
        assert len(free) + len(uses) == world.total // page, "a page is lost"
        many = {used: count for used, count in uses.items() if count > 1}
        assert world.allocator.references == many
        assert world.allocator.references.extra == sum(many.values()) - len(many)
        assert world.allocator.references.saved == holders - len(uses)
        pipeline = world.controller.pipeline
        tree = world.tree
        pinned = {
            number
            for node in world.allocator.continuations
            for number in named_by(node.slots[: node.pinned].numpy(), page)
        }
        alone = sum(number not in pinned for number in readers)
        if page == 1:
            assert pipeline.across == sum(readers.values()) - alone
        assert pipeline.redirector.within == sum(map(self._within, self.holding())) >= 0
        books = world.allocator.free_size() + tree.evictable_size() + tree.protected_size()
        assert books + private - world.controller.report.slots_saved == world.total
        slots = (free[:, None] * page + np.arange(page)).ravel()
        world.write(slots, [NOTHING] * len(slots))

    def holding(self) -> list[Req]:
        """The requests that hold a row."""
        return self.running

    def nothing_failed(self) -> None:
        assert self.world.controller.report.disabled is None

    def _within(self, req: Req) -> int:
        row = self.world.row(req)
        protected = req.kv.cache_protected_len
        return len(row[protected:]) - len(set(row[protected:]) - set(row[:protected]))

    def _core_pages(self) -> set[int]:
        """The ids of the pages in nodes of the core."""
        slots = self.world.tree.all_values_flatten().numpy()
        return set((slots[:: self.world.page] // self.world.page).tolist())

    def _check_tree(self, stored: np.ndarray) -> list[int]:
        """The ids of the pages in all nodes, with repetitions. Also checks contents if the core is Python."""
        found: list[int] = []
        if self.world.setup.core != "python":
            found = [*self._core_pages()]
            self.held_in_tree = len(found)
            return found
        for node, data in self.world.nodes():
            if data.value is None:  # The node is on the host.
                continue
            slots = data.value.numpy()
            # A key of pairs has one token more.
            tokens = node.key.token_ids[: len(slots)]
            assert stored[slots].tolist() == contents(tokens, node.key.cache_salt)
            found += (slots[:: self.world.page] // self.world.page).tolist()
        self.held_in_tree = len(found)
        return found

    def _check_continuations(self, stored: np.ndarray) -> list[int]:
        """The ids of the pages in all continuations, with repetitions. Checks contents and counts."""
        world = self.world
        there = self.world.allocator.continuations
        found: list[int] = []
        named: dict[int, list[Any]] = {}
        read: set[int] = set()
        older: set[Any] = set()
        for node in there:
            slots = node.slots.numpy()
            salt = SALTS[int(stored[slots[0]] >= 1000)]
            assert stored[slots].tolist() == contents(node.tokens, salt)
            assert set(and_children(node)[1:]) <= older, "used later than what goes on with it"
            assert node.parent is None or node.pins <= node.parent.pins
            assert node.path is None or world.tree._is_cached(node.path.node), "its path is gone"
            older.add(node)
            mine = named_by(slots, world.page)
            self.held_in_tree += len(slots) // world.page
            found += mine
            for number in mine:
                named.setdefault(number, []).append(node)
            read.update(named_by(slots[: node.pinned], world.page))
        in_rows = {
            number
            for req in self.holding()
            for number in (world.row(req)[req.kv.cache_protected_len :] // world.page).tolist()
        }
        in_core = self._core_pages()
        pinned = world.page * len(read - in_core)
        free = world.page * len(named.keys() - in_rows - in_core - read)
        assert (there.evictable, there.protected) == (free, pinned)
        assert there.aliased == sum(map(len, there)) - free - pinned
        lent = [set(nodes) for nodes in named.values() if len(set(nodes)) > 1]
        type(self).aliased = max(type(self).aliased, there.aliased)
        type(self).lent += bool(in_rows & named.keys())
        type(self).quoted += bool(in_core & named.keys())
        type(self).common += bool(lent)
        return found

    def _count(self) -> None:
        stats = self.world.controller.stats
        type(self).across += stats.blocks_shared_across
        type(self).reapplied += stats.blocks_reapplied
        type(self).refusals += stats.refusals
        assert stats.blocks_missed == 0, "a block of the ledger could not share"

    def teardown(self) -> None:
        self._count()
        for req in [*self.running]:
            self._abort(req)
        engine = self.world.engine
        engine.feed(array("q"), array("q"), array("q"))
        wait_for(engine)
        engine.take(1 << 20, 1 << 30)
        if sys.exc_info()[0] is None:
            self.everybody_reads_what_is_theirs()
            self.evict(1000)
            assert self.world.allocator.free_size() == self.world.total


def named_by(entries: np.ndarray, page: int) -> list[int]:
    """The ids of the pages that entries of a row or node name, once for each page of entries that does."""
    return [
        named
        for start in range(0, len(entries), page)
        for named in set((entries[start : start + page] // page).tolist())
    ]


def contents(tokens: Any, salt: str | None) -> list[int]:
    return [token + 1000 * SALTS.index(salt) for token in tokens]


@pytest.mark.property
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_siblings_share_and_lose_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    engine = engine_of(setup)
    drafts = setup.drafts or None
    speculation = get_spec().override(
        speculative_algorithm=("EAGLE" if setup.pairs else "NGRAM") if drafts else None,
        speculative_num_draft_tokens=drafts,
    )

    class Machine(GroupMachine):
        """A subclass, so that each setup has its own counters."""

        refusals: ClassVar[Counter[str]] = Counter()

        def __init__(self) -> None:
            super().__init__(setup, engine)

    def all_seen() -> bool:
        """Whether what this setup allows has happened. Without it the run would prove little."""
        rare = [Machine.reapplied]
        if setup.continues:
            rare += [Machine.continued, Machine.aliased, Machine.lent, Machine.common]
            rare += [Machine.quoted] * setup.quotes
        return all(rare) and Machine.across > Machine.operations // 30

    try:
        with speculation:
            explore(Machine, QUICK_RULES, len(SETUPS), rate=1, seen=all_seen)
    finally:
        engine.shut_down()
    record_property("operations", Machine.operations)
    print(setup, Machine.operations, Machine.across, Machine.reapplied, Machine.refusals)
    print(Machine.continued, Machine.aliased, Machine.lent, Machine.common, Machine.quoted)
    assert all_seen()

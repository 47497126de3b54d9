# SPDX-License-Identifier: Apache-2.0
"""If a call in our code fails while a server runs, requests go on and no slot is lost.

The tests run SGLang's pools and release code with our allocator, prefix tree, controller and hooks. In each
run one call raises an exception. There is a run for each place in our code that calls PyTorch or NumPy,
directly or through a function in another of our files."""

import contextlib
import copy
import functools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache
from sglang.srt.runtime_context import get_context

import sglang_reasoncache
from sglang_reasoncache.attention.batch_mark import mark_of
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.cache.owner import NOTHING_PROMISED
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.policies.contract import NamedPolicy, View
from sglang_reasoncache.filter.matcher import AcrossPair
from sglang_reasoncache.plugin import graph_votes, hooks, routes
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.sharing.request import record_of
from sglang_reasoncache.sharing.stats import SharingStats
from tests.property.model import Memory
from tests.property.world import Eviction, Pair, ScriptedEvictor, Setup, World
from tests.two_ranks import on_two_ranks
from tests.unit.test_across import world_of

pytestmark = pytest.mark.usefixtures("few_objects")

OURS = f"{Path(sglang_reasoncache.__file__).parent}/"
KINDS = (MemoryError, RuntimeError, torch.OutOfMemoryError)
SETUPS = [
    Setup(page=1, block=4, slots=240, when="short"),
    Setup(page=4, block=4, slots=320, prompts=True),
]
PROMPT = list(range(1, 25))


class Site(NamedTuple):
    """A place in our code that calls something."""

    file: str
    line: int
    called: str


class Faults:
    """Counts calls that our code makes inside a :class:`Containment`: of PyTorch, of NumPy, and of functions
    in another of our files that call these. Raises ``error`` in place of the ``number``-th call at ``site``.

    A function that calls :meth:`Ranks.agree` changes rows or slots only after that call. From then on only its
    PyTorch calls fail, because NumPy needs little memory. With ``agreed`` these do not fail either, nor do any
    calls of our own functions. ``tests/server/test_sharing.py`` has a rank on which such calls fail.
    """

    #: Our functions that have called PyTorch or NumPy so far, directly or through other functions.
    computing: ClassVar[set[CodeType]] = set()

    def __init__(
        self, site: Site | None = None, number: int = 1, error: type[Exception] = MemoryError,
        agreed: bool = False,
    ) -> None:  # fmt: skip
        self.site = site
        self.number = number
        self.error = error
        self.agreed = agreed
        self.seen: Counter[Site] = Counter()
        self.raised = False
        self._depth = 0
        self._changing = set[FrameType]()

    def enter(self) -> None:
        self._depth += 1
        if not self.raised:
            sys.setprofile(self._call)

    def leave(self) -> None:
        self._depth -= 1
        if not self._depth:
            sys.setprofile(None)
            self._changing.clear()

    def _call(self, frame: FrameType, event: str, called: Any) -> None:
        caller, code = (frame.f_back, frame.f_code) if event == "call" else (frame, None)
        if caller is None or not _is_ours(caller):
            return
        if code is Ranks.agree.__code__:
            self._changing.add(caller)
        if code is None:
            library = _library(called)
            name = getattr(called, "__name__", "")
        else:
            across = code.co_filename != caller.f_code.co_filename
            library = "ours" * (across and code in self.computing)
            name = code.co_name
        if event not in ("call", "c_call") or not library or self._is_spared(caller, library):
            return
        site = Site(caller.f_code.co_filename.removeprefix(OURS), caller.f_lineno, name)
        self.seen[site] += 1
        if site == self.site and self.seen[site] == self.number:
            self.raised = True
            raise self.error(f"at {site}")

    def _is_spared(self, frame: FrameType | None, library: str) -> bool:
        changes = False
        while frame is not None and _is_ours(frame):
            if library != "ours":
                self.computing.add(frame.f_code)
            changes |= frame in self._changing
            frame = frame.f_back
        return (changes and library != "torch") or (self.agreed and (changes or library == "ours"))


def _is_ours(frame: FrameType) -> bool:
    """Whether the frame runs code of our package other than containment.py, which repeats failed calls."""
    name = frame.f_code.co_filename
    return name.startswith(OURS) and not name.endswith("containment.py")


def _library(called: Any) -> str:
    """The library of a function, or of an array's method: ``torch``, ``numpy``, or empty for any other."""
    of = getattr(called, "__self__", None)
    owner = type(of) if isinstance(of, torch.Tensor | np.ndarray) else called
    library = (getattr(owner, "__module__", None) or "").partition(".")[0]
    return library if library in ("torch", "numpy") else ""


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    enter = Containment.__enter__
    leave = Containment.__exit__
    again = Containment.once_more

    def entered(self: Containment) -> None:
        enter(self)
        faults.enter()

    def left(self: Containment, *error: Any) -> bool:
        faults.leave()
        return leave(self, *error)

    def once_more(self: Containment, *work: Any, **named: Any) -> Any:
        faults.enter()
        try:
            return again(self, *work, **named)
        finally:
            faults.leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Containment, "once_more", once_more)
        patch.setattr(Containment, "__enter__", entered)
        patch.setattr(Containment, "__exit__", left)
        yield


class ReadingEvictor(ScriptedEvictor):
    """A scripted policy that also reads keys."""

    def scores(self, view: View) -> torch.Tensor:
        return view.mean(lambda layer: layer.used()[..., 0].T)


class Load:
    """Takes the requests of one scheduler through our allocator, prefix tree, controller and hooks."""

    def __init__(self, setup: Setup, ranks: Ranks | None = None) -> None:
        evictor = ReadingEvictor(prompt=setup.prompts)
        self.world = world_of(setup, ranks=ranks, evictors=[NamedPolicy("reading", evictor)])
        self.world.evictor = evictor
        self.memory = Memory(self.world, setup.block)
        self.setup = setup
        self.running = list[Req]()
        #: Number of free slots after each step. All ranks must have the same numbers.
        self.free: list[int] = []

    @property
    def controller(self) -> Any:
        return self.world.controller

    def _hook(self, name: str, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "_server", SimpleNamespace(controller=self.controller))
            return hooks._contained(getattr(hooks, name))(*arguments)

    def _polled(self, name: str, **batch: Any) -> None:
        scheduler = SimpleNamespace(running_batch=SimpleNamespace(batch_is_full=True))
        processor = SimpleNamespace(metrics_reporter=SimpleNamespace(scheduler=scheduler))
        before = self.world.to_have()
        output = SimpleNamespace(accept_lens=None)
        self._hook(name, None, processor, SimpleNamespace(decoding_reqs=None, **batch), output)
        more = self.world.to_have() - before
        if self.controller.report.disabled is None and not self.world.ranks.failed:
            assert scheduler.running_batch.batch_is_full == (more <= 0)
        self.check()

    def prefill(self, req: Req) -> None:
        """Prefill in two chunks, unless the tree has most of the prompt."""
        self.running.append(req)
        tree = self.world.tree
        end = 0
        while not end or end < len(req.full_untruncated_fill_ids):
            req.init_next_round_input(None if req.kv.holds_kv else tree)
            most = len(req.full_untruncated_fill_ids)
            req.extend_end = end = most if end else min(most, max(16, req.prefix_len + 4))
            if req.lock is None:
                req.lock = tree.lock(req.last_node)
            slots = self.world.extend(req)
            self.world.write(slots, [1] * len(slots))
            self._script(req)
            checkpoint_kv_cache(req, tree)
            self.check()
        req.output_ids.append(9)
        lengths = dict(prefix_lens=[req.prefix_len], extend_lens=[end - req.prefix_len])
        self._script(req)
        self._polled("_after_prefill", reqs=[req], **lengths)

    def _script(self, req: Req) -> None:
        """Have the policy evict one of three pages of the prompt."""
        if self.setup.prompts:
            at = 4 * (len(self.free) % 3) + 4
            self.world.evictor.waiting[req.rid] = [Eviction(at, 4)]

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            for req in self.running:
                self.world.step(req, 100 + len(req.output_ids))
        self._polled("_after_decode", reqs=self.running)

    def share(self, *pairs: Pair) -> None:
        for req in self.running:
            state = record_of(req)
            if state is not None and state.followed is not None:
                self.world.engine.waiting[state.followed.id] += pairs
        self.decode(1)
        self.decode(1)

    def lend(self, source: Req, reader: Req, pair: Pair) -> None:
        states: list[Any] = [record_of(req) for req in (source, reader)]
        if all(state is not None and state.followed is not None for state in states):
            ids = [state.followed.id for state in states]
            self.world.engine.lent[ids[1]] = [AcrossPair(*pair, ids[0])]
        self.decode(1)
        self.decode(1)

    def shortage(self, slots: int) -> None:
        """Ask for more slots than are left: first for a prompt, then ``slots`` too many for a decode step."""
        allocator = self.world.allocator
        tree = self.world.tree
        if self.setup.when == "short":
            left = allocator.available_size() + tree.evictable_size()
            self.world.admits(left + slots // 2)
            evict_from_tree_cache(tree, left + slots)
        self.check()

    def evict(self, *evictions: Eviction) -> None:
        for req in self.running:
            self.world.evictor.waiting[req.rid] = list(evictions)
        self.decode(1)
        self.world.evictor.waiting.clear()

    def release(self, req: Req, how: str) -> None:
        self.running.remove(req)
        self.world.end(req, how)
        self.check()

    def look(self) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "_server", SimpleNamespace(controller=self.controller))
            asked: Any = SimpleNamespace(rid=routes.DETAILS)
            told = hooks._around_internal_state(pytest.fail, None, asked)
        self._hook("_after_decode_log_parts", ["part"], None)
        return told.internal_state.get("reasoncache")

    def run(self) -> None:
        reqs = [self.world.request(name, [*PROMPT, 0]) for name in "abc"]
        for req in reqs:
            self.prefill(req)
        self.decode(32)
        self.share(Pair(48, 28), Pair(52, 32))
        self.lend(reqs[0], reqs[1], Pair(40, 44))
        self.lend(reqs[1], reqs[2], Pair(44, 40))
        self.shortage(24)
        self.look()
        self.evict(Eviction(36, 4), Eviction(48, 4))
        self.release(reqs[1], "retract")
        self.share(Pair(44, 24), Pair(28, 52))
        self.prefill(reqs[1])
        self.decode(1)
        self.decode(1)
        self.shortage(40)
        self.release(reqs[0], "finish")
        self.decode(1)
        self.release(reqs[2], "abort")
        self.decode(2)
        again = self.world.request("d", [*PROMPT, 0, 9])
        self.prefill(again)
        self.decode(2)
        self.release(reqs[1], "finish")
        self.release(again, "finish")
        self._finish()

    def _finish(self) -> None:
        tree = self.world.tree
        tree.evict(EvictParams(num_tokens=tree.evictable_size()))
        assert self.world.allocator.available_size() == self.world.total
        assert not self.world.allocator.references and not self.controller.report.slots_saved
        self.totals = copy.deepcopy(self.controller.stats)
        tree.reset()

    def check(self) -> None:
        """Check that all slots are accounted for, and that a page is free once or used as often as counted."""
        world = self.world
        page = self.world.page
        named = []
        private = 0
        for _, data in world.nodes():
            named.append(self.memory._page_ids(data.value.numpy()))
        for req in self.running:
            named.append(self.memory._page_ids(world.row(req)[req.kv.cache_protected_len :]))
            private += kv_private_tokens(req.kv, page)
        self.memory._check_pages(named)
        (uncached, _) = self._hook("_after_count_uncached", (private, 0), None) or (private, 0)
        held = world.tree.evictable_size() + world.tree.protected_size() + uncached
        assert world.allocator.available_size() + held == world.total
        self.free.append(world.allocator.available_size())


#: A place in our code, and which call at this place fails: 1 is the first.
Fault = tuple[Site, int]


def sites(setup: Setup, agreed: bool = False) -> tuple[SharingStats, list[Fault]]:
    """The statistics of a run without faults, and one fault for each place: by turns the first or the last call
    at the place fails."""
    for _ in range(2):
        # The first run fills caches, such as ``Faults.computing``. Returns what the second run counted.
        load = Load(setup)
        faults = Faults(agreed=agreed)
        with injected(faults):
            load.run()
    assert load.controller.report.disabled is None
    found = sorted(faults.seen.items())
    return load.totals, [(site, count if i % 2 else 1) for i, (site, count) in enumerate(found)]


def failed(load: Load, faults: Faults) -> Any:
    """Runs the load, in which one call fails. The load checks that no slot is lost. Returns its report."""
    try:
        with injected(faults):
            load.run()
    except BaseException as error:
        told = f"{faults.error.__name__} in call {faults.number} at {faults.site}"
        raise AssertionError(told) from error
    assert faults.raised, faults.site
    return load.look()


@pytest.mark.slow
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_fault_at_any_call_is_contained(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # keeps the faults' tracebacks out of the log
    torch.set_num_threads(1)
    stats, found = sites(setup)
    assert len(found) > 70 and stats.blocks_shared > 6 and stats.blocks_shared_across == 2
    assert stats.blocks_reapplied > 1 and stats.eviction.positions_evicted > 8
    for turn, (site, number) in enumerate(found):
        load = Load(setup)
        faults = Faults(site, number, KINDS[turn % len(KINDS)])
        report = failed(load, faults)
        assert report["disabled"].startswith(f"{faults.error.__name__}: at Site("), site
        assert load.controller.promise() is NOTHING_PROMISED


@pytest.mark.usefixtures("published_config")
def test_before_anything_is_shared_no_request_is_looked_at() -> None:
    """The hooks ask for each batch, of up to hundreds of requests."""
    world = World(SETUPS[0])
    reqs: Any = [None, None]
    tree = world.tree
    assert not tree.reads_shifted(reqs) and tree.evicted_of(reqs) == [0, 0]
    world.allocator.has_shifted_slots = world.allocator.has_evicted = True
    for look in (tree.reads_shifted, tree.evicted_of):
        with pytest.raises(AttributeError):
            look(reqs)


@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("fails", [None, "evicted_of", "reads_shifted"])
def test_a_batch_that_cannot_be_looked_at_may_read_anything(
    fails: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If our hook fails, a new batch is not marked. Our kernels run such a batch, because they read any row."""
    world = World(SETUPS[0])
    world.allocator.has_shifted_slots = world.allocator.has_evicted = True
    backend: Any = SharedSlotReads.__new__(SharedSlotReads)
    backend.paged = SimpleNamespace(reads_shared=True)
    runner: Any = SimpleNamespace(attn_backend=backend)
    made = SimpleNamespace(rids=["r"], forward_mode=None, seq_lens_cpu=None)
    req = world.start()
    batch = SimpleNamespace(tree_cache=world.tree, reqs=[req])
    if fails is not None:
        monkeypatch.setattr(world.tree, fails, None)
    graph_votes._after_forward_batch(made, object, batch, runner)
    mark = mark_of(made)
    disabled = world.controller.report.disabled
    assert (mark is None) == (disabled is not None) == (fails is not None)
    assert mark is None or (mark.needs_ours, mark.evicted) == (False, [0])
    # The host does not know the row's length, so the mark bounds it.
    assert mark is None or mark.slots == req.kv.kv_allocated_len > 0
    # With SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP a request may end before the forward is built. It is read.
    world.abort(req)
    made.rids = ["r"]
    graph_votes._after_forward_batch(made, object, batch, runner)
    mark = mark_of(made)
    assert mark is None or (mark.needs_ours, mark.evicted, mark.slots) == (True, None, None)


def _rank(rank: int, group: Any) -> list[Any]:
    """Raises every fourth fault, on the second rank only. Returns places, free slots, and why sharing ended."""
    logging.disable()
    ranks = functools.partial(Ranks, group)
    seen = []
    with get_context().override_server_args(device="cpu", attention_backend="torch_native"):
        for setup in SETUPS:
            chosen = [sites(setup, True)[1][::4]]
            torch.distributed.broadcast_object_list(chosen, src=0, group=group)
            for turn, (site, number) in enumerate(chosen[0]):
                load = Load(setup, ranks())
                error = KINDS[turn % len(KINDS)]
                with injected(Faults(site if rank else None, number, error, agreed=True)):
                    load.run()
                seen.append((site, load.free, load.controller.report.disabled))
    return seen


@pytest.mark.slow
def test_ranks_stop_together_and_nobody_waits(tmp_path: Path) -> None:
    """Wherever the second rank fails, both ranks have the same number of free slots after each step, because
    both go on inserting into the prefix tree, and freeing slots, in the same way."""
    found = on_two_ranks(_rank, tmp_path, 300)
    stopped = []
    for (site, free, well), (_, other_free, failed) in zip(found[0], found[1], strict=True):
        assert free == other_free, site
        # If a rank fails after the last reduction over the ranks, sharing ends on neither rank.
        assert (well is None) == (failed is None), site
        assert well in (None, "another tensor-parallel rank failed"), site
        if not site.file.startswith("cache"):  # a failure there may follow the last reduction
            stopped.append(well is not None)
    assert sum(stopped) > len(stopped) * 0.8 > 10


def test_what_fails_twice_ends_a_scheduler() -> None:
    reasons = list[str]()
    tries = list[int]()

    def work(number: int) -> None:
        tries.append(number)
        raise MemoryError(f"no {len(tries)}")

    with pytest.raises(MemoryError, match="no 2"):
        Containment(Ranks(), reasons.append).once_more(work, 7)
    assert (tries, reasons) == ([7, 7], ["MemoryError: no 1"])

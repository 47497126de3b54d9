# SPDX-License-Identifier: Apache-2.0
"""Tests that the KV of a retracted request comes back from host memory as it was: with SGLang's own pools, tree
and ``PrefillAdder``."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, CacheRequestOutcome
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.session.session_controller import Session, SessionReqNode

from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.owner import NOTHING_PROMISED
from sglang_reasoncache.cache.swap import swapped_of
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.plugin.server import ServerParts
from sglang_reasoncache.sharing.request import record_of
from tests.property.adder import adder_of
from tests.property.world import Pair, Setup, World, in_host

pytestmark = pytest.mark.usefixtures("published_config")

CHUNK = 1 << 12
SETUPS = [
    Setup(page=page, block=4, slots=160, when=when, core=core)
    for page in (1, 4)
    for when in ("always", "short")
    for core in ("python", "rust")
]


def started(setup: Setup, swap_bytes: int = 1 << 20, *pairs: Pair) -> tuple[World, Req]:
    """A request whose blocks share as ``pairs`` say, with a different content in each slot of its output."""
    world = World(replace(setup, swap=swap_bytes))
    req = world.start()
    if pairs:
        world.propose(req, *pairs)
    for _ in range(3):
        world.controller.after_decode([req])
    if setup.when == "short":
        world.controller.reclaim(10**6, False)
    # A forward would have recorded these.
    slots = torch.from_numpy(world.row(req).copy())
    world.cached_at.record(slots, torch.from_numpy(world.written_at[slots]))
    return world, req


def what_is_read(world: World, req: Req) -> tuple[np.ndarray, np.ndarray]:
    """The content of each position's slot, and the position that its key was rotated for."""
    row = world.row(req)[: len(req.origin_input_ids) + len(req.output_ids) - 1]
    return world.contents()[row], in_host(world.cached_at.positions).numpy()[row]


def overwrite(world: World) -> None:
    """Another request takes all free slots, and ends."""
    count = world.allocator.available_size() + world.tree.evictable_size()
    other = world.request("other", range(5000, 5000 + count - world.page))
    world.prefill(other)
    other.output_ids.append(1)
    world.abort(other)


def admitted(world: World, req: Req) -> int:
    """Have SGLang admit ``req`` and prefill it. Returns how many tokens are computed."""
    req.init_next_round_input(world.tree)
    adder = adder_of(world, [], CHUNK)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert adder.can_run_list == [req]
    slots = world.extend(req)
    world.write(slots, [1] * len(slots))
    checkpoint_kv_cache(req, world.tree)
    return len(slots)


@pytest.mark.parametrize("others", [False, True], ids=["prefix-cached", "prefix-evicted"])
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_all_but_the_last_page_comes_back(setup: Setup, shares: bool, others: bool) -> None:
    world, req = started(setup, 1 << 20, *[Pair(8, 24), Pair(12, 20)] * shares)
    assert (world.controller.pipeline.saved > 0) == shares
    contents, cached_at = what_is_read(world, req)
    world.retract(req)
    swapped = swapped_of(req)
    assert swapped is not None and world.controller.pipeline.saved == 0
    if others:
        overwrite(world)
    computed = admitted(world, req)
    assert computed <= setup.page and swapped_of(req) is None
    kept = swapped.length
    again, cached_again = what_is_read(world, req)
    assert (again[:kept] == contents[:kept]).all()
    assert (cached_again[:kept] == cached_at[:kept]).all()
    assert (
        world.tree.reads_shifted([req]) == shares == (cached_again != np.arange(len(again))).any()
    )
    # It goes on as before: it shares again, and gives all its slots back.
    world.step(req)
    for _ in range(4):
        world.controller.after_decode([req])
    record = record_of(req)
    assert record is not None and record.row is not None
    world.finish(req)
    world.assert_empty()


@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[-1]], ids=str)
@pytest.mark.parametrize("logprobs_from", [0, 3, None], ids=["all", "some", "output"])
def test_a_request_that_asks_for_log_probabilities_comes_back(
    setup: Setup, logprobs_from: int | None
) -> None:
    """SGLang looks up no prefix of it behind the position where they begin. Those of the prompt are known by
    then, and are not computed again."""
    world, req = started(setup, 1 << 20)
    contents, _ = what_is_read(world, req)
    req.return_logprob = True
    req.logprob_start_len = len(req.origin_input_ids) if logprobs_from is None else logprobs_from
    world.retract(req)
    assert world.allocator.swap is not None and world.allocator.swap.num_bytes > 0
    swapped = swapped_of(req)
    assert swapped is not None
    kept = swapped.length
    overwrite(world)
    assert admitted(world, req) <= setup.page
    assert swapped_of(req) is None
    assert (what_is_read(world, req)[0][:kept] == contents[:kept]).all()
    world.finish(req)
    world.assert_empty()


def test_a_copy_of_tokens_that_sglang_dropped_is_given_up() -> None:
    """SGLang begins anew with a request whose prompt is embeddings."""
    world, req = started(SETUPS[0])
    world.retract(req)
    req.output_ids = req.output_ids[:0]
    admitted(world, req)
    assert world.allocator.swap is not None and world.allocator.swap.num_bytes == 0


def test_a_copy_beyond_the_limit_is_not_made() -> None:
    world, req = started(SETUPS[0], 64)
    world.retract(req)
    assert swapped_of(req) is None
    assert admitted(world, req) > 1


def test_what_the_host_has_is_bounded_and_given_back() -> None:
    world, req = started(SETUPS[0])
    swap: Any = world.allocator.swap
    world.retract(req)
    assert 0 < swap.num_bytes <= 1 << 20
    admitted(world, req)
    assert swap.num_bytes == 0
    world.step(req)
    world.retract(req)
    assert swap.num_bytes > 0
    world.assert_empty()
    assert swapped_of(req) is None and swap.num_bytes == 0, "a flush may change the weights"


def test_a_pause_copies_nothing_and_teaches_nothing() -> None:
    """What SGLang retracts for a pause is computed again: the weights may change. Earlier copies go, too."""
    world, req = started(SETUPS[0])
    swap: Any = world.allocator.swap
    controller = world.controller
    world.retract(req)
    assert swap.num_bytes > 0
    reserved = controller.shortage.headroom.ahead
    other = world.start("other", first=100)
    with controller.pausing():
        assert swap.num_bytes == 0 and swapped_of(req) is None
        world.retract(other)
        assert swapped_of(other) is None
    assert controller.shortage.headroom.ahead == reserved
    assert controller.stats.requests_swapped == 1
    admitted(world, other)
    world.retract(other)
    assert swapped_of(other) is not None


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_decode_server_copies_shared_pages_slot_by_slot(core: str) -> None:
    """SGLang's host pool would copy the page of each page's first slot."""
    setup = Setup(page=4, block=4, slots=160, core=core, when="always", decodes=True)
    world, req = started(setup, 0, Pair(8, 26))
    tree: Any = world.tree
    row = world.row(req)
    assert len({slot // 4 for slot in row[8:12].tolist()}) > 1, "a page names slots of several"
    before, _ = what_is_read(world, req)
    backup = tree.backup_kv_cache(req)
    assert backup.cpu_tensors is not None and backup.host_indices is None
    slots = np.unique(row)
    world.write(slots, [1] * len(slots))
    assert (what_is_read(world, req)[0] == 1).all()
    tree.restore_kv_cache(req, backup)
    assert what_is_read(world, req)[0].tolist() == before.tolist()
    assert world.allocator.handover.num_bytes == 0
    world.abort(req)
    world.assert_empty()


@pytest.mark.parametrize("ends", ["restore", "discard"])
def test_what_a_full_host_pool_does_not_take_is_copied_within_a_limit(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends a request whose copy its host pool has no room for."""
    monkeypatch.setattr(UnifiedRadixCache, "backup_kv_cache", lambda tree, req: None)
    world, req = started(replace(SETUPS[0], decodes=True), 0)
    tree: Any = world.tree
    length = req.seqlen - 1
    world.allocator.handover = Handover(
        world.rows, world.cached_at, None, room=2 * length - 1, slot_bytes=3
    )
    handover = world.allocator.handover
    before, _ = what_is_read(world, req)
    backup = tree.backup_kv_cache(req)
    assert backup.cpu_tensors is not None and handover.counts(req)
    assert handover.num_bytes == 3 * length and handover.room == length - 1
    req.kv.retraction_backup = None
    assert tree.backup_kv_cache(req) is None, "one request too many"
    if ends == "restore":
        slots = world.row(req)
        world.write(slots, [1] * len(slots))
        req.kv.retraction_backup = backup
        tree.restore_kv_cache(req, backup)
        assert what_is_read(world, req)[0].tolist() == before.tolist()
    else:
        tree.discard_kv_cache_backup(backup)
    assert handover.num_bytes == 0 and req.kv.retraction_backup is None
    world.abort(req)
    world.assert_empty()


def test_a_request_that_sglang_ends_is_not_copied() -> None:
    """SGLang's ``retract_decode`` ends the last request if even that one finds no slot."""
    world, req = started(SETUPS[0])
    req.to_finish = FINISH_ABORT("Out of memory")
    world.retract(req)
    assert swapped_of(req) is None


def test_what_finds_no_slots_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, req = started(SETUPS[0])
    world.retract(req)
    monkeypatch.setattr(world.allocator, "alloc", lambda count: None)
    req.init_next_round_input(world.tree)
    adder = adder_of(world, [], CHUNK)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    monkeypatch.undo()
    assert adder.can_run_list == [req]
    slots = world.extend(req)
    assert len(slots) > 1
    world.abort(req)
    world.assert_empty()


@pytest.mark.parametrize("site", ["get_cpu_copy", "load_cpu_copy"])
def test_a_copy_that_fails_is_contained(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is disabled, the request's KV is computed again, and no slot is lost."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no host memory")

    world, req = started(SETUPS[0])
    monkeypatch.setattr(world.allocator.shared_pool, site, fail)
    world.retract(req)
    assert admitted(world, req) > 1 and swapped_of(req) is None
    assert world.controller.report.disabled == "RuntimeError: no host memory"
    world.finish(req)
    world.assert_empty()


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
@pytest.mark.parametrize("in_tree", [True, False], ids=["prompt-cached", "prompt-not-cached"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_what_was_approximate_is_not_published(
    setup: Setup, in_tree: bool, corrected: bool
) -> None:
    """A request that shared, was swapped out and came back publishes no more than if it had stayed, although no
    two of its positions share a slot now."""
    world, req = started(setup, 1 << 20, Pair(8, 24), Pair(12, 20))
    if not corrected:
        swap: Any = world.allocator.swap
        swap._cached_at = None
    for _ in range(2):
        req.skip_radix_cache_insert = not in_tree
        world.retract(req)
        assert admitted(world, req) <= setup.page
        assert world.tree.reads_shifted([req])
        req.skip_radix_cache_insert = False
        world.step(req)
    tokens = [*req.origin_input_ids, *req.output_ids]
    world.finish(req)
    again = world.request("again", tokens)
    again.init_next_round_input(world.tree)
    assert again.prefix_len <= 8, "position 8 was redirected"
    world.assert_empty()


def test_an_idle_plugin_leaves_admission_to_sglang() -> None:
    world, _ = started(SETUPS[0])
    world.controller._is_active = False
    world.controller.learns = False
    assert world.controller.promise() is NOTHING_PROMISED


class TwoRanks(Ranks):
    """This rank, and another one that agrees with it."""

    def __init__(self) -> None:
        super().__init__(group=SimpleNamespace(size=lambda: 2))


@pytest.mark.parametrize("fails", ["before", "copying", "loading"])
def test_ranks_go_on_together_after_a_failure(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retraction does not end the schedulers of several ranks once sharing has ended, or when it ends now."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no host memory")

    world = World(replace(SETUPS[0], swap=1 << 20), ranks=TwoRanks())
    req = world.start()
    if fails == "before":
        world.controller.containment.together(fail)
    else:
        site = {"copying": "get_cpu_copy", "loading": "load_cpu_copy"}[fails]
        monkeypatch.setattr(world.allocator.shared_pool, site, fail)
    world.retract(req)
    assert (swapped_of(req) is not None) == (fails == "loading")
    assert admitted(world, req) > 1
    assert world.controller.report.disabled == "RuntimeError: no host memory"
    world.finish(req)
    world.assert_empty()


def test_a_copy_that_was_not_loaded_is_dropped() -> None:
    """Otherwise it would take host memory until the request is gone."""
    world, req = started(SETUPS[0])
    swap: Any = world.allocator.swap
    world.retract(req)
    assert swap.num_bytes > 0
    world.prefill(req)
    assert swapped_of(req) is None and swap.num_bytes == 0
    world.abort(req)
    world.assert_empty()


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "in a session"])
def test_what_an_aborted_request_leaves_is_dropped(in_session: bool) -> None:
    """While it waits, and although a session keeps the request for its next turns."""
    world, req = started(SETUPS[0], 1 << 20, Pair(8, 24))
    swap: Any = world.allocator.swap
    record = record_of(req)
    assert record is not None and record.followed is not None
    number = record.followed.id
    if in_session:
        req.session = Session(1000, "s")
        req.session.req_nodes[req.rid] = SessionReqNode(req)
    world.retract(req)
    assert swap.num_bytes > 0
    # Another process that serves HTTP may have let another request have this id.
    other = CacheRequestHandle(rid=req.rid, attempt_id=0)
    world.tree.finish(other, CacheRequestOutcome.ABORT)
    assert swapped_of(req) is not None and number not in world.engine.closed
    world.tree.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
    assert swap.num_bytes == 0 and swapped_of(req) is None
    assert number in world.engine.closed
    world.engine.closed.clear()
    del req
    next_one = world.start("other", 300)
    world.controller.after_decode([next_one])
    assert not world.engine.closed, "the filter was told twice"


def test_nothing_is_copied_for_a_request_that_could_not_load_it() -> None:
    """Without a prefix cache SGLang admits requests that ignore the end of text without asking the tree."""
    for ignores in (False, True):
        world = World(replace(SETUPS[0], swap=1 << 20), no_tree=True)
        req = world.start()
        req.sampling_params.ignore_eos = ignores
        world.retract(req)
        assert (swapped_of(req) is None) == ignores
        computed = admitted(world, req)
        assert (computed > 1) == ignores
        world.finish(req)


def test_nothing_of_older_weights_is_loaded() -> None:
    world, req = started(SETUPS[0])
    swap: Any = world.allocator.swap
    world.retract(req)
    assert swap.num_bytes > 0
    world.controller.weights_changed()
    assert swapped_of(req) is None and swap.num_bytes == 0
    assert admitted(world, req) > 1
    world.finish(req)
    world.assert_empty()


def test_nothing_that_older_weights_computed_is_copied_later() -> None:
    """A request that runs while weights change goes on with the KV it has. Retracted later, it is computed
    again, and from then on its KV is new."""
    world, req = started(SETUPS[0])
    swap: Any = world.allocator.swap
    world.controller.weights_changed()
    world.retract(req)
    assert swapped_of(req) is None and swap.num_bytes == 0
    assert admitted(world, req) > 1
    world.step(req)
    world.retract(req)
    assert swapped_of(req) is not None
    assert admitted(world, req) == 1
    world.finish(req)
    world.assert_empty()


def test_what_comes_back_was_not_computed_again() -> None:
    """So the record lists its blocks, and nothing that was sampled before exact KV was computed."""
    world, req = started(SETUPS[0], 1 << 20, Pair(8, 24))
    world.retract(req)
    admitted(world, req)
    world.step(req)
    world.controller.after_decode([req])
    record = record_of(req)
    assert record is not None and len(record.approximate) == 1
    assert record.recomputed == [] and record.sampled is None
    world.finish(req)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("lags", [False, True])
def test_a_state_of_other_tokens_is_not_copied(
    buffers: bool, speculates: bool, overlaps: bool, lags: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the overlap schedule the accepted tokens are known when the next step is under way. With
    ``--enable-linear-replayssm-spec`` a ring holds the newest tokens, and the state lacks them."""
    ring = torch.zeros(1) if lags else None
    states = SimpleNamespace(replayssm_spec_write_pos=ring)
    tree: Any = SimpleNamespace(
        is_mamba_enabled=True,
        enable_mamba_extra_buffer=buffers,
        is_swa_enabled=False,
        cache_controller=None,
        least_window_pool=0,
        req_to_token_pool=SimpleNamespace(mamba_pool=states),
    )
    parts: Any = SimpleNamespace(_draft_pools=[], _cached=None, _reads_as_cached=lambda _: None)
    algorithm = "NGRAM" if speculates else None
    args: Any = SimpleNamespace(speculative_algorithm=algorithm, disaggregation_mode="null")
    resolved = ResolvedConfig(ReasonCacheConfig(host_swap_gb=1), page=1)
    with get_context().override_server_args(disable_overlap_schedule=not overlaps):
        swap = ServerParts._swap(parts, tree, resolved, args)
    ahead = speculates and overlaps and not buffers
    assert ahead == ("further than the tokens that are known" in caplog.text)
    assert (lags and not buffers and not ahead) == ("states lag behind the tokens" in caplog.text)
    assert (swap is None) == (ahead or (lags and not buffers))

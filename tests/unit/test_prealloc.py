# SPDX-License-Identifier: Apache-2.0
"""What the decode server of a PD pair reclaims for a prompt, with SGLang's own ``DecodePreallocQueue``."""

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.runtime_context import get_context

from sglang_reasoncache import compat
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.owner import NOTHING_PROMISED
from sglang_reasoncache.plugin import disaggregation
from tests.property.test_disaggregation import BACKUP, PDWorld, Queue
from tests.property.world import Pair, Setup

RESERVE = 2


@pytest.fixture(autouse=True)
def decode_server() -> Iterator[None]:
    with get_context().override_server_args(
        device="cpu",
        attention_backend="torch_native",
        disaggregation_mode="decode",
        disaggregation_decode_retraction_backup=BACKUP,
        disaggregation_decode_enable_radix_cache=False,
        disaggregation_decode_host_receive_threshold=1.0,
    ):
        yield


def queue_of(running: int, slots: int) -> Queue:
    """The queue of a server that runs requests, each with 8 slots in the ledger."""
    setup = Setup(page=1, block=4, slots=slots, when="short", need_sort=True, decodes=True)
    world = PDWorld(setup, no_tree=True)
    reqs = [world.start(f"r{at}", first=100 * at + 100) for at in range(running)]
    for req in reqs:
        world.propose(req, Pair(8, 24), Pair(12, 20))
        world.controller.after_decode(reqs)
        req.sampling_params.max_new_tokens = 12
    for _ in range(3):
        world.controller.after_decode(reqs)
    assert world.controller.pipeline.ledger.slots == 8 * running
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=reqs),
        waiting_queue=[],
        last_batch=None,
        tp_worker=SimpleNamespace(is_hybrid_swa=False),
        enable_hisparse=False,
    )
    queue = Queue(world, scheduler, RESERVE)
    queue.queue.append(SimpleNamespace(req=reqs[0]))
    return queue


def admits(queue: Queue, tokens: int) -> bool:
    """Whether the queue admits a prompt of ``tokens``, by SGLang's steps."""
    held = sum(req.seqlen for req in queue.scheduler.running_batch.reqs)
    req = queue.world.request("new", range(1000, 1000 + tokens))
    req.sampling_params.max_new_tokens = 8
    budget = queue._allocatable_token_budgets(retractable_tokens=held)
    needed = queue._required_admission_tokens(req, tokens, 0, held)
    return queue._prealloc_reservation_fits(
        needed, 0, full_allocatable_tokens=budget, swa_allocatable_tokens=None
    )


@pytest.mark.parametrize("running", [1, 3])
def test_running_requests_share_as_much_as_a_prompt_lacks(running: int) -> None:
    """Beside few requests SGLang keeps slots for the longest to finish; beside many that number is negative."""
    queue = queue_of(running, slots=60 * running)
    allocator = queue.world.allocator
    free = allocator.free_size()
    assert admits(queue, free) and not queue.reclaimed, "the ledger counts for output"
    assert admits(queue, free + 2) and queue.reclaimed == 1
    assert allocator.free_size() >= free + 2
    assert not admits(queue, free + 100)


def comes_back(queue: Queue, req: Req) -> bool:
    """Whether the queue admits a retracted request again, by SGLang's steps."""
    queue.retracted_queue = [req]
    budget = queue._allocatable_token_budgets(count_retracted=False)
    needed, _ = queue._prealloc_required_tokens(req)
    return queue._prealloc_reservation_fits(
        needed, 0, full_allocatable_tokens=budget, swa_allocatable_tokens=None
    )


def test_a_request_nearly_as_long_as_the_pool_comes_back_once_nothing_runs() -> None:
    """While it shared it took fewer slots. SGLang admits nobody else before it, and learns nothing more."""
    queue = queue_of(2, slots=120)
    queue.num_reserved_decode_tokens = 40
    queue.queue.clear()
    req, other = queue.scheduler.running_batch.reqs
    queue.world.finish(req)
    queue.scheduler.running_batch.reqs = [other]
    req.output_ids.extend(range(100, 100 + 118 - req.seqlen))
    assert not comes_back(queue, req), "beside another the reserve is kept"
    queue.world.finish(other)
    queue.scheduler.running_batch.reqs = []
    assert queue.world.allocator.free_size() == 120
    assert comes_back(queue, req)
    req.output_ids.extend([7, 7, 7])
    assert not comes_back(queue, req), "the pool is smaller"


def test_what_sharing_takes_from_the_last_request_is_not_given_away() -> None:
    """SGLang keeps slots for the longest request to finish if all others are retracted. The more they share,
    the fewer slots their retraction frees."""
    queue = queue_of(3, slots=180)
    longest = queue.scheduler.running_batch.reqs[0]
    held = sum(req.seqlen for req in queue.scheduler.running_batch.reqs)
    longest.sampling_params.max_new_tokens = held + 20
    least = queue._need_space_for_single_req(held)
    assert least == 26 > queue.world.controller.promise().shareable
    there = queue.world.allocator.free_size()
    assert admits(queue, there - least - RESERVE)
    assert not admits(queue, there - least - RESERVE + 1) and not queue.reclaimed


@pytest.mark.parametrize("overlaps", [True, False])
def test_states_in_flight_are_not_retracted_more_often(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the overlap schedule SGLang copies a state that is one step ahead of the request's tokens, and goes
    on with it: its own large reserve makes that rarer."""
    queue = queue_of(1, slots=60)
    hybrid = compat.HybridLinearKVPool.__new__(compat.HybridLinearKVPool)
    monkeypatch.setattr(queue.token_to_kv_pool_allocator, "get_kvcache", lambda: hybrid)
    schedule = SimpleNamespace(disable_overlap_schedule=not overlaps)
    monkeypatch.setattr(disaggregation.compat, "get_schedule", lambda: schedule)
    promise = queue.admission._promise_now(queue)
    assert (promise is NOTHING_PROMISED) == overlaps


@pytest.mark.parametrize(
    ("pooled", "beyond", "counts"),
    [(0, 0, 0), (132, 132, 0), (152, 0, 10), (0, 152, 10), (152, 152, 20), (999, 999, 867)],
)
def test_what_is_reserved_less_than_by_sglang_has_room_on_the_host(
    pooled: int, beyond: int, counts: int
) -> None:
    """SGLang ends a request that it retracts if there is no room for the copy. A copy is a request whole, and
    one that shares frees less than it takes."""
    queue = queue_of(3, slots=180)
    queue.num_reserved_decode_tokens = 100
    running = queue.scheduler.running_batch.reqs
    assert max(req.seqlen for req in running) + 100 == 132
    held = sum(req.seqlen for req in running)
    host_pool = SimpleNamespace(available_size=lambda: pooled)
    entries = {"kv": SimpleNamespace(host_pool=host_pool)}
    queue.tree_cache.host_pool_group = SimpleNamespace(entry_map=entries)
    queue.world.allocator.handover = Handover(
        queue.world.rows, queue.world.cached_at, None, room=beyond
    )
    with get_context().override_server_args(disaggregation_decode_retraction_backup="host_pool"):
        promise = queue.world.controller.promise()
        learned = promise.reserved(100, 1)
        assert learned < 100
        left = queue._allocatable_token_budgets(retractable_tokens=held)
        kept = queue.num_reserved_decode_tokens
        assert kept == math.ceil(max(learned, 100 - counts / 4))
        free = queue.world.allocator.available_size()
        assert left == free - max(3 * kept - promise.shareable, 0)
        if counts:
            # Those that SGLang admitted in the same pass, and longer ones, leave less.
            queue._allocatable_token_budgets(retractable_tokens=held, extra_reserved_reqs=2)
            assert queue.num_reserved_decode_tokens == math.ceil(max(learned, 100 - counts / 6))
            longer = queue.world.request("long", range(2000, 2000 + 900))
            queue.transfer_queue.queue.append(SimpleNamespace(req=longer, host_staged=False))
            queue._allocatable_token_budgets(retractable_tokens=held)
            assert queue.num_reserved_decode_tokens == 100, "no room for a copy of it"
            queue.transfer_queue.queue.clear()
            queue._required_admission_tokens(longer, 900, 0, held)
            assert queue.num_reserved_decode_tokens == 100, "nor of what SGLang checks"
        queue.retracted_queue.append(running[0])
        again = queue._allocatable_token_budgets(retractable_tokens=held, count_retracted=False)
        assert queue.num_reserved_decode_tokens == learned, "those that come back empty the host"
        assert again >= left

# SPDX-License-Identifier: Apache-2.0
"""Tests prompts that SGLang's ``PrefillAdder`` admits because blocks of the ledger will share. A prompt that is
computed in chunks must find its slots whatever happens between two chunks: a failed allocation would end the
scheduler. ``tests/property/test_scheduling.py`` tests the same with random requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.runtime_context import get_spec

from sglang_reasoncache.cache import admission
from sglang_reasoncache.filter.matcher import AcrossPair
from sglang_reasoncache.sharing import pipeline
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.adder import adder_of
from tests.property.world import Pair, Setup, World
from tests.unit.test_across import running, state, world_of

CHUNK = 16


def siblings() -> tuple[World, Req]:
    """Three responses whose blocks can read a fourth one's slots. Returns that one, too. The ledger promises 60
    slots, three times those of the fourth."""
    world = world_of(Setup(page=1, block=4, slots=140, when="short"), max_rows=6)
    source = world.start("a")
    for number, name in enumerate("bcd", 2):
        reader = world.start(name, first=100 * number)
        lent = [AcrossPair(at, at, state(source).followed.id) for at in range(8, 28, 4)]
        world.engine.lent[state(reader).followed.id] = lent
        world.step(reader)
    for _ in range(4):
        world.controller.after_decode(running(world))
    assert world.controller.pipeline.ledger.slots == 60
    return world, source


def alone() -> tuple[World, Req]:
    """One response with two blocks in the ledger."""
    world = World(Setup(page=1, block=4, slots=60, when="short"))
    req = world.start()
    world.propose(req, Pair(8, 20), Pair(12, 24))
    for _ in range(2):
        world.controller.after_decode([req])
    assert world.controller.pipeline.ledger.slots == 8
    return world, req


def there(world: World) -> int:
    """Free or evictable slots."""
    return int(world.allocator.available_size() + world.tree.evictable_size())


def arrive(world: World, length: int) -> Req:
    """A request with a prompt of ``length`` tokens that no other request has."""
    for req in running(world):
        req.sampling_params.max_new_tokens = len(req.output_ids) + 8
    req = world.request("new", range(1000, 1000 + length))
    req.sampling_params.max_new_tokens = 1
    return req


def first_chunk(world: World, req: Req) -> bool:
    """Admit ``req`` and compute its first chunk. Returns whether SGLang admits it."""
    adder = adder_of(world, running(world), CHUNK, ratio=0.0)
    req.init_next_round_input(world.tree)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    if not adder.can_run_list:
        return False
    assert adder.new_chunked_req is req
    compute(world, req)
    return True


def next_chunk(world: World, req: Req) -> bool:
    """Compute the next chunk. Returns whether SGLang puts it off."""
    adder = adder_of(world, running(world), CHUNK, ratio=0.0)
    req.init_next_round_input()
    adder.add_chunked_req(req)
    if not adder.can_run_list:
        return True
    compute(world, req)
    return False


def compute(world: World, req: Req) -> None:
    slots = world.extend(req)
    world.write(slots, [1] * len(slots))
    checkpoint_kv_cache(req, world.tree)


def is_computed(req: Req) -> bool:
    return req.extend_end == len(req.full_untruncated_fill_ids)


def leave(world: World, req: Req, how: str) -> None:
    if how == "fails":
        with world.controller.containment:
            raise RuntimeError("a failure of the plugin")
    elif how != "stays":
        world.end(req, how)


@pytest.mark.parametrize("how", ["stays", "finish", "abort", "retract", "fails"])
@pytest.mark.parametrize("made", [siblings, alone])
def test_a_prompt_finds_its_slots_whatever_leaves_between_two_chunks(made: Any, how: str) -> None:
    world, source = made()
    promised = world.controller.pipeline.ledger.slots
    req = arrive(world, there(world) + promised // 2)
    assert first_chunk(world, req), "SGLang counts the slots of the ledger"
    assert world.controller.pipeline.saved >= promised // 2, (
        "the whole prompt's slots were reclaimed"
    )
    leave(world, source, how)
    for _ in range(20):
        if is_computed(req):
            break
        assert not next_chunk(world, req)
    assert is_computed(req)
    req.output_ids.append(1)


@pytest.mark.parametrize("made", [siblings, alone])
def test_a_prompt_that_even_the_ledger_cannot_hold_waits(made: Any) -> None:
    """It waits, nothing shares for it, and the next polls measure more blocks."""
    world, _ = made()
    blocks = world.controller.pipeline
    blocks._polls_to_measure = 0
    req = arrive(world, there(world) + blocks.ledger.slots + 1)
    assert not first_chunk(world, req)
    assert blocks.saved == 0 and blocks._polls_to_measure > 0
    assert not world.controller.admits_again()


def test_a_pass_reclaims_a_bounded_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request decodes while slots are reclaimed for a prompt. A prompt that needs more is admitted in a
    later pass, and the controller has SGLang try again."""
    monkeypatch.setattr(admission, "MOST_AT_ONCE", 8)
    monkeypatch.setattr(pipeline, "_LEAST_RECLAIMED", 1)
    world, _ = siblings()
    req = arrive(world, there(world) + 30)
    saved = [0]
    while not first_chunk(world, req):
        saved.append(world.controller.pipeline.saved)
        assert 8 <= saved[-1] - saved[-2] < 8 + 4
        assert world.controller.admits_again() and not world.controller.admits_again()
    assert len(saved) == 1 + 3


def test_a_chunk_waits_while_no_slot_is_left() -> None:
    """Running requests took the slots. The chunk is put off, nothing else is admitted beside it, and it is
    computed when a request has left."""
    world, other = alone()
    req = arrive(world, there(world) - 2)
    assert first_chunk(world, req)
    for _ in range(there(world)):
        world.step(other)
    while world.controller.pipeline.ledger.slots:
        world.controller.reclaim(1, evicts=False)
    for _ in range(there(world)):
        world.step(other)
    assert there(world) == 0
    adder = adder_of(world, running(world), CHUNK, ratio=0.0)
    req.init_next_round_input()
    assert adder.add_chunked_req(req) is req and adder.can_run_list == []
    late = world.request("late", [7, 7])
    late.sampling_params.max_new_tokens = 1
    world.abort(other)
    # SGLang may free slots in the same pass, by preemption. It must not admit a request beside the chunk.
    late.init_next_round_input(world.tree)
    admitted = adder.add_one_req(late, has_chunked_req=True, truncation_align_size=None)
    assert admitted is AddReqResult.NO_TOKEN and adder.can_run_list == []
    while not is_computed(req):
        assert not next_chunk(world, req)
    req.output_ids.append(1)


def test_nothing_is_admitted_beside_a_chunk_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else SGLang may cut the prompt that it admits, too. It knows one unfinished prompt, and would end the
    scheduler."""
    monkeypatch.setattr(admission, "MOST_AT_ONCE", 12)
    monkeypatch.setattr(pipeline, "_LEAST_RECLAIMED", 1)
    world, _ = siblings()
    req = arrive(world, there(world) - 2)
    assert first_chunk(world, req)
    # Requests that decode between two chunks took all slots but one.
    taken = world.allocator.alloc(world.allocator.available_size() - 1)
    assert world.controller.pipeline.ledger.slots > 12 + CHUNK
    adder = adder_of(world, running(world), CHUNK, ratio=0.0)
    req.init_next_round_input()
    assert adder.add_chunked_req(req) is req and adder.can_run_list == [req]
    left = adder.rem_chunk_tokens
    assert left is not None and 0 < left < 12 and req.extend_len == CHUNK - left
    late = world.request("late", range(3000, 3000 + left + 1))
    late.sampling_params.max_new_tokens = 1
    late.init_next_round_input(world.tree)
    adder.add_one_req(late, has_chunked_req=True, truncation_align_size=None)
    assert adder.new_chunked_req is None and adder.can_run_list == [req]
    compute(world, req)
    world.allocator.free(taken)
    while not is_computed(req):
        assert not next_chunk(world, req)
    req.output_ids.append(1)


@pytest.mark.parametrize(("drafts", "accepted"), [(4, 4), (4, 2)])
@pytest.mark.parametrize(("interval", "length"), [(1, 700), (1, 1000), (3, 600), (3, 900)])
def test_what_a_verification_accepts_between_chunks_finds_slots(
    interval: int, length: int, drafts: int, accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below: a decode step of a server that speculates gives a request several tokens."""
    schedule = SimpleNamespace(prefill_decode_interval=interval, chunked_prefill_size=CHUNK)
    monkeypatch.setattr(admission.compat, "get_schedule", lambda: schedule)
    monkeypatch.setattr(admission.compat, "get_alloc_reserve_per_decode", lambda: 2 * drafts)
    monkeypatch.setattr("tests.property.world.MAX_CONTEXT", 4096)
    setup = Setup(page=1, block=4, slots=1200, when="short", drafts=drafts)
    world = World(setup, max_rows=4)
    req = world.start()
    req.sampling_params.max_new_tokens = 1000
    world.controller.shortage.headroom.ahead = 2.0 * drafts
    new = world.request("new", range(5000, 5000 + length))
    new.sampling_params.max_new_tokens = 1
    new.init_next_round_input(world.tree)
    adder = adder_of(world, [req], CHUNK, ratio=0.3)
    adder.add_one_req(new, has_chunked_req=False, truncation_align_size=None)
    # SGLang reserves 300 tokens of output.
    between = min(interval * drafts * length // CHUNK, 300)
    assert (adder.can_run_list == [new]) == (length + between < 1150)
    decoded = 0
    while adder.can_run_list and not is_computed(new) and decoded < 300:
        compute(world, new)
        for _ in range(interval):
            assert world.can_decode([req]), "SGLang would end the request"
            world.draft([req])
            world.write(world.accept(req, accepted), [7] * accepted)
            req.output_ids.extend([7] * accepted)
            decoded += accepted
        new.init_next_round_input()
        adder = adder_of(world, [req], CHUNK, ratio=0.3)
        adder.add_chunked_req(new)
        assert adder.can_run_list == [new], "the chunk was put off"
    with get_spec().override(speculative_algorithm="NGRAM"):
        for each in (new, req):
            if each.kv.holds_kv:
                world.abort(each)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("interval", [0, 3])
@pytest.mark.parametrize("length", [900, 1020, 1120])
def test_what_decodes_between_chunks_finds_slots(
    length: int, interval: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk of a long prompt that is put off keeps its slots, and SGLang ends the last running request that
    finds none. So a long prompt waits until it fits beside the tokens that are decoded between its chunks."""
    steps = max(interval, mixed)
    admitted = length + steps * length // CHUNK < 1160
    schedule = SimpleNamespace(prefill_decode_interval=interval, chunked_prefill_size=CHUNK + mixed)
    monkeypatch.setattr(admission.compat, "get_schedule", lambda: schedule)
    monkeypatch.setattr("tests.property.world.MAX_CONTEXT", 4096)
    world = World(Setup(page=1, block=4, slots=1200, when="short"), max_rows=4)
    req = world.start()
    req.sampling_params.max_new_tokens = 1000
    # The reserve that admission has learnt is smaller.
    world.controller.shortage.headroom.ahead = 2.0
    new = world.request("new", range(5000, 5000 + length))
    new.sampling_params.max_new_tokens = 1
    new.init_next_round_input(world.tree)
    adder = adder_of(world, [req], CHUNK + mixed, ratio=0.3, mixed=mixed)
    # Another prompt's last chunk leaves a part of the pass.
    adder.rem_chunk_tokens -= 10
    adder.add_one_req(new, has_chunked_req=False, truncation_align_size=None)
    assert (adder.can_run_list == [new]) == admitted
    while admitted and not is_computed(new):
        compute(world, new)
        for _ in range(steps):
            assert world.can_decode([req]), "SGLang would end the request"
            world.step(req)
        new.init_next_round_input()
        adder = adder_of(world, [req], CHUNK + mixed, ratio=0.3, mixed=mixed)
        adder.add_chunked_req(new)
        assert adder.can_run_list == [new], "the chunk was put off"


@pytest.mark.parametrize("length", [880, 960, 1040])
def test_a_prompt_in_chunks_leaves_room_for_what_runs_between_them(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang cannot retract a prompt between two chunks. It ends the last running request instead."""
    schedule = SimpleNamespace(prefill_decode_interval=22, chunked_prefill_size=64)
    monkeypatch.setattr(admission.compat, "get_schedule", lambda: schedule)
    monkeypatch.setattr("tests.property.world.MAX_CONTEXT", 4096)
    world = World(Setup(page=1, block=4, slots=1280, when="short"), max_rows=4)
    runs = world.start()
    runs.sampling_params.max_new_tokens = 1000
    req = world.request("new", range(5000, 5000 + length))
    req.sampling_params.max_new_tokens = 256
    req.init_next_round_input(world.tree)
    adder = adder_of(world, [runs], 64)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    while adder.can_run_list:
        slots = world.extend(req)
        world.write(slots, [1] * len(slots))
        checkpoint_kv_cache(req, world.tree)
        if req.extend_end == length:
            break
        for _ in range(22):
            assert world.can_decode([runs]), "SGLang ends the running request"
            world.step(runs)
        req.init_next_round_input()
        adder = adder_of(world, [runs], 64)
        adder.add_chunked_req(req)
    for each in (req, runs):
        if each.kv.holds_kv:
            world.abort(each)

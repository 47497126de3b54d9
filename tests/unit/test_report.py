# SPDX-License-Identifier: Apache-2.0
"""Tests our HTTP endpoints. ``/reasoncache`` shows every client the totals. Data of single requests is shown
only at other paths, which require SGLang's admin key if one is set."""

import asyncio
import dataclasses
import weakref
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import (
    AbortReq,
    GetInternalStateReq,
    GetInternalStateReqOutput,
)
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_reasoncache import compat
from sglang_reasoncache.compat.carriers import ASKED
from sglang_reasoncache.custom_params import Asked
from sglang_reasoncache.plugin import hooks, page, report, routes
from sglang_reasoncache.sharing.blocks import Candidate, Run
from sglang_reasoncache.sharing.request import RequestRecord, known_record
from tests.eviction.rows import SINGLE, begun
from tests.property.world import Eviction, Pair, SlowMeter, World

pytestmark = pytest.mark.usefixtures("published_config")

TOTALS = "/reasoncache"
DETAILS = "/reasoncache/details"
PAGE = "/reasoncache/ui"
RESPONSE = "/reasoncache/response?rid=r"


@pytest.fixture
def world() -> World:
    """A ``World`` with one finished request, three of whose positions were evicted."""
    world, req = begun(SINGLE)
    world.evictor.waiting[req.rid] = [Eviction(10, 3)]
    world.controller.after_decode([req])
    world.finish(req)
    return world


def serving(world: World, monkeypatch: pytest.MonkeyPatch, **keys: str | None) -> TestClient:
    """An HTTP client of our routes. SGLang's code checks the keys and carries messages to a scheduler."""

    def scheduler(sent: GetInternalStateReq) -> None:
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=GetInternalStateReq)
        told = hooks._around_internal_state(pytest.fail, None, asked)
        received = msgspec.msgpack.decode(
            msgspec.msgpack.encode(told), type=GetInternalStateReqOutput
        )
        asyncio.get_running_loop().call_soon(ask.handle_recv, received)

    ask: Any = FanOutCommunicator(scheduler, 1)
    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None,
        get_internal_state_communicator=ask,
        tokenizer=SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))),
        server_args=SimpleNamespace(admin_api_key=keys.get("admin_api_key")),
    )
    app = FastAPI()
    state = SimpleNamespace(tokenizer_manager=manager)
    monkeypatch.setattr(hooks, "_server", SimpleNamespace(controller=world.controller))
    monkeypatch.setattr(compat, "http_app", app, raising=False)
    monkeypatch.setattr(compat, "http_global_state", lambda: state, raising=False)
    routes.add()
    routes.add()
    assert sum(getattr(route, "path", "").startswith(TOTALS) for route in app.routes) == 4
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    return TestClient(app)


def test_single_requests_are_told_only_on_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serving(world, monkeypatch)
    [totals] = client.get(TOTALS).json()["schedulers"]
    assert totals["totals"]["positions_evicted"] == 3 and "recent" not in totals
    [details] = client.get(DETAILS).json()["schedulers"]
    [row] = details.pop("recent")
    assert (row["rid"], row["evicted_positions"]) == ("r", 3)
    assert details == totals
    [brief] = client.get(DETAILS, params={"blocks": False}).json()["schedulers"]
    assert brief.pop("recent") == [{k: v for k, v in row.items() if k not in report._OF_BLOCKS}]
    assert brief == totals
    # Without ``keep_responses`` no text is kept.
    assert client.get(RESPONSE).json() == {"rid": "r", "parts": None}
    # Without a path, as ``/server_info`` asks, the scheduler returns SGLang's entries and ours.
    own = GetInternalStateReqOutput(internal_state={"stock": 1})
    told = hooks._around_internal_state(lambda *_: own, None, GetInternalStateReq())
    assert told.internal_state.pop("stock") == 1
    assert told.internal_state["reasoncache"].keys() == totals.keys()


def test_the_newest_responses_are_kept_and_no_more_of_them_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "_KEPT_TOKENS", 4)
    world, req = begun(SINGLE)
    told = world.controller.report
    first = len(req.origin_input_ids)
    told.config = dataclasses.replace(told.config, keep_responses=1)
    told.kept = deque(maxlen=1)
    world.controller.after_decode([req])
    world.finish(req)
    [part] = serving(world, monkeypatch).get(RESPONSE).json()["parts"]
    text = " ".join(map(str, req.output_ids[:4]))
    assert part == dict(text=text, start=first, end=first + 4, source=None, rid=None)
    told.kept.append(({"rid": "newer"}, array("i")))
    assert told.response("r") is None and told.response("newer") == {
        "rid": "newer",
        "output_ids": [],
    }
    told.clear()
    assert told.response("newer") is None


def test_of_responses_with_one_id_the_newest_is_told(world: World) -> None:
    told = world.controller.report
    told.kept = deque(maxlen=3)
    for number, name in enumerate(("r", "r", "other")):
        told.kept.append(({"rid": name}, array("i", [number])))
    assert told.response("r") == {"rid": "r", "output_ids": [1]}


def test_records_name_others_by_digests_where_ids_are_secret(world: World) -> None:
    """Responses to one prompt may be other clients', and an id may name a user."""
    told = world.controller.report
    req = world.start("mine")
    req.sampling_params.custom_params = {"reasoncache": {"record": True}}
    blocks = [
        Candidate((Run(20, at, 4),), weakref.ref(req), name) for at, name in ((4, "a"), (8, "b"))
    ]
    record = RequestRecord(redirected=blocks)
    plain = told._to_send(req, record)
    assert plain["sources"] == ["a", "b"] and "id" not in plain
    told.hides_ids = True
    hidden = told._to_send(req, record)
    other = world.start("a", first=500)
    name = told._to_send(other, None)["id"]
    assert hidden["sources"][0] == name != hidden["sources"][1]
    assert len(name) == 32 and len({*hidden["sources"], hidden["id"]}) == 3
    assert {**hidden, "sources": ["a", "b"]} == {**plain, "id": hidden["id"]}
    for each in (req, other):
        world.abort(each)


def test_parts_of_a_response() -> None:
    """The text is cut where a run of sharing blocks, or its source, begins or ends. No part of it is lost."""
    text = "what repeats, and so what repeats, ends"
    found = {"output_ids": [*map(ord, text)], "prompt_tokens": 10}
    found |= {"blocks": [(0, 11, 32, 4), (0, 15, 36, 4)], "blocks_across": [(0, 24, 7, 4, 0)]}
    found["sources"] = ["other"]
    # Like some tokenizers, this decoder drops a blank at the beginning.
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)).removeprefix(" "))
    parts = asyncio.run(page.parts_of(found, tokenizer))
    assert "".join(part["text"] for part in parts) == text
    assert [(part["start"], part["source"], part["rid"]) for part in parts] == [
        *[(10, None, None), (11, 32, None), (19, None, None), (24, 7, "other")],
        *[(28, None, None), (32, None, None), (40, None, None)],
    ]
    numbers = asyncio.run(page.parts_of(found, None))
    assert "".join(part["text"] for part in numbers).split() == [str(ord(each)) for each in text]


def test_an_entry_says_what_became_of_the_blocks() -> None:
    """One block is accepted, one overlaps it, and the last is still being measured when the request ends."""
    world = World(dataclasses.replace(SINGLE, when="short"), SlowMeter)
    world.controller.request_waits(again=False)  # so that blocks are measured
    meter: Any = world.meter
    meter.arrived = True
    req = world.start()
    world.propose(req, Pair(20, 8), Pair(22, 10))
    assert world.controller.after_decode([req]) == 4
    meter.arrived = False
    world.propose(req, Pair(26, 14))
    world.controller.after_decode([req])
    world.finish(req)
    told: dict[str, Any] = dict(
        opted_out=False, steps=2, blocks_proposed=3, blocks_shared=0, blocks_accepted=1
    )
    told |= dict(blocks_unmeasured=1, refusals={"overlap": 1})
    assert world.controller.report.recent[-1].items() >= told.items()


def test_a_request_that_opted_out_is_listed_and_not_counted() -> None:
    world = World(SINGLE)
    told = world.controller.report
    told.config = dataclasses.replace(told.config, keep_responses=1)
    told.kept = deque(maxlen=1)
    req = world.request("out", range(4), True)
    world.respond(req, range(12))
    world.controller.after_decode([req])
    world.finish(req)
    assert (told.recent[-1]["rid"], told.recent[-1]["opted_out"]) == ("out", True)
    assert told.stats.requests_finished == 0 == len(told.kept)


def test_long_ids_are_cut_and_a_source_is_listed_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's id of 100 kB does not grow the JSON with each block that reads its slots."""
    told = world.controller.report
    req = world.start("r" * 100_000)
    told.config = dataclasses.replace(told.config, keep_responses=1)
    told.kept = deque(maxlen=1)
    blocks = [
        Candidate((Run(4 * at, at, 4),), weakref.ref(req), f"{at % 3}" + "s" * 100_000)
        for at in range(3000)
    ]
    for _ in range(40):
        told.request_finished(req, RequestRecord(redirected=blocks), 0, 0)
    client = serving(world, monkeypatch)
    details = client.get(DETAILS)
    assert len(details.content) < 1_500_000
    [scheduler] = details.json()["schedulers"]
    entry = scheduler["recent"][-1]
    assert entry["rid"] == "r" * 256
    assert entry["sources"] == [f"{number}" + "s" * 255 for number in range(3)]
    assert entry["blocks_across"] == [[0, 4 * at, at, 4, at % 3] for at in range(1024)]
    brief = client.get(DETAILS, params={"blocks": False})
    assert len(brief.content) < 20_000
    # A response is found by the whole id.
    found = told.response("r" * 100_000)
    assert found is not None and found["rid"] == "r" * 256
    assert told.response("r" * 255) is None


@pytest.mark.parametrize(
    ("keys", "totals", "details"),
    [
        ({}, None, None), ({"api_key": "user"}, "user", "user"), ({"admin_api_key": "admin"}, None, "admin"),
        ({"api_key": "user", "admin_api_key": "admin"}, "user", "admin"),
    ],
)  # fmt: skip
def test_the_admin_key_guards_single_requests(
    world: World, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], totals: str | None,
    details: str | None,
) -> None:  # fmt: skip
    client = serving(world, monkeypatch, **keys)
    paths = {TOTALS: totals, PAGE: totals, DETAILS: details, RESPONSE: details}
    for path, wanted in paths.items():
        for key in (None, "user", "admin"):
            header = {} if key is None else {"Authorization": f"Bearer {key}"}
            status = client.get(path, headers=header).status_code
            assert status == (200 if wanted in (None, key) else 401), (path, key)


@pytest.mark.parametrize("again", [False, True], ids=["not shared again", "shared again"])
def test_a_record_says_what_was_sampled_before_kv_was_computed_again(again: bool) -> None:
    """After a retraction for a pause all KV is exact, but tokens were sampled behind approximate KV."""
    world = World(dataclasses.replace(SINGLE, slots=400, when="always"))
    req = world.start()
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req])
    [block] = known_record(req).redirected
    began = block.shared_at
    for _ in range(30):
        world.step(req)
    length = len(req.origin_input_ids) + len(req.output_ids)
    with world.controller.pausing():
        world.retract(req)
    world.come_back(req)
    for _ in range(4):
        if again:
            world.controller.after_decode([req])
        world.step(req)
    if not again:
        known_record(req).pending.clear()
        known_record(req).candidates.clear()
        world.controller.after_decode([req])
    read = report._what_was_read(known_record(req), None)
    assert read["recomputed"] == [(began, length)]
    assert [entry[0] >= length for entry in read["blocks"]] == [True] * again
    world.finish(req)


@pytest.mark.parametrize("asks", [True, False])
def test_a_request_that_is_aborted_while_it_waits_has_its_record(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """SGLang's main process answers for it, not the scheduler."""
    world = World(dataclasses.replace(SINGLE, slots=400, when="always"))
    req = world.start()
    setattr(req, ASKED, Asked(share=True, record=asks))
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req])
    world.retract(req)
    monkeypatch.setattr(hooks, "_server", SimpleNamespace(controller=world.controller))
    monkeypatch.setattr(hooks, "_unshared", None)
    made = AbortReq(rid=req.rid)
    sent = hooks._contained(hooks._after_make_abort)(made, req) or made
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=AbortReq)
    state: Any = SimpleNamespace(out_list=[])

    def stock(_manager: Any, received: AbortReq) -> None:
        reason = received.finished_reason or {"type": "abort", "message": "Abort in waiting queue"}
        state.out_list.append({"meta_info": {"finish_reason": reason}})

    manager = SimpleNamespace(rid_to_state={req.rid: state})
    hooks._around_abort_done(stock, manager, sent)
    [response] = state.out_list
    meta = response["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert ("reasoncache" in meta) == asks
    if asks:
        assert len(meta["reasoncache"]["blocks"]) == 1
    # SGLang answers no request whose id begins as a health check's: an exception would end the server.
    state.out_list.clear()
    again = msgspec.msgpack.decode(
        msgspec.msgpack.encode(hooks._contained(hooks._after_make_abort)(made, req) or made),
        type=AbortReq,
    )
    hooks._around_abort_done(lambda *_: None, manager, again)
    assert not state.out_list

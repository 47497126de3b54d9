# SPDX-License-Identifier: Apache-2.0
"""Cells and requests where servers misbehave, what logs and reports say, random at equal saving."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from eval.methods import find_methods
from eval.runs import client
from eval.runs.cells import cut_prompts, faults, measure, moments, retractions
from eval.runs.client import Request, ask_all, send_all
from eval.runs.folder import Cell, Leg, Response, RunError, cells, write_config
from eval.runs.options import RunOptions
from eval.runs.plan import Plan
from eval.runs.servers import Server, merge, since
from eval.runs.session import PILOT_PROBLEMS, TOLERANCE, Display, Session, final_saving, match
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eval.peer import END, HEAD, Peer, PeerServer, answer, event, leg, raw, response

SAVING = {"requests_finished": 2, "final_saving_ratio": 0.2, "polls": 4, "memory_saving_ratio": 0.1}
# As stock and sharing servers of version 0.5.23 wrote them.
CUT = (
    "[2026-11-21 16:57:55{rank}] Request length is longer than the KV cache pool size or the max "
    "context length. Truncated. len(req.origin_input_ids)=90, max_req_input_len=50.\n"
)
DECODE = (
    "[2026-11-21 16:57:56] Decode batch, #running-req: {}, #token: {}, token usage: 0.07, {}"
    "cpu graph: False, gen throughput (token/s): {}, #queue-req: {}\n"
)
STOCK = (
    "[2026-11-21 16:57:55] Prefill batch, #new-seq: 4, #new-token: 180, #cached-token: 0\n"
    + DECODE.format(4, 180, "", 5.92, 6)
    + '[2026-11-21 16:57:56] INFO:     127.0.0.1:50412 - "POST /v1/chat/completions HTTP/1.1" 200\n'
    + DECODE.format(4, 220, "", 290.61, 6)
)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as serving:
        yield serving


def run_cell(cell: Cell, server: PeerServer) -> Leg:
    requests = [Request(f"p{i}", "q", {"max_tokens": 9}) for i in range(3)]
    return measure(cell, requests, server, RunOptions(tasks=("t",)), lambda: None)


def work(
    run: Path, peer: Peer, *methods: str, fault: str = "", saving: float = 0.2, **options: Any
) -> tuple[bool, int]:
    """Whether a session's cells were whole, and how often it closed its servers; a peer serves all,
    the method ``fault`` never settles."""
    closed: list[None] = []

    def get(name: str, flags: list[str], starting: Any) -> PeerServer:
        starting()
        server = PeerServer(peer, *flags)
        shares = "--enable-reasoncache" in flags
        server.totals = {**SAVING, "final_saving_ratio": saving} if shares else {}
        server.settling = RunError("/flush_cache was refused") if name == fault else None
        return server

    chosen = RunOptions(tasks=("tiny_reasoner",), methods=methods, limit=2, warm_up=3, **options)
    plan = Plan(chosen, {"temperature": 0.0, "max_tokens": 5000})
    plan.others("tiny_reasoner", 0, 0)
    # The length of a response is left to the run.
    for problems in (plan.tasks["tiny_reasoner", 0].problems, plan._others["tiny_reasoner", 0]):
        problems[:] = [dataclasses.replace(p, max_tokens=None) for p in problems]
    config: dict[str, Any] = {"tasks": ["tiny_reasoner"], "methods": list(methods), "seeds": [0]}
    config |= {"random_ratios": {}, "opens_thinking": False}
    write_config(run, config)
    servers: Any = SimpleNamespace(get=get, close=lambda: closed.append(None))
    session = Session(run, config, plan, find_methods(methods), servers, Display())
    return session.work(), len(closed)


def test_a_leg_that_went_to_its_end(peer: Peer, tmp_path: Path) -> None:
    server = PeerServer(peer, "--enable-reasoncache")
    server.totals = dict(SAVING)
    server.log = CUT.format(rank="") + CUT.format(rank=" TP0") + CUT.format(rank=" TP1")
    cell = Cell(tmp_path, "t", "m", 0)
    leg = run_cell(cell, server)
    assert cell.legs() == [leg]
    assert (leg.ended, leg.kv_slots, leg.cut_prompts, leg.leaked_slots) == (True, 4000, 2, 0)
    assert (leg.responses, leg.output_tokens, leg.report) == (3, 21, {"totals": SAVING})


@pytest.mark.parametrize("stopped", [True, False])
def test_a_leg_that_goes_wrong_keeps_the_report(peer: Peer, tmp_path: Path, stopped: bool) -> None:
    """While requests ran, or once all had ended."""
    server = PeerServer(peer, "--enable-reasoncache")
    server.totals, server.settling = dict(SAVING), RunError("requests still run")
    cell = Cell(tmp_path, "t", "m", 0)
    if stopped:
        (cell.folder / "responses.jsonl").mkdir(parents=True)
    with pytest.raises(IsADirectoryError if stopped else RunError):
        run_cell(cell, server)
    (leg,) = cell.legs()
    assert (leg.ended, leg.leaked_slots, leg.report) == (not stopped, None, {"totals": SAVING})
    # A log that cannot be read is told, unless something else is being told already.
    server.log = OSError("no such disk")
    server.settling = server.settling if stopped else None
    with pytest.raises(RunError if stopped else OSError, match="still run|no such disk"):
        run_cell(Cell(tmp_path, "t", "other", 0), server)


def test_one_bad_cell_of_two(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(tmp_path / "a", peer, "dense", "memshare", fault="dense") == (False, 1)
    assert "dense, seed 0: /flush_cache was refused" in capsys.readouterr().out
    assert [leg.ended for cell in cells(tmp_path / "a") for leg in cell.legs()] == [True, True]
    # Where there is nothing to match servers stay up.
    methods = ("random:match=memshare", "memshare", "dense")
    assert work(tmp_path / "b", peer, *methods, saving=0.0) == (False, 0)
    assert [cell.method for cell in cells(tmp_path / "b")] == ["memshare", "dense"]


def test_pilots_are_as_long_as_what_they_match(peer: Peer, tmp_path: Path) -> None:
    assert work(tmp_path, peer, "memshare", "random:match=memshare")[0]
    lengths = [body["max_tokens"] for body in peer.bodies]
    # Two cells with three requests to warm up; two measured problems each, and one pilot.
    assert lengths.count(2048) == 6
    assert lengths.count(5000) == len(lengths) - 6 == 4 + PILOT_PROBLEMS


def test_cut_responses_are_told(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.scripts = (answer("a", "length"),)
    assert work(tmp_path, peer, "dense", kv_budget=4100)[0]
    told = capsys.readouterr().out
    assert "the server has 4000 KV slots, not the 4100 of --kv-budget" in told
    assert "max_tokens is 5000, the server has 4000 KV slots" in told
    assert "2 responses were cut before max_tokens" in told
    # Cut short is less than what was asked for.
    cut = {"output_tokens": 50, "finish_reason": "length"}
    rows = [response("a", **cut | {"output_tokens": 99}), response("c", output_tokens=50)]
    rows += [response("b", **cut | {"output_tokens": 100}), response("d", **cut, error="broken")]
    (told,) = faults(leg(), [*rows, response("unknown", **cut)], dict.fromkeys("abcd", 100))
    assert told.startswith("1 responses were cut")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (STOCK, [(4, 6, 180, 0, 5.92), (4, 6, 220, 0, 290.61)]),
        (DECODE.format(6, 1016, "#shared token: 88, ", 456.49, 4), [(6, 4, 1016, 88, 456.49)]),
        # Evicted positions are saved too.
        (DECODE.format(1, 448, "#shared token: 16, #evicted token: 288, ", 170.57, 0),
         [(1, 0, 448, 304, 170.57)]),
        ("[2026-11-21 16:57:10] Decode batch, #running-req: 6, #tok", []),
        ("Decode batch, #running-req: 6, #full token: 10, cpu gra", [(6, 0, 10, 0, 0.0)]),
    ],
)  # fmt: skip
def test_decode_lines(log: str, expected: list[tuple[float, ...]]) -> None:
    found = moments(log, 2)
    figures = [(m.running, m.queued, m.used, m.saved, m.tokens_per_s) for m in found]
    assert figures == expected
    assert [(m.leg, m.step) for m in found] == [(2, step) for step in range(len(expected))]


def test_retractions_add_up_and_cut_prompts_count_once_with_several_ranks() -> None:
    log = "\n".join(f"... #retracted_reqs: {n}, #new_tokens_gained: 9" for n in (2, 3))
    ranks = ("", " TP0", " TP1", " DP1 TP0", " DP1 TP12")
    assert cut_prompts("".join(CUT.format(rank=rank) for rank in ranks)) == 3
    assert (retractions(log), retractions(STOCK), cut_prompts(STOCK)) == (5, 0, 0)


def test_random_sharing_is_matched_by_pilots() -> None:
    found = match(0.3, lambda ratio: 0.5 * ratio)
    assert found["ratio"] == pytest.approx(0.6) and len(found["pilots"]) == 2
    assert found["pilots"][-1][1] == pytest.approx(found["target"])
    # A good first guess takes one, a curved saving comes close.
    assert len(match(0.33, lambda ratio: ratio / 1.3)["pilots"]) == 1
    assert match(0.3, lambda ratio: ratio**1.5)["ratio"] ** 1.5 == pytest.approx(0.3, rel=TOLERANCE)
    # What cannot be reached ends at the bound.
    for saving in (0.0, 0.1):
        found = match(0.9, mock.Mock(return_value=saving))
        assert found["ratio"] == 1.0
        assert len(found["pilots"]) <= 3 and found["pilots"][0] == [1.0, saving]


def test_saving_over_legs_counts_requests(tmp_path: Path) -> None:
    cells = [Cell(tmp_path, "t", "reasoncache", seed) for seed in (0, 1)]
    assert final_saving(cells) is None
    cells[0].append(leg(0))
    assert final_saving(cells) is None
    cells[0].append(leg(1, {"requests_finished": 10, "final_saving_ratio": 0.4}))
    cells[1].append(leg(0, {"requests_finished": 30, "final_saving_ratio": 0.2}))
    assert final_saving(cells) == pytest.approx(0.25)


def count(number: int, *several: SharingStats) -> None:
    for stats in several:
        for step in range(3 + number):
            stats.poll(running=2 + step, saved=10 * number + step, logical=100)
        stats.request_finished(30 + 10 * number, 100)
        stats.refusals["late"] += 2 + number


def assert_totals(totals: dict[str, Any], wanted: dict[str, Any]) -> None:
    totals, wanted = dict(totals), dict(wanted)
    assert totals.pop("refusals") == wanted.pop("refusals")
    assert totals == pytest.approx(wanted)


def test_schedulers_add_up_to_one() -> None:
    parts, whole = [SharingStats(), SharingStats()], SharingStats()
    for number, stats in enumerate(parts):
        count(number, stats, whole)
    for stats in (whole, parts[1]):
        stats.request_finished(0, 500)
    now = {"slots_saved_now": 3, "positions_evicted_now": 2}
    merged = merge([{"totals": part.to_dict(), **now} for part in parts])
    assert (merged["slots_saved_now"], merged["positions_evicted_now"]) == (6, 4)
    assert_totals(merged["totals"], whole.to_dict())
    assert whole.to_dict()["affected_ratio"] == pytest.approx(70 / 700)
    assert merge([]) == merge([None]) == {}
    assert merge([{"totals": {"polls": 1}}]) == {"totals": {"polls": 1}}


def test_only_what_was_counted_since_is_reported() -> None:
    """Totals of the second part of what a server did are those of one that did only that."""
    both, later = SharingStats(), SharingStats()
    count(0, both)
    before = {"totals": both.to_dict()}
    count(1, both, later)
    now = {"totals": both.to_dict()}
    assert_totals(since(before, now)["totals"], later.to_dict())
    # Flushed by somebody in between: what it counted is unknown.
    assert since(now, before) == since({}, {}) == {}
    assert since({}, before) == before


def test_a_given_server_counts_from_the_cells_begin(peer: Peer) -> None:
    server = Server(url=peer.url)
    server.clear()
    # It need not be SGLang.
    assert (server.report(), server.kv_slots()) == ({}, None)
    totals = [{"requests_finished": count, "final_saving_ratio": 0.5} for count in (10, 15)]
    reports = mock.Mock(side_effect=[{"schedulers": [{"totals": each}]} for each in totals])
    peer.pages |= {"/reasoncache": reports, "/server_info": lambda: {"max_total_num_tokens": 321}}
    assert server.kv_slots() == 321
    server.clear()
    assert server.report()["totals"] == {"requests_finished": 5, "final_saving_ratio": 0.5}


HALF = HEAD + event({"content": "half"})


def ask(peer: Peer, count: int = 1, **options: Any) -> list[Response]:
    ended: list[Response] = []
    requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(count)]
    with peer:
        asyncio.run(send_all(peer.url, "m", requests, 3, ended.append, 10.0, **options))
    return ended


def test_reasoning_comes_before_the_answer() -> None:
    script = HEAD + event({"role": "assistant", "content": ""})
    for delta in ({"reasoning_content": "so "}, {"reasoning_content": "be it"}, {"content": "4"}):
        script += event(delta)
    (response,) = ask(Peer(script + answer("")[len(HEAD) :]))
    assert (response.error, response.finish_reason) == (None, "stop")
    assert response.text == "<think>so be it</think>4"
    assert (response.prompt_tokens, response.output_tokens) == (5, 7)
    assert (response.problem_id, response.leg, response.request_id) == ("p0", 3, "r1")
    assert response.first_token is not None
    assert response.started <= response.first_token <= response.ended


def test_a_stream_that_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    told = raw('data: {"error": {"message": "no memory", "code": 500}}') + END
    aborted = event({}, finish_reason="abort") + END
    for rest in (b"", END, aborted, raw("data: {nope") + END, told):
        (response,) = ask(Peer(HALF + rest))
        assert response.error and response.text == "half", rest
    oops = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"
    for script in (oops, b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\n{}", b"what?", b""):
        (response,) = ask(Peer(script))
        assert response.error and (response.text, response.first_token) == ("", None), script
    first, second = ask(Peer(HALF, answer("a")), attempts=3)
    assert first.error and (second.error, second.text) == (None, "a")
    assert len(ask(Peer(b""), attempts=3)) == 3
    # One that never ends is cut.
    monkeypatch.setattr(client, "MAX_CHARACTERS", 10_000)
    (response,) = ask(Peer(HEAD, endless=True))
    assert response.error == "the response has more than 10000 characters"
    assert len(response.text) < 20_000


@pytest.mark.parametrize(("in_flight", "expected"), [(2, 2), (None, 150)])
def test_requests_in_flight(in_flight: int | None, expected: int) -> None:
    """Without a bound all are open at once, whatever the client's library is used to."""
    peer = Peer(pause=0.01 if in_flight else 2.0)
    count = expected if in_flight is None else 10
    responses = ask(peer, count, in_flight=in_flight)
    assert not [row.error for row in responses if row.error]
    assert len({row.problem_id for row in responses}) == count
    assert peer.most_open == expected


def test_responses_in_the_order_of_the_requests(peer: Peer) -> None:
    requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(5)]
    answers = ask_all(peer.url, "m", requests)
    assert [(row.problem_id, row.text) for row in answers] == [(f"p{i}", "a") for i in range(5)]
    for body in peer.bodies:
        assert (body["top_k"], body["stream"], body["model"]) == (4, True, "m")
        assert body["stream_options"] == {"include_usage": True}
    asked = sorted(body["messages"][0]["content"] for body in peer.bodies)
    assert asked == [request.prompt for request in requests]

    full = mock.Mock(side_effect=OSError("disk full"))
    # What a listener raises comes through.
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(send_all(peer.url, "m", requests, 0, full, 10.0))

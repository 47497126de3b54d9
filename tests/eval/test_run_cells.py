# SPDX-License-Identifier: Apache-2.0
"""Tests measuring cells (task, method, seed), clients of faulty servers, and figures of logs and reports."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from eval.measures.figures import figures, ratio
from eval.methods import find_method
from eval.runs import client
from eval.runs.cells import cut_prompts, faults, measure, moments, retractions
from eval.runs.client import Request, send_all
from eval.runs.folder import CONFIG, Cell, Response, RunError, Served, cells, write_json
from eval.runs.options import RunOptions
from eval.runs.plan import Plan
from eval.runs.session import Session
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eval.peer import END, HEAD, Peer, PeerServer, answer, event, raw, response, served

SAVING = {"requests_finished": 2, "final_saving_ratio": 0.2, "polls": 4, "memory_saving_ratio": 0.1}
# Log lines of SGLang 0.5.23 without and with reasoncache.
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


def run_cell(cell: Cell, server: PeerServer) -> Served:
    requests = [Request(f"p{i}", "q", {"max_tokens": 9}) for i in range(3)]
    return measure(cell, requests, server, lambda: None, log_interval=1, timeout_s=60.0)


def work(run: Path, peer: Peer, *methods: str, fault: str = "") -> tuple[bool, int]:
    """Runs a session whose server is ``peer``. Returns whether all cells were measured and no request failed,
    and how often the session closed its servers. ``fault``: the method on whose server ``settle`` fails."""
    closed: list[None] = []

    def get(name: str, flags: list[str], env: dict[str, str]) -> PeerServer:
        server = PeerServer(peer, *flags)
        server.totals = dict(SAVING) if "--enable-reasoncache" in flags else {}
        server.settling = RunError("/flush_cache was refused") if name == fault else None
        return server

    chosen = RunOptions(tasks=("tiny_reasoner",), methods=methods, limit=2, warm_up=3)
    plan = Plan(chosen, {"temperature": 0.0, "max_tokens": 5000})
    # The problems lose their own ``max_tokens``, so that the run's ``max_tokens`` applies.
    problems = plan.tasks["tiny_reasoner", 0].problems
    problems[:] = [dataclasses.replace(p, max_tokens=None) for p in problems]
    config: dict[str, Any] = {"tasks": ["tiny_reasoner"], "methods": list(methods), "seeds": [0]}
    write_json(run / CONFIG, config)
    servers: Any = SimpleNamespace(get=get, close=lambda: closed.append(None))
    whole = Session(run, plan, [find_method(one) for one in methods], servers, False).work()
    return whole, len(closed)


def test_a_cell_is_written_whole(peer: Peer, tmp_path: Path) -> None:
    server = PeerServer(peer, "--enable-reasoncache")
    server.totals = dict(SAVING)
    server.log = CUT.format(rank="") + CUT.format(rank=" TP0") + CUT.format(rank=" TP1")
    cell = Cell(tmp_path, "t", "m", 0)
    with pytest.raises(RunError, match="not measured"):
        cell.whole()
    served = run_cell(cell, server)
    assert cell.whole().served() == served and len(cell.responses()) == 3
    assert (served.kv_slots, served.cut_prompts, served.leaked_slots) == (4000, 2, 0)
    assert (served.responses, served.output_tokens, served.totals()) == (3, 21, [SAVING])


def test_one_bad_cell_of_two(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(tmp_path, peer, "dense", "memshare", fault="dense") == (False, 1)
    assert "dense, seed 0: /flush_cache was refused" in capsys.readouterr().out
    assert [cell.method for cell in cells(tmp_path)] == ["memshare"]
    # A second session measures only the missing cell: it asks 3 warm-up questions and 2 problems.
    asked = len(peer.bodies)
    assert work(tmp_path, peer, "dense", "memshare") == (True, 0)
    assert len(peer.bodies) == asked + 5
    lengths = [body["max_tokens"] for body in peer.bodies]
    assert set(lengths) == {512, 5000}


def test_cut_responses_are_told(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.scripts = (answer("a", "length"),)
    assert work(tmp_path, peer, "dense")[0]
    told = capsys.readouterr().out
    assert "max_tokens is 5000, the server has 4000 KV slots" in told
    assert "2 responses were cut before max_tokens" in told
    # A response counts as cut if it has finish reason "length" and fewer tokens than its ``max_tokens``.
    cut = {"output_tokens": 50, "finish_reason": "length"}
    rows = [response("a", **cut | {"output_tokens": 99}), response("c", output_tokens=50)]
    rows += [response("b", **cut | {"output_tokens": 100}), response("d", **cut, error="broken")]
    cell = Cell(tmp_path, "t", "cut", 0)
    cell.write([*rows, response("unknown", **cut)], [], served())
    (told,) = faults(cell, served(), dict.fromkeys("abcd", 100))
    assert told.startswith("1 responses were cut")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (STOCK, [(4, 6, 180, 0, 5.92), (4, 6, 220, 0, 290.61)]),
        (DECODE.format(6, 1016, "#shared token: 88, ", 456.49, 4), [(6, 4, 1016, 88, 456.49)]),
        # Evicted positions count as saved.
        (DECODE.format(1, 448, "#shared token: 16, #evicted token: 288, ", 170.57, 0),
         [(1, 0, 448, 304, 170.57)]),
        ("[2026-11-21 16:57:10] Decode batch, #running-req: 6, #tok", []),
        ("Decode batch, #running-req: 6, #full token: 10, cpu gra", [(6, 0, 10, 0, 0.0)]),
    ],
)  # fmt: skip
def test_decode_lines(log: str, expected: list[tuple[float, ...]]) -> None:
    found = moments(log)
    figures = [(m.running, m.queued, m.used, m.saved, m.tokens_per_s) for m in found]
    assert figures == expected
    assert [m.step for m in found] == list(range(len(expected)))


def test_retractions_add_up_and_cut_prompts_count_once_with_several_ranks() -> None:
    log = "\n".join(f"... #retracted_reqs: {n}, #new_tokens_gained: 9" for n in (2, 3))
    ranks = ("", " TP0", " TP1", " DP1 TP0", " DP1 TP12")
    assert cut_prompts("".join(CUT.format(rank=rank) for rank in ranks)) == 3
    assert (retractions(log), retractions(STOCK), cut_prompts(STOCK)) == (5, 0, 0)
    both = "\n".join(f"[07:50 TP{n}] KV cache pool is full. #retracted_reqs: 2" for n in (0, 1))
    assert retractions(both) == 2


def test_schedulers_weigh_by_what_they_counted() -> None:
    parts = [SharingStats(), SharingStats()]
    whole = SharingStats()
    for number, stats in enumerate(parts):
        for one in (stats, whole):
            for step in range(3 + number):
                one.poll(running=2 + step, saved=10 * number + step, logical=100)
            one.request_finished(30 + 10 * number, 100)
    for stats in (whole, parts[1]):
        stats.request_finished(0, 500)
    both = served(reports=[{"totals": part.to_dict()} for part in parts])
    found = figures([], both, [])
    told = whole.to_dict()
    assert found.saving == pytest.approx(told["memory_saving_ratio"])
    assert found.final_saving == pytest.approx(told["final_saving_ratio"])
    assert found.affected == pytest.approx(told["affected_ratio"])
    # A stock server has no report and saves nothing.
    assert figures([], served(), []).saving == ratio(served(), "affected_ratio") == 0.0
    assert ratio(served({"polls": 1}), "affected_ratio") is None


HALF = HEAD + event({"content": "half"})


def ask(peer: Peer, count: int = 1, **options: Any) -> list[Response]:
    ended: list[Response] = []
    requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(count)]
    with peer:
        asyncio.run(send_all(peer.url, "m", requests, ended.append, 10.0, **options))
    return ended


def test_reasoning_comes_before_the_answer() -> None:
    script = HEAD + event({"role": "assistant", "content": ""})
    for delta in ({"reasoning_content": "so "}, {"reasoning_content": "be it"}, {"content": "4"}):
        script += event(delta)
    (response,) = ask(Peer(script + answer("")[len(HEAD) :]))
    assert (response.error, response.finish_reason) == (None, "stop")
    assert response.text == "<think>so be it</think>4"
    assert (response.prompt_tokens, response.output_tokens) == (5, 7)
    assert (response.problem_id, response.request_id) == ("p0", "r1")
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
    # The client cuts off an endless response.
    monkeypatch.setattr(client, "MAX_CHARACTERS", 10_000)
    (response,) = ask(Peer(HEAD, endless=True))
    assert response.error == "the response has more than 10000 characters"
    assert len(response.text) < 20_000


@pytest.mark.parametrize(("in_flight", "expected"), [(2, 2), (None, 150)])
def test_requests_in_flight(in_flight: int | None, expected: int) -> None:
    """Without ``in_flight`` all 150 requests are open at once, more than httpx allows by default."""
    peer = Peer(pause=0.01 if in_flight else 2.0)
    count = expected if in_flight is None else 10
    responses = ask(peer, count, in_flight=in_flight)
    assert not [row.error for row in responses if row.error]
    assert len({row.problem_id for row in responses}) == count
    assert peer.most_open == expected
    for body in peer.bodies:
        assert (body["top_k"], body["stream"], body["model"]) == (4, True, "m")
        assert body["stream_options"] == {"include_usage": True}
    asked = {body["messages"][0]["content"] for body in peer.bodies}
    assert asked == {f"prompt {i}" for i in range(count)}


def test_what_a_listener_raises_comes_through(peer: Peer) -> None:
    full = mock.Mock(side_effect=OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(send_all(peer.url, "m", [Request("p", "q", {})], full, 10.0))

# SPDX-License-Identifier: Apache-2.0
"""Cells and sessions where servers misbehave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from eval.methods import find_methods
from eval.runs.cells import faults, measure
from eval.runs.client import Request
from eval.runs.folder import Cell, RunError, cells, write_config
from eval.runs.options import RunOptions
from eval.runs.plan import Plan
from eval.runs.records import Leg
from eval.runs.servers import Servers
from eval.runs.session import PILOT_PROBLEMS, Display, Session
from tests.eval.peer import Peer, PeerServer, answer
from tests.eval.rows import leg, response

SAVING = {"requests_finished": 2, "final_saving_ratio": 0.2, "polls": 4, "memory_saving_ratio": 0.1}
CUT = (
    "[2026-11-21 16:57:55{rank}] Request length is longer than the KV cache pool size or the max "
    "context length. Truncated. len(req.origin_input_ids)=90, max_req_input_len=50.\n"
)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer().serving() as serving:
        yield serving


def run_cell(cell: Cell, server: PeerServer) -> Leg:
    requests = [Request(f"p{i}", "q", {"max_tokens": 9}) for i in range(3)]
    return measure(cell, requests, server, RunOptions(tasks=("t",)), lambda: None)


class PeerServers:
    """One peer for all cells; ``faults`` by method."""

    def __init__(self, peer: Peer, faults: dict[str, Exception] | None = None) -> None:
        self.peer = peer
        self.faults = faults or {}
        self.closed = 0

    def get(self, name: str, flags: list[str], starting: Any) -> PeerServer:
        starting()
        server = PeerServer(self.peer, *flags)
        if "--enable-reasoncache" in flags:
            server.totals = dict(SAVING)
        server.settling = self.faults.get(name)
        return server

    def close(self) -> None:
        self.closed += 1


def session(run: Path, servers: PeerServers, *methods: str, **options: Any) -> Session:
    chosen = RunOptions(tasks=("tiny_reasoner",), methods=methods, limit=2, warm_up=3, **options)
    plan = Plan(chosen, {"temperature": 0.0, "max_tokens": 5000})
    # The length of a response is left to the run.
    for task in plan.tasks.values():
        task.problems = [dataclasses.replace(p, max_tokens=None) for p in task.problems]
    plan.others("tiny_reasoner", 0, 0)
    plan._others["tiny_reasoner", 0] = [
        dataclasses.replace(p, max_tokens=None) for p in plan._others["tiny_reasoner", 0]
    ]
    config: dict[str, Any] = {
        "tasks": ["tiny_reasoner"],
        "methods": list(methods),
        "seeds": [0],
        "random_ratios": {},
        "opens_thinking": False,
    }
    write_config(run, config)
    return Session(run, config, plan, find_methods(methods), cast(Servers, servers), Display())


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
    server.totals = dict(SAVING)
    server.settling = RunError("requests still run")
    cell = Cell(tmp_path, "t", "m", 0)
    if stopped:
        (cell.folder / "responses.jsonl").mkdir(parents=True)
    with pytest.raises(IsADirectoryError if stopped else RunError):
        run_cell(cell, server)
    (leg,) = cell.legs()
    assert (leg.ended, leg.leaked_slots, leg.report) == (not stopped, None, {"totals": SAVING})


@pytest.mark.parametrize("under_way", [True, False])
def test_a_log_that_cannot_be_read_is_told(peer: Peer, tmp_path: Path, under_way: bool) -> None:
    """Unless something else is being told already."""
    server = PeerServer(peer)
    server.log = OSError("no such disk")
    server.settling = RunError("requests still run") if under_way else None
    with pytest.raises(RunError if under_way else OSError, match="still run|no such disk"):
        run_cell(Cell(tmp_path, "t", "m", 0), server)


def test_one_cell_does_not_cost_the_others(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = PeerServers(peer, {"dense": RunError("/flush_cache was refused")})
    assert not session(tmp_path, servers, "dense", "memshare").work()
    assert "dense, seed 0: /flush_cache was refused" in capsys.readouterr().out
    assert [leg.ended for cell in cells(tmp_path) for leg in cell.legs()] == [True, True]
    assert servers.closed == 1


def test_nothing_to_match_leaves_servers_up(peer: Peer, tmp_path: Path) -> None:
    servers = PeerServers(peer)
    methods = ("random:match=memshare", "memshare", "dense")
    get = servers.get

    def stock(name: str, flags: list[str], starting: Any) -> PeerServer:
        server = get(name, flags, starting)
        server.totals = {**server.totals, "final_saving_ratio": 0.0} if server.totals else {}
        return server

    servers.get = stock  # type: ignore[method-assign]
    assert not session(tmp_path, servers, *methods).work()
    assert [cell.method for cell in cells(tmp_path)] == ["memshare", "dense"]
    assert servers.closed == 0


def test_pilots_are_as_long_as_what_they_match(peer: Peer, tmp_path: Path) -> None:
    servers = PeerServers(peer)
    assert session(tmp_path, servers, "memshare", "random:match=memshare").work()
    lengths = [body["max_tokens"] for body in peer.bodies]
    # Two cells with three requests to warm up; two measured problems each, and one pilot.
    assert lengths.count(2048) == 6
    assert lengths.count(5000) == len(lengths) - 6 == 4 + PILOT_PROBLEMS


def test_responses_that_cannot_be_whole_are_told(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.scripts = (answer("a", "length"),)
    servers = PeerServers(peer)
    assert session(tmp_path, servers, "dense", kv_budget=4100).work()
    told = capsys.readouterr().out
    assert "the server has 4000 KV slots, not the 4100 of --kv-budget" in told
    assert "max_tokens is 5000, the server has 4000 KV slots" in told
    assert "2 responses were cut before max_tokens" in told


def test_cut_short_is_less_than_what_was_asked_for() -> None:
    rows = [
        response("a", output_tokens=99, finish_reason="length"),
        response("b", output_tokens=100, finish_reason="length"),
        response("c", output_tokens=50),
        response("d", output_tokens=50, finish_reason="length", error="broken"),
        response("unknown", output_tokens=50, finish_reason="length"),
    ]
    (told,) = faults(leg(), rows, dict.fromkeys("abcd", 100))
    assert told.startswith("1 responses were cut")

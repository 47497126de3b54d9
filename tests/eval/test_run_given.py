# SPDX-License-Identifier: Apache-2.0
"""A server that somebody else runs, and counts for others too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from eval.runs.servers import Server, since
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eval.peer import Peer


def test_only_what_was_counted_since_is_reported() -> None:
    """Totals of the second part of what a server did are those of one that did only that."""
    both, later = SharingStats(), SharingStats()
    for number, seen in enumerate(([both], [both, later])):
        if number == 1:
            before = both.to_dict()
        for stats in seen:
            for step in range(3 + number):
                stats.poll(running=2 + step, saved=10 * number + step, logical=100)
            stats.request_finished(30 + 10 * number, 100)
            stats.refusals["late"] += 2 + number
            stats.eviction_refusals["newest"] += 1 + number
    reports = [
        {"totals": before, "recent": [{"rid": "a"}]},
        {"totals": both.to_dict(), "recent": [{"rid": "a"}, {"rid": "b"}]},
    ]
    found = since(*reports)
    wanted = later.to_dict()
    assert found["recent"] == [{"rid": "b"}]
    for refusals in ("refusals", "eviction_refusals"):
        assert found["totals"].pop(refusals) == wanted.pop(refusals)
    assert found["totals"] == pytest.approx(wanted)
    # Flushed by somebody in between: what it counted is unknown.
    assert since(reports[1], reports[0]) == {}
    assert since({}, {}) == {}
    assert since({}, reports[0]) == reports[0]


def test_a_given_server_counts_from_the_cells_begin() -> None:
    peer, finished = Peer(), itertools.count(10, 5)

    def report() -> dict[str, Any]:
        totals = {"requests_finished": next(finished), "final_saving_ratio": 0.5}
        return {"schedulers": [{"totals": totals}]}

    peer.pages |= {"/reasoncache": report, "/server_info": lambda: {"max_total_num_tokens": 321}}
    with peer.serving():
        server = Server(url=peer.url)
        assert server.kv_slots() == 321
        server.clear()
        found = server.report()
    assert found["totals"] == {"requests_finished": 5, "final_saving_ratio": 0.5}


def test_a_server_that_is_not_sglang() -> None:
    with Peer().serving() as peer:
        server = Server(url=peer.url)
        server.clear()
        assert (server.report(), server.kv_slots()) == ({}, None)

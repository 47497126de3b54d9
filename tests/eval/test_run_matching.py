# SPDX-License-Identifier: Apache-2.0
"""Random sharing at another method's saving, and reports of several schedulers and given servers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from eval.runs.folder import Cell
from eval.runs.records import Leg
from eval.runs.servers import Server, merge, since
from eval.runs.session import TOLERANCE, final_saving, match
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eval.peer import Peer
from tests.eval.rows import leg

REFUSALS = ("refusals", "eviction_refusals")


def test_a_proportional_saving_takes_two_pilots() -> None:
    found = match(0.3, lambda ratio: 0.5 * ratio)
    assert found["ratio"] == pytest.approx(0.6)
    assert len(found["pilots"]) == 2
    assert found["pilots"][-1][1] == pytest.approx(found["target"])


def test_a_good_first_guess_takes_one() -> None:
    assert len(match(0.33, lambda ratio: ratio / 1.3)["pilots"]) == 1


def test_a_curved_saving_comes_close() -> None:
    found = match(0.3, lambda ratio: ratio**1.5)
    assert found["ratio"] ** 1.5 == pytest.approx(0.3, rel=TOLERANCE)


@pytest.mark.parametrize("saving", [0.0, 0.1])
def test_what_cannot_be_reached_ends_at_the_bound(saving: float) -> None:
    found = match(0.9, lambda _ratio: saving)
    assert found["ratio"] == 1.0
    assert len(found["pilots"]) <= 3
    assert found["pilots"][0] == [1.0, saving]


def leg_of(number: int, finished: int, saving: float) -> Leg:
    totals = {"requests_finished": finished, "final_saving_ratio": saving}
    return leg(number, totals if finished else None)


def test_saving_over_legs_counts_requests(tmp_path: Path) -> None:
    cells = [Cell(tmp_path, "t", "reasoncache", seed) for seed in (0, 1)]
    assert final_saving(cells) is None
    cells[0].append(leg_of(0, 0, 0.0))
    assert final_saving(cells) is None
    cells[0].append(leg_of(1, 10, 0.4))
    cells[1].append(leg_of(0, 30, 0.2))
    assert final_saving(cells) == pytest.approx(0.25)


def count(number: int, *several: SharingStats) -> None:
    """Let each see what the others see."""
    for stats in several:
        for step in range(3 + number):
            stats.poll(running=2 + step, saved=10 * number + step, logical=100)
        stats.request_finished(30 + 10 * number, 100)
        stats.refusals["late"] += 2 + number
        stats.eviction_refusals["newest"] += 1 + number


def assert_totals(totals: dict[str, Any], wanted: dict[str, Any]) -> None:
    totals, wanted = dict(totals), dict(wanted)
    for name in REFUSALS:
        assert totals.pop(name) == wanted.pop(name)
    assert totals == pytest.approx(wanted)


def test_schedulers_add_up_to_one() -> None:
    """Totals of two schedulers are those of one that saw what both saw."""
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


def test_reports_of_one_or_none() -> None:
    assert merge([]) == merge([None]) == {}
    assert merge([{"totals": {"polls": 1}}]) == {"totals": {"polls": 1}}


def test_only_what_was_counted_since_is_reported() -> None:
    """Totals of the second part of what a server did are those of one that did only that."""
    both, later = SharingStats(), SharingStats()
    count(0, both)
    before = {"totals": both.to_dict(), "recent": [{"rid": "a"}]}
    count(1, both, later)
    now = {"totals": both.to_dict(), "recent": [{"rid": "a"}, {"rid": "b"}]}
    found = since(before, now)
    assert found["recent"] == [{"rid": "b"}]
    assert_totals(found["totals"], later.to_dict())
    # Flushed by somebody in between: what it counted is unknown.
    assert since(now, before) == {}
    assert since({}, {}) == {}
    assert since({}, before) == before


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

# SPDX-License-Identifier: Apache-2.0
"""Random sharing at another method's saving, and reports of several schedulers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.runs.folder import Cell
from eval.runs.matching import TOLERANCE, final_saving, match
from eval.runs.records import Leg
from eval.runs.servers import merge
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eval.rows import leg


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


def test_schedulers_add_up_to_one() -> None:
    """Totals of two schedulers are those of one that saw what both saw."""
    parts, whole = [SharingStats(), SharingStats()], SharingStats()
    for number, stats in enumerate(parts):
        for one in (stats, whole):
            for step in range(3 + number):
                one.poll(running=2 + step, saved=10 * number + step, logical=100)
            one.request_finished(30 + 10 * number, 100)
            one.refusals["late"] += 2
            one.eviction_refusals["newest"] += 1 + number
    one.request_finished(0, 500)
    parts[1].request_finished(0, 500)
    dropped = {"positions_evicted_now": 2}
    merged = merge([{"totals": part.to_dict(), "slots_saved_now": 3, **dropped} for part in parts])
    wanted = whole.to_dict()
    assert (merged["slots_saved_now"], merged["positions_evicted_now"]) == (6, 4)
    for name in ("refusals", "eviction_refusals"):
        assert merged["totals"].pop(name) == wanted.pop(name)
    assert merged["totals"] == pytest.approx(wanted)
    assert wanted["affected_ratio"] == pytest.approx(70 / 700)


def test_reports_of_one_or_none() -> None:
    assert merge([]) == merge([None]) == {}
    assert merge([{"totals": {"polls": 1}}]) == {"totals": {"polls": 1}}

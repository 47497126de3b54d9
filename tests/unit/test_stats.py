# SPDX-License-Identifier: Apache-2.0
"""Ratios that the endpoint reports."""

from __future__ import annotations

import pytest

from sglang_reasoncache.sharing.stats import SharingStats


@pytest.mark.parametrize(
    ("finished", "affected", "final"),
    [
        # One counts tokens, the other one requests.
        ([(50, 100, 0), (0, 900, 0)], 0.05, 0.25),
        # Evicted positions are saved too.
        ([(10, 100, 30)], 0.4, 0.4),
        ([], 0.0, 0.0),
    ],
)
def test_ratios(finished: list[tuple[int, int, int]], affected: float, final: float) -> None:
    stats = SharingStats()
    for redirected, positions, evicted in finished:
        stats.request_finished(redirected, positions, evicted=evicted)
    seen = stats.to_dict()
    sums = [sum(column) for column in zip(*finished, strict=True)] or [0, 0, 0]
    names = ("finished_redirected", "finished_positions", "finished_evicted")
    assert [seen[name] for name in names] == sums
    assert seen["affected_ratio"] == pytest.approx(affected)
    assert seen["final_saving_ratio"] == pytest.approx(final)
    assert seen["eviction_refusals"] == {} and "sum_saved" not in seen

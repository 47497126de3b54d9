# SPDX-License-Identifier: Apache-2.0
"""Ratios that the endpoint reports."""

from __future__ import annotations

import pytest

from sglang_reasoncache.sharing.stats import SharingStats


def test_affected_ratio_counts_tokens_final_ratio_requests() -> None:
    stats = SharingStats()
    stats.request_finished(50, 100)
    stats.request_finished(0, 900)
    seen = stats.to_dict()
    assert (seen["finished_redirected"], seen["finished_positions"]) == (50, 1000)
    assert seen["affected_ratio"] == pytest.approx(0.05)
    assert seen["final_saving_ratio"] == pytest.approx(0.25)


def test_evicted_positions_are_saved_too() -> None:
    stats = SharingStats()
    stats.request_finished(10, 100, evicted=30)
    seen = stats.to_dict()
    assert (seen["finished_redirected"], seen["finished_evicted"]) == (10, 30)
    assert seen["affected_ratio"] == seen["final_saving_ratio"] == pytest.approx(0.4)
    assert seen["eviction_refusals"] == {} and "sum_saved" not in seen


def test_nothing_finished_is_no_ratio() -> None:
    seen = SharingStats().to_dict()
    assert seen["affected_ratio"] == seen["final_saving_ratio"] == 0.0

# SPDX-License-Identifier: Apache-2.0
"""Compares the adaptive threshold on KV distances with NumPy's percentile. Also tests the start-up check: a
server is refused if only some tensor-parallel ranks can rotate shared keys to new positions."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.plugin.server import check_alike
from sglang_reasoncache.sharing import threshold as of_threshold
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.two_ranks import in_two_threads

_DISTANCE = st.one_of(st.just(0.0), st.floats(1e-7, 999.0), st.sampled_from([0.01, 0.02, 1.0]))
_DISTANCES = st.lists(_DISTANCE, min_size=1, max_size=60)


def value_after(distances: list[float], percentile: float) -> float:
    adaptive = AdaptiveThreshold(percentile, warmup=0)
    adaptive.decide(distances)
    return adaptive.value


@settings(deadline=None)
@given(_DISTANCES, st.floats(0, 100, exclude_min=True, exclude_max=True))
def test_the_value_is_within_one_percent_of_numpy(distances: list[float], p: float) -> None:
    exact = float(np.percentile(distances, p))
    assert exact * (1 - 1e-9) <= value_after(distances, p) <= exact * 1.01


def test_every_distance_is_at_most_the_edge_of_its_bin() -> None:
    """Tests distances at an edge between two bins of the histogram, and just below and above the edge."""
    for edge in (1e-7 * 10.0 ** (np.arange(1, 2560) / 256)).tolist():
        for distance in (edge * (1 - 1e-11), math.nextafter(edge, 0), edge, edge * (1 + 1e-15)):
            assert distance <= value_after([distance], 50) <= distance * 1.011


def test_distances_out_of_range_count_at_the_ends() -> None:
    assert value_after([1e-12, 1e-9], 50) == pytest.approx(1e-7)
    assert value_after([1e5, 1e9], 50) == 1e3
    assert AdaptiveThreshold(50, 0).decide([1e5, 1e9]).tolist() == [False, False]


def test_old_distances_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value is a weighted percentile of all distances. All weights are halved when their sum exceeds 64."""
    monkeypatch.setattr(of_threshold, "_FULL", 64.0)
    rng = np.random.default_rng(2)
    distances = np.concatenate([rng.lognormal(0, 0.5, 300), rng.lognormal(2, 0.5, 50)])
    adaptive = AdaptiveThreshold(50, 0)
    weights = np.zeros(0)
    for distance in distances:
        adaptive.decide([distance])
        weights = np.append(weights, 1.0)
        weights /= 2 if weights.sum() > 64 else 1
    order = np.argsort(distances)
    below = weights[order].cumsum()
    rank = (below[-1] - 1) / 2
    whole = math.floor(rank)
    low, high = distances[order][np.searchsorted(below, [whole, whole + 1], side="right")]
    assert adaptive.value == pytest.approx(low + (high - low) * (rank - whole), rel=0.01)
    assert adaptive.value > np.percentile(distances, 60)
    assert adaptive.num_observed == 350


def test_what_is_accepted_follows_what_was_observed() -> None:
    """The warm-up and percentile 0 accept nothing, 100 accepts all. A batch is observed before it is judged."""
    nothing = AdaptiveThreshold(0, 0)
    everything = AdaptiveThreshold(100, 3)
    distances = [0.0, 1e-9, 0.5, 1e6]
    assert not nothing.decide(distances).any() and not nothing.decide([]).size
    assert not everything.decide(distances[:2]).any()
    assert everything.decide(distances).all()
    assert everything.describe()["distance"] is None
    adaptive = AdaptiveThreshold(percentile=80, warmup=10)
    assert not adaptive.decide([0.5] * 9).any() and not adaptive.is_warm
    assert adaptive.decide([0.5, 0.6]).tolist() == [True, False]
    assert adaptive.decide([2.9, *[3.0] * 10]).all()
    assert adaptive.describe() == {
        **dict(percentile=80, observations=22, warm=True),
        "distance": pytest.approx(3.0, rel=0.01),
    }


def test_what_is_no_distance_is_neither_observed_nor_accepted() -> None:
    for distance in (math.nan, math.inf, -math.inf, -1.0):
        adaptive = AdaptiveThreshold(100, 0)
        assert adaptive.decide([distance, 0.5]).tolist() == [False, True]
        assert adaptive.num_observed == 1


@pytest.mark.parametrize("there", [{}, {"host_swap_gb": False, "min_age": 64}])
def test_ranks_with_other_settings_are_refused(there: dict[str, Any]) -> None:
    """Else ranks would wait for each other forever. All ranks say which settings differ."""
    settings = {"percentile": 80.0, "host_swap_gb": True, "min_age": 256}

    def told(rank: int, group: Any) -> str:
        try:
            check_alike(Ranks(group), settings | (there if rank else {}))
        except ValueError as error:
            return str(error)
        return ""

    mine, others = in_two_threads(told)
    if there:
        assert mine.endswith("differ in: host_swap_gb (here True); min_age (here 256)")
        assert others.endswith("differ in: host_swap_gb (here False); min_age (here 64)")
    else:
        assert mine == others == ""

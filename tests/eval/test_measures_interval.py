# SPDX-License-Identifier: Apache-2.0
"""Intervals against scipy, against published figures, and against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from eval.measures.interval import Spread, mean, paired, wilson

# The machine may be busy with servers.
_SETTINGS = settings(deadline=None, max_examples=60)
_PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=60)
_FLOATS = st.floats(-100, 100).map(lambda value: round(value, 3))


@_SETTINGS
@given(st.integers(1, 300), st.data())
def test_wilson_is_scipys(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson(k / n, n)
    reference = stats.binomtest(k, n).proportion_ci(method="wilson")
    assert low == pytest.approx(reference.low, abs=1e-12)
    assert high == pytest.approx(reference.high, abs=1e-12)


@_SETTINGS
@given(st.lists(st.integers(0, 1), min_size=1, max_size=50), st.integers(1, 4))
def test_copies_of_every_answer_add_nothing(answers: list[int], seeds: int) -> None:
    once = mean(answers, range(len(answers)))
    copied = mean(answers * seeds, [*range(len(answers))] * seeds)
    assert once is not None and copied is not None
    assert (copied.low, copied.high) == (pytest.approx(once.low), pytest.approx(once.high))
    assert (once.low, once.high) == pytest.approx(wilson(once.value, len(answers)))


def test_independent_seeds_narrow_the_interval_and_dependent_ones_do_not() -> None:
    draw = np.random.default_rng(1)
    problems = [*range(200)] * 4
    independent = mean(draw.integers(0, 2, 800).tolist(), problems)
    one = mean(draw.integers(0, 2, 200).tolist(), range(200))
    assert independent is not None and one is not None
    assert independent.high is not None and independent.low is not None
    assert one.high is not None and one.low is not None
    ratio = (independent.high - independent.low) / (one.high - one.low)
    assert 0.45 < ratio < 0.65


@_SETTINGS
@given(st.lists(_FLOATS, min_size=3, max_size=40))
def test_mean_of_other_values_is_students(values: list[float]) -> None:
    assume(np.std(values) > 1e-3)
    found = mean(values, range(len(values)))
    reference = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=1e-9)


@_SETTINGS
@given(st.lists(st.tuples(_FLOATS, _FLOATS), min_size=3, max_size=40))
def test_difference_of_other_values_is_the_paired_t_interval(
    rows: list[tuple[float, float]],
) -> None:
    x, y = ([row[i] for row in rows] for i in (0, 1))
    assume(min(np.std(x), np.std(y), np.std(np.subtract(x, y))) > 1e-2)
    found = paired(x, y, range(len(x)))
    reference = stats.ttest_rel(x, y).confidence_interval(0.95)
    assert found is not None
    low, high = found.difference.low, found.difference.high
    assert (low, high) == pytest.approx((reference.low, reference.high), rel=1e-6, abs=1e-6)


@_SETTINGS
@given(st.lists(st.tuples(st.integers(50, 150), st.integers(50, 150)), min_size=5, max_size=40))
def test_ratio_of_lengths_is_fiellers(rows: list[tuple[int, int]]) -> None:
    """At an end R of the interval, 0 is on the edge of the paired t interval of x - R y."""
    x, y = (np.array([row[i] for row in rows], float) for i in (0, 1))
    assume(min(np.std(x), np.std(y)) > 1)
    found = paired(x.tolist(), y.tolist(), range(len(x)))
    assert found is not None and found.ratio is not None
    for end in (found.ratio.low, found.ratio.high):
        assert end is not None
        rest = x - end * y
        half = stats.t.ppf(0.975, len(x) - 1) * rest.std(ddof=1) / math.sqrt(len(x))
        assert abs(rest.mean()) == pytest.approx(half, rel=1e-6)


@pytest.mark.parametrize(
    ("cells", "interval"),
    [
        # Newcombe 1998, Improved confidence intervals for the difference between binomial
        # proportions based on paired data, method 10.
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((54, 0, 0, 0), (-0.0664, 0.0664)),
        ((1, 97, 1, 1), (0.8737, 0.9850)),
    ],
)
def test_difference_of_shares_as_published(
    cells: tuple[int, int, int, int], interval: tuple[float, float]
) -> None:
    both, only_x, only_y, neither = cells
    x = [1] * both + [1] * only_x + [0] * only_y + [0] * neither
    y = [1] * both + [0] * only_x + [1] * only_y + [0] * neither
    found = paired(x, y, range(len(x)))
    assert found is not None
    assert (found.difference.low, found.difference.high) == pytest.approx(interval, abs=2e-4)


@_SETTINGS
@given(_PAIRS)
def test_intervals_of_shares_agree_with_each_other(rows: list[tuple[int, int]]) -> None:
    x, y = ([row[i] for row in rows] for i in (0, 1))
    found = paired(x, y, range(len(x)))
    swapped = paired(y, x, range(len(x)))
    assert found is not None and swapped is not None
    one, other = found.difference, swapped.difference
    assert one.low is not None and one.high is not None
    assert -1 <= one.low <= one.value <= one.high <= 1
    assert one.low < one.high, "never certain"
    assert other.low == pytest.approx(-one.high)
    ratio = found.ratio
    if ratio is None:
        assert not any(y)
        return
    assert ratio.low is not None and ratio.low <= ratio.value
    assert ratio.high is not None and ratio.value <= ratio.high
    # A ratio is surely below 1 exactly where the difference is surely below 0.
    if abs(one.high) > 1e-9 and abs(one.low) > 1e-9:
        assert (ratio.high < 1) == (one.high < 0)
        assert (ratio.low > 1) == (one.low > 0)


@pytest.mark.parametrize("share", [0.7, 0.98])
def test_intervals_cover_the_truth_with_seeds_that_resemble_each_other(share: float) -> None:
    draw = np.random.default_rng(7)
    problems, seeds, repeats = 60, 3, 400
    clusters = [*range(problems)] * seeds
    hits = {"mean": 0, "difference": 0, "ratio": 0}
    # Each problem has its own chance of being right, the same for both arms.
    strength = 3.0
    for _ in range(repeats):
        chance = draw.beta(strength * share, strength * (1 - share), problems)
        x, y = (
            (draw.random((seeds, problems)) < chance).astype(float).ravel().tolist()
            for _ in range(2)
        )
        alone, both = mean(x, clusters), paired(x, y, clusters)
        assert alone is not None and both is not None and both.ratio is not None
        for name, estimate, truth in (
            ("mean", alone, share),
            ("difference", both.difference, 0),
            ("ratio", both.ratio, 1),
        ):
            assert estimate.low is not None and estimate.high is not None
            hits[name] += estimate.low <= truth <= estimate.high
    # Three standard errors of 400 draws below 95%.
    assert all(count / repeats > 0.917 for count in hits.values()), hits


def test_too_little_data() -> None:
    assert mean([], []) is None
    assert paired([], [], []) is None
    single = mean([3.5], ["a"])
    assert single is not None and single.low is None
    pair = paired([3.0, 4.0], [0.0, 0.0], ["a", "a"])
    assert pair is not None and pair.ratio is None and pair.difference.low is None


def test_spread() -> None:
    assert Spread.of([None, None]) is None
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)

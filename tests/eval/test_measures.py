# SPDX-License-Identifier: Apache-2.0
"""Intervals against scipy, published figures and what they promise; speed and memory of a cell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eval.measures.accuracy import Estimate, Key, compare, differ, keyed, mean
from eval.measures.figures import figures
from eval.runs.records import Leg
from tests.eval.rows import leg, moment, response, result

# The machine may be busy with servers.
_SETTINGS = settings(deadline=None, max_examples=40)
_PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=60)


def values(*seeds: Any) -> dict[Key, float]:
    """Values of the same problems, seed by seed."""
    return {(str(i), s): float(v) for s, row in enumerate(seeds) for i, v in enumerate(row)}


def limits(found: Estimate | None) -> tuple[float, float]:
    assert found is not None and found.low is not None and found.high is not None
    return found.low, found.high


@_SETTINGS
@given(st.integers(1, 300), st.data())
def test_one_seed_has_wilsons_interval(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    reference = stats.binomtest(k, n).proportion_ci(method="wilson")
    found = limits(mean(values([1] * k + [0] * (n - k))))
    assert found == pytest.approx((reference.low, reference.high), abs=1e-12)


@_SETTINGS
@given(st.lists(st.integers(0, 1), min_size=1, max_size=50), st.integers(1, 4))
def test_copies_of_every_answer_add_nothing(answers: list[int], seeds: int) -> None:
    once, copied = mean(values(answers)), mean(values(*[answers] * seeds))
    assert limits(copied) == pytest.approx(limits(once))


def test_independent_seeds_narrow_the_interval() -> None:
    draw = np.random.default_rng(1)
    many = limits(mean(values(*draw.integers(0, 2, (4, 200)))))
    one = limits(mean(values(draw.integers(0, 2, 200))))
    assert 0.45 < (many[1] - many[0]) / (one[1] - one[0]) < 0.65


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
    assert limits(differ(values(x), values(y))) == pytest.approx(interval, abs=2e-4)


@_SETTINGS
@given(_PAIRS)
def test_intervals_of_shares_agree_with_each_other(rows: list[tuple[int, int]]) -> None:
    x, y = (values([row[i] for row in rows]) for i in (0, 1))
    one = differ(x, y)
    low, high = limits(one)
    assert one is not None and -1 <= low <= one.value <= high <= 1
    assert low < high, "never certain"
    assert limits(differ(y, x))[0] == pytest.approx(-high)


@pytest.mark.parametrize("share", [0.7, 0.98])
def test_intervals_cover_the_truth_with_seeds_that_resemble_each_other(share: float) -> None:
    draw = np.random.default_rng(7)
    problems, seeds, repeats = 60, 3, 300
    hits = {"mean": 0, "difference": 0}
    # Each problem has its own chance of being right, the same for both arms.
    for _ in range(repeats):
        chance = draw.beta(3.0 * share, 3.0 * (1 - share), problems)
        x, y = (values(*(draw.random((seeds, problems)) < chance)) for _ in range(2))
        for name, found, truth in (("mean", mean(x), share), ("difference", differ(x, y), 0)):
            low, high = limits(found)
            hits[name] += low <= truth <= high
    # Three standard errors below 95%.
    assert all(count / repeats > 0.912 for count in hits.values()), hits


def test_other_values_have_students_interval() -> None:
    x, y = [3.0, 5.5, 9.0, 4.0], [2.0, 5.0, 7.0, 4.5]
    for found, test in (
        (mean(values(x)), stats.ttest_1samp(x, 0)),
        (differ(values(x), values(y)), stats.ttest_rel(x, y)),
    ):
        reference = test.confidence_interval()
        assert limits(found) == pytest.approx((reference.low, reference.high))
    assert mean({}) is None and differ({}, {}) is None
    single = mean(values([3.5]))
    assert single is not None and single.low is None


@_SETTINGS
@given(_PAIRS)
def test_mcnemar_is_exact(rows: list[tuple[int, int]]) -> None:
    sides = [keyed({0: [result(str(i), bool(r[s])) for i, r in enumerate(rows)]}) for s in (0, 1)]
    found = compare(*sides)
    assert found is not None and found.pairs == len(rows)
    b, c = found.only_dense, found.only_method
    assert (b, c) == (rows.count((0, 1)), rows.count((1, 0)))
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))
    assert found.difference.value == pytest.approx((c - b) / found.pairs)
    assert (found.kept is None) == (not any(row[1] for row in rows))


def test_only_common_problems_and_seeds_are_compared() -> None:
    dense = keyed({0: [result("a", True), result("b", True)], 1: [result("a", True)]})
    found = compare(keyed({0: [result("a", False), result("c", True)]}), dense)
    assert found is not None and found.pairs == 1 and found.difference.value == -1
    assert compare(keyed({0: [result("z", True)]}), dense) is None


def test_speed_of_a_leg_that_went_to_its_end() -> None:
    rows = [
        response("a"),
        response("b", started=0.0, first_token=2.0, ended=2.0, output_tokens=1),
        response("c", first_token=None, output_tokens=0),
        response("d", output_tokens=1000, error="timed out"),
        response("e", first_token=1.25, ended=1.35),
    ]
    # Beside it one that was stopped and had answered nothing yet.
    legs = [leg(), leg(2, seconds=30, output_tokens=0, responses=0, ended=False)]
    found = figures(rows, legs, [moment(0, running=2), moment(1, running=4)])
    assert (found.tokens_per_s, found.problems_per_min) == (10, 24)
    assert (found.resumed, found.failed, found.mean_running) == (False, 1, 3)
    assert found.ttft_p50 == pytest.approx(0.75)
    assert found.ttft_p99 == pytest.approx(np.percentile([0.5, 2.0, 0.75], 99))
    # One token has no time between tokens.
    assert found.tpot_p50 == pytest.approx((0.1 + 0.01) / 2)
    assert found.response_tokens == pytest.approx((11 + 1 + 0 + 11) / 4)


def test_a_resumed_cell_has_no_throughput() -> None:
    """Tokens of what was in flight when a leg was stopped are lost, their time is not."""
    both = [response("a"), response("b", leg=1)]
    for rows, legs in (
        (both, [leg(), leg(1)]),
        (both, [leg(), leg(1, ended=False)]),
        (both[:1], [leg(ended=False)]),
    ):
        found = figures(rows, legs, [])
        assert found.tokens_per_s is found.problems_per_min is None
        assert found.resumed and found.tpot_p50 is not None
    killed = figures(both[:1], [], [])
    assert killed.tokens_per_s is None and not killed.resumed
    nothing = figures([], [], [])
    assert nothing.tokens_per_s is nothing.ttft_p50 is nothing.mean_running is None


def test_saving_weighs_legs_by_what_they_counted() -> None:
    names = ["memory_saving_ratio", "polls", "final_saving_ratio", "requests_finished"]
    names += ["affected_ratio", "finished_positions"]
    first = dict(zip(names, (0.1, 10, 0.2, 1, 0.5, 100), strict=True))
    second = dict(zip(names, (0.3, 30, 0.4, 3, 0.1, 300), strict=True))
    found = figures([], [leg(0, first), leg(1, second)], [moment(0, used=5), moment(1, used=9)])
    assert found.saving == pytest.approx(0.25)
    assert found.final_saving == pytest.approx(0.35)
    assert found.affected == pytest.approx(0.2)
    assert (found.peak_slots, found.mean_slots) == (9, 7)
    assert (found.retractions, found.leaked_slots) == (2, 0)


@pytest.mark.parametrize(
    ("legs", "saving"),
    [
        ([leg()], 0.0),
        ([leg(command=[], leaked_slots=None)], None),
        ([leg(0, {"memory_saving_ratio": math.nan, "polls": 10})], None),
        ([leg(0, {"memory_saving_ratio": 0.1, "polls": 10})], 0.1),
    ],
    ids=["stock saves nothing", "given by URL", "broken", "without other ratios"],
)
def test_what_a_server_does_not_report_is_unknown(legs: list[Leg], saving: float | None) -> None:
    assert figures([], legs, []).saving == saving
    # A leg whose server died before it answered says nothing about the others.
    flags = ["serve", "--enable-reasoncache"]
    dead, answered = (leg(1, command=flags, responses=count) for count in (0, 1))
    assert figures([], [*legs, dead], []).saving == saving
    assert figures([], [*legs, answered], []).saving is None
    assert figures([], [leg(0, {"polls": 1.0})], []).affected is None

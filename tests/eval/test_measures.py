# SPDX-License-Identifier: Apache-2.0
"""Measures over records, against figures worked out by hand or by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.measures import accuracy, length, memory
from eval.measures.speed import speed, tpot
from eval.runs.records import Leg, Moment, Response, Result

# The machine may be busy with servers.
_SETTINGS = settings(deadline=None, max_examples=60)


def result(problem: str, correct: bool, group: str = "", score: float | None = None) -> Result:
    return Result(problem, correct, float(correct) if score is None else score, None, "", group, 10)


def response(problem: str, tokens: int = 11, **changes: Any) -> Response:
    values: dict[str, Any] = dict(
        problem_id=problem, leg=0, request_id="r", text="", prompt_tokens=5, output_tokens=tokens,
        started=1.0, first_token=1.5, ended=2.5, finish_reason="stop",
    )  # fmt: skip
    return Response(**(values | changes))


def leg(number: int = 0, totals: dict[str, Any] | None = None, **changes: Any) -> Leg:
    values: dict[str, Any] = dict(
        leg=number, seconds=10.0, output_tokens=100, responses=5, decode_steps=50, retractions=1,
        report={} if totals is None else {"totals": totals}, leaked_slots=0,
        command=["serve", "--enable-reasoncache"] if totals is not None else ["serve"],
    )  # fmt: skip
    return Leg(**(values | changes))


def moment(step: int, used: int = 0, saved: int = 0, running: int = 1) -> Moment:
    return Moment(0, step, running, 0, used, saved, 1.0)


@_SETTINGS
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.integers(1, 3)
)
def test_mcnemar_is_exact(rows: list[tuple[bool, bool]], seeds: int) -> None:
    ids = [f"p{i}" for i in range(len(rows))]
    dense = accuracy.keyed(
        {s: [result(i, row[0]) for i, row in zip(ids, rows, strict=True)] for s in range(seeds)}
    )
    method = accuracy.keyed(
        {s: [result(i, row[1]) for i, row in zip(ids, rows, strict=True)] for s in range(seeds)}
    )
    found = accuracy.compare(method, dense)
    assert found is not None
    b = seeds * sum(d and not m for d, m in rows)
    c = seeds * sum(m and not d for d, m in rows)
    assert (found.only_dense, found.only_method, found.pairs) == (b, c, seeds * len(rows))
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))
    assert found.difference.value == pytest.approx(seeds * -(b - c) / seeds / found.pairs)


def test_only_common_problems_and_seeds_are_compared() -> None:
    dense = accuracy.keyed({0: [result("a", True), result("b", True)], 1: [result("a", True)]})
    method = accuracy.keyed({0: [result("a", False), result("c", True)]})
    found = accuracy.compare(method, dense)
    assert found is not None and found.pairs == 1 and found.difference.value == -1
    assert accuracy.compare(method, accuracy.keyed({5: [result("a", True)]})) is None


def test_kept_share_of_a_dense_that_knows_nothing_is_unknown() -> None:
    rows = {0: [result("a", False), result("b", False)]}
    found = accuracy.compare(accuracy.keyed(rows), accuracy.keyed(rows))
    assert found is not None and found.kept is None and found.p_value == 1


def test_scores_between_0_and_1_count_as_they_are() -> None:
    found = accuracy.accuracy(
        accuracy.keyed({0: [result("a", False, score=0.25), result("b", True, score=0.75)]})
    )
    assert found is not None and found.value == 0.5


def test_classes_of_problems() -> None:
    rows = accuracy.keyed({0: [result("a", True, "x"), result("b", False, "x"), result("c", True)]})
    found = accuracy.by_group(rows)
    assert list(found) == ["x"] and found["x"].value == 0.5


def test_speed_of_a_leg_that_went_to_its_end() -> None:
    rows = [
        response("a"),
        response("b", started=0.0, first_token=2.0, ended=2.0, tokens=1),
        response("c", first_token=None, tokens=0),
        response("d", tokens=1000, error="timed out"),
        response("e", first_token=1.25, ended=1.35),
    ]
    # Before it one was stopped that had answered nothing yet.
    legs = [
        leg(seconds=10, output_tokens=100, responses=4),
        leg(2, seconds=30, output_tokens=0, responses=0, ended=False),
    ]
    found = speed(rows, legs, [moment(0, running=2), moment(1, running=4)])
    assert found.tokens_per_s == pytest.approx(100 / 10)
    assert found.problems_per_min == pytest.approx(60 * 4 / 10)
    assert (found.resumed, found.seconds) == (False, 40)
    assert found.ttft_p50 == pytest.approx(0.5)
    assert found.ttft_p99 == pytest.approx(np.percentile([0.5, 2.0, 0.25], 99))
    # One token has no time between tokens.
    assert found.tpot_p50 == pytest.approx((0.1 + 0.01) / 2)
    assert found.mean_running == 3
    assert (found.responses, found.unrecorded) == (4, 0)
    assert tpot(rows[1]) is None


def test_a_resumed_cell_has_no_throughput() -> None:
    """Tokens of what was in flight when a leg was stopped are lost, their time is not."""
    both = [response("a"), response("b", leg=1)]
    for rows, legs, unrecorded in (
        (both, [leg(), leg(1)], 0),
        (both, [leg(), leg(1, ended=False)], 0),
        (both, [leg(1)], 1),
        (both[:1], [leg(ended=False)], 0),
    ):
        found = speed(rows, legs, [])
        assert found.tokens_per_s is found.problems_per_min is None
        assert found.resumed and found.tpot_p50 is not None
        assert found.unrecorded == unrecorded
    killed = speed(both[:1], [], [])
    assert killed.tokens_per_s is None and not killed.resumed and killed.unrecorded == 1


def test_speed_of_nothing() -> None:
    found = speed([], [], [])
    assert found.tokens_per_s is None and found.ttft_p50 is None and found.mean_running is None


def test_saving_weighs_legs_by_what_they_counted() -> None:
    first = {
        "memory_saving_ratio": 0.1, "looks": 10, "final_saving_ratio": 0.2,
        "requests_finished": 1, "affected_ratio": 0.5, "finished_positions": 100,
    }  # fmt: skip
    second = {
        "memory_saving_ratio": 0.3, "looks": 30, "final_saving_ratio": 0.4,
        "requests_finished": 3, "affected_ratio": 0.1, "finished_positions": 300,
    }  # fmt: skip
    found = memory.memory([leg(0, first), leg(1, second)], [moment(0, 5, 1), moment(1, 9, 3)])
    assert found.saving == pytest.approx(0.25)
    assert found.final_saving == pytest.approx(0.35)
    assert found.affected == pytest.approx(0.2)
    assert (found.peak_slots, found.mean_slots, found.mean_saved) == (9, 7, 2)
    assert (found.retractions, found.leaked_slots) == (2, 0)


def test_what_a_server_does_not_report_is_unknown_but_stock_saves_nothing() -> None:
    old = {"memory_saving_ratio": 0.1, "looks": 10}
    assert memory.memory([leg(0, old)], []).affected is None
    assert memory.memory([leg()], []).saving == 0
    by_url = memory.memory([leg(command=[], leaked_slots=None)], [])
    assert by_url.saving is None and by_url.leaked_slots is None
    broken = {"memory_saving_ratio": math.nan, "looks": 10}
    assert memory.memory([leg(0, broken)], []).saving is None
    assert memory.memory([], []).retractions is None
    # A leg whose server died before it answered says nothing about the others.
    dead = leg(1, {}, report={}, responses=0)
    assert memory.memory([leg(0, old), dead], []).saving == pytest.approx(0.1)
    answered = leg(1, {}, report={}, responses=1)
    assert memory.memory([leg(0, old), answered], []).saving is None


@_SETTINGS
@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 99)), min_size=1), st.integers(1, 9))
def test_thinning_out_keeps_the_mean(rows: list[tuple[int, int]], points: int) -> None:
    curve = memory.over_time([moment(i, u, s) for i, (u, s) in enumerate(rows)], points)
    assert curve is not None
    assert len(curve.step) == len(curve.used) == min(points, len(rows))
    assert curve.step == sorted(curve.step)
    if len(rows) % len(curve.used) == 0:
        assert np.mean(curve.used) == pytest.approx(np.mean([u for u, _ in rows]))
    assert memory.over_time([]) is None


def test_longer_answers_are_flagged() -> None:
    draw = np.random.default_rng(3)
    lengths = draw.integers(100, 200, 50).tolist()
    dense = length.keyed({0: [response(f"p{i}", n) for i, n in enumerate(lengths)]})
    same = length.keyed({0: [response(f"p{i}", n + i % 3 - 1) for i, n in enumerate(lengths)]})
    more = length.keyed({0: [response(f"p{i}", n + 10) for i, n in enumerate(lengths)]})
    unchanged, grown = length.compare(same, dense), length.compare(more, dense)
    assert unchanged is not None and not unchanged.longer
    assert grown is not None and grown.longer
    assert grown.difference.value == pytest.approx(10)
    less = length.compare(dense, more)
    assert less is not None and not less.longer
    equal = length.compare(dense, dense)
    assert equal is not None and not equal.longer


def test_lengths_leave_failures_out_and_count_cut_responses() -> None:
    rows = length.keyed(
        {
            0: [
                response("a", 5, error="broken"),
                response("a", 100),
                response("b", 300, finish_reason="length"),
                response("c", 1, error="broken"),
            ]
        }
    )
    found = length.lengths(rows)
    assert found is not None
    assert found.mean.value == 200 and found.mean.n == 2 and length.cut(rows) == 1
    # A replay ends by length; what reproduces the record is whole.
    assert length.cut(rows, {("b", 0): result("b", True)}) == 0
    assert length.cut(rows, {("b", 0): result("b", False)}) == 1
    assert found.quartiles[2] == 200
    right = accuracy.keyed({0: [result("a", True), result("b", False)]})
    assert list(length.correct_only(rows, right)) == [("a", 0)]
    assert length.lengths({}) is None and length.compare({}, rows) is None

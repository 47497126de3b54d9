# SPDX-License-Identifier: Apache-2.0
"""Lexical similarity and the dynamic threshold against their formulas."""

from __future__ import annotations

import math
import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.lexical import LexicalIndex, dynamic_threshold
from sglang_reasoncache.filter.segment import Step
from tests.filter.words import check_index, step_of


def slow_cosine(a: Step, b: Step) -> float:
    """The formula, straight from the tokens."""
    counts_a, counts_b = Counter(a.token_ids), Counter(b.token_ids)
    dot = sum(counts_a[token] * counts_b[token] for token in {*counts_a, *counts_b})
    norm_a = math.sqrt(sum(count**2 for count in counts_a.values()))
    norm_b = math.sqrt(sum(count**2 for count in counts_b.values()))
    return dot / (norm_a * norm_b)


_STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 200)),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(_STEPS, st.booleans(), st.integers(1, 15))
def test_similarities_equal_the_formula(
    drawn: list[tuple[list[int], int]], length_factor: bool, max_history_steps: int
) -> None:
    """Over a bounded history too, through many compactions."""
    index = LexicalIndex(max_history_steps, length_factor)
    check_index(index, drawn, slow_cosine, length_factor, max_history_steps, 1e-12)


def test_hand_computed() -> None:
    """(1,1,2) against (1,2,2): cosine 4/5; lengths 8 and 10: 0.64."""
    earlier, step = step_of([1, 1, 2], text="x" * 8), step_of([1, 2, 2], text="y" * 10)
    for length_factor, expected in ((False, 0.8), (True, 0.64)):
        index = LexicalIndex(10, length_factor)
        index.add(earlier)
        found = index.similarities(step)[0]
        assert found == pytest.approx(expected, abs=1e-15)
        # Not above 0.8 by its last bit.
        assert not found > 0.8


@pytest.mark.parametrize(
    ("earlier", "step", "expected"),
    [([5, 3, 3, 9, 9, 9], [9, 3, 9, 5, 3, 9], 1.0), ([1, 2], [3], 0.0)],
)
def test_equal_bags_are_exactly_one_and_none_in_common_zero(
    earlier: list[int], step: list[int], expected: float
) -> None:
    index = LexicalIndex(10)
    index.add(step_of(earlier))
    assert index.similarities(step_of(step)).tolist() == [expected]


def test_blank_tail_is_not_in_the_bag() -> None:
    """The papers' step is the text between two blank lines, without them."""
    step = Step.build(0, [4, 4, 7, 8], "ab\n\n\n", num_blank_tail=2)
    assert (step.bag, step.num_chars, len(step)) == ({4: 2}, 2, 4)


@pytest.mark.parametrize("num_blank_tail", [-1, 2, 3])
def test_step_without_visible_tokens_is_refused(num_blank_tail: int) -> None:
    with pytest.raises(ValueError, match="num_blank_tail"):
        Step.build(0, [1, 2], "", num_blank_tail)


@pytest.mark.parametrize(
    ("sims", "expected"),
    [([], 0.9), ([0.0, 0.0], 0.9), ([1.0], 0.7), ([0.2, 0.4], 0.84), ([1.0, 0.0, 0.5], 0.8)],
)
def test_dynamic_threshold(sims: list[float], expected: float) -> None:
    """tau = 0.9 - 0.2 * mean, by hand."""
    assert dynamic_threshold(np.array(sims), 0.9, 0.7) == pytest.approx(expected)


_SIMS = st.lists(st.floats(0, 1), min_size=1, max_size=200)


@settings(deadline=None)
@given(_SIMS, st.randoms(use_true_random=False))
def test_the_threshold_does_not_depend_on_the_order(sims: list[float], rng: random.Random) -> None:
    """To the last bit: native code sums in another order."""
    tau = dynamic_threshold(np.array(sims), 0.9, 0.7)
    shuffled = rng.sample(sims, len(sims))
    assert dynamic_threshold(np.array(shuffled), 0.9, 0.7) == tau
    # round() is to even, as rint.
    total = sum(round(sim * 2**40) for sim in sims)
    assert tau == 0.9 - (0.9 - 0.7) * (total / (len(sims) * 2.0**40))
    assert tau == pytest.approx(0.9 - 0.2 * math.fsum(sims) / len(sims), abs=1e-12)


def test_the_mean_of_a_full_history_does_not_overflow() -> None:
    sims = np.ones(1 << 20)
    assert dynamic_threshold(sims, 0.9, 0.7) == 0.9 - (0.9 - 0.7)


def test_the_largest_history_of_nearly_equal_steps_is_compared_in_bounded_time() -> None:
    """Each of 1,024 tokens is in each of 2,048 steps: two million postings a query."""
    index = LexicalIndex(2048)
    tokens = np.arange(1024)
    for i in range(2048):
        index.add(step_of([*tokens[:-1].tolist(), 2000 + i]))
    query = step_of(tokens.tolist())
    seconds = []
    for _ in range(8):
        start = time.thread_time()
        sims = index.similarities(query)
        dynamic_threshold(sims, 0.9, 0.7)
        seconds.append(time.thread_time() - start)
    assert sims.tolist() == pytest.approx([1023 / 1024] * 2048)
    # A hostile step may cost 50 ms; some 15 on a machine of today.
    assert min(seconds) < 0.05

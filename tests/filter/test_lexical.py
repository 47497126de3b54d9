# SPDX-License-Identifier: Apache-2.0
"""Similarities and the dynamic threshold against their formulas."""

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
from tests.filter.words import step_of, with_length_factor


def slow_cosine(a: Step, b: Step) -> float:
    counts_a, counts_b = Counter(a.token_ids), Counter(b.token_ids)
    dot = sum(counts_a[token] * counts_b[token] for token in {*counts_a, *counts_b})
    norm_a = math.sqrt(sum(count**2 for count in counts_a.values()))
    norm_b = math.sqrt(sum(count**2 for count in counts_b.values()))
    return dot / (norm_a * norm_b)


_STEPS = st.lists(
    st.tuples(st.lists(st.integers(-3, 20), min_size=1, max_size=20), st.integers(1, 200)),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(_STEPS, st.booleans(), st.integers(1, 40))
def test_similarities_equal_the_formula(
    drawn: list[tuple[list[int], int]], length_factor: bool, max_steps: int
) -> None:
    """Over a bounded history too, whose oldest step has made room many times."""
    index = LexicalIndex(max_steps, length_factor)
    history: list[Step] = []
    for token_ids, num_chars in drawn:
        step = step_of(token_ids, text="x" * num_chars)
        kept = history[-max_steps:]
        sims = index.similarities(step)
        expected = [slow_cosine(step, earlier) for earlier in kept]
        if length_factor:
            pairs = zip(expected, kept, strict=True)
            expected = [with_length_factor(*each, step) for each in pairs]
        assert (len(index), sims.shape, sims.dtype) == (len(kept), (len(kept),), float)
        assert sims == pytest.approx(expected, abs=1e-12)
        assert all(0.0 <= sim <= 1.0 for sim in sims)
        assert all(index[i] is earlier for i, earlier in enumerate(kept))
        index.add(step)
        history.append(step)


def test_blank_tokens_at_the_end_are_not_in_the_bag() -> None:
    """The papers' step is the text between two blank lines, without them."""
    step = Step.build(0, [4, 4, 7, 8], "ab\n\n\n", num_blank_tail=2)
    assert (step.bag, step.num_chars, len(step)) == ({4: 2}, 2, 4)
    for num_blank_tail in (-1, 2, 3):
        with pytest.raises(ValueError, match="num_blank_tail"):
            Step.build(0, [1, 2], "", num_blank_tail)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=200), st.randoms(use_true_random=False))
def test_the_threshold_is_the_formula_in_any_order(sims: list[float], rng: random.Random) -> None:
    """To the last bit: native code sums in another order."""
    tau = dynamic_threshold(np.array(sims), 0.9, 0.7)
    shuffled = rng.sample(sims, len(sims))
    assert dynamic_threshold(np.array(shuffled), 0.9, 0.7) == tau
    # round() is to even, as rint.
    total = sum(round(sim * 2**40) for sim in sims)
    assert tau == 0.9 - (0.9 - 0.7) * (total / (max(1, len(sims)) * 2.0**40))
    assert tau == pytest.approx(0.9 - 0.2 * math.fsum(sims) / max(1, len(sims)), abs=1e-12)


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
    # The mean of a full history does not overflow.
    assert dynamic_threshold(np.ones(1 << 20), 0.9, 0.7) == 0.9 - (0.9 - 0.7)

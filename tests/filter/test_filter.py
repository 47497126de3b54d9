# SPDX-License-Identifier: Apache-2.0
"""Tests the filter of the ReasonCache and MemShare papers (``match=steps``), which pairs blocks of similar
steps (texts between blank lines). Covers formulas, bounds, presets, and all pairs against a slow reference."""

import dataclasses
import math
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter import structure
from sglang_reasoncache.filter.lexical import LexicalIndex, dynamic_threshold
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.request_filter import Proposal, RequestFilter
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import PRESETS, AlignMode, FilterConfig
from sglang_reasoncache.filter.steps import align_blocks, alternatives_of
from sglang_reasoncache.filter.structure import Limits, same_structure, signature
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.filter.words import Words, filter_knobs, step_of, with_length_factor
from tests.filter.work import count_calls

_PHRASES = (
    "line c = a + 3 . here a 4 . 4 + 3 = 7 , so c 7 , now next .",
    "line c = a + 3 . here a 4 . 4 + 3 = 8 , so c 8 , now next .",
    "we look at that again because it was not clear at all before , wait .",
    "we look at it again because that was not clear at all before , wait .",
    "wait . we look at it again because that was not clear .",
    "the value of \\( x \\) is 5 and that is all we need to know here .",
    "```\nfor i in range ( 3 ) :\n    total = total + i\n```",
)


def make(words: Words, start: int = 0, **knobs: Any) -> RequestFilter:
    return RequestFilter(FilterConfig(**knobs), words.classes, words.vocabulary, start)


def propose(phrases: list[str], **knobs: Any) -> tuple[RequestFilter, list[Proposal]]:
    request = make(Words(), **knobs)
    return request, request.push(Words().encode(response(phrases)))


def response(phrases: list[str]) -> str:
    return "".join(f"{phrase} \n\n " for phrase in phrases)


def slow_filter(phrases: list[str], config: FilterConfig) -> list[list[BlockPair]]:
    """Slow reference of the filter: compares a step with each earlier step in turn. Ignores KV distances."""
    _, proposals = propose(phrases, max_step_tokens=10_000)
    steps = [proposal.step for proposal in proposals]
    # As in the papers, steps are compared without the blank lines behind them. Here a blank line is one token.
    texts: list[Any] = [dataclasses.replace(s, token_ids=s.token_ids[:-1]) for s in steps]
    signatures = [signature(Words().decode(list(step.token_ids))) for step in steps]
    found = []
    for k, step in enumerate(steps):
        earlier = texts[:k]
        this = texts[k]
        sims = [slow_cosine(this, other) for other in earlier]
        if config.length_factor:
            sims = [with_length_factor(*each, this) for each in zip(sims, earlier, strict=True)]
        tau = config.fixed_tau
        if tau is None:
            mean = sum(sims) / len(sims) if sims else 0.0
            tau = config.strict - (config.strict - config.soft) * mean
        order = sorted((-sim, -j) for j, sim in enumerate(sims) if sim > tau)
        covered = bytearray(len(step))
        pairs = []
        num_used = 0
        starts = range(step.start, step.end - config.block + 1, config.block)
        sources: list[int] = []
        for _, minus_j in order:
            source = steps[-minus_j]
            if config.use_structure and not same_structure(signatures[k], signatures[-minus_j]):
                continue
            if num_used == config.max_candidates:
                break
            num_used += 1
            if config.align == "nearest":
                if len(sources) < len(starts):
                    sources += range(source.start, source.end - config.block + 1, config.block)
                continue
            for dst, src in align_blocks(step, source, config.block, config.align, covered):
                pairs.append(BlockPair(dst, src))
                for i in range(dst - step.start, dst - step.start + config.block):
                    covered[i] = 1
        most = config.max_blocks_per_step
        found.append(sorted(pairs) or alternatives_of(starts, sources, most))
    return found


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(_PHRASES), min_size=2, max_size=10),
    st.sampled_from(["reasoncache", "memshare", "cosine", "cosine-structure"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.data(),
)
def test_same_pairs_as_the_slow_reference(
    phrases: list[str], preset: str, block: int, max_candidates: int, data: st.DataObject
) -> None:
    token_ids = Words().encode(response(phrases))
    knobs = filter_knobs(preset) | {"block": block, "max_candidates": max_candidates}
    request = make(Words(), **knobs)
    proposals: list[Proposal] = []
    position = 0
    while position < len(token_ids):
        size = data.draw(st.integers(1, 40))
        proposals += request.push(token_ids[position : position + size])
        position += size
    expected = slow_filter(phrases, FilterConfig(**knobs))
    assert len(proposals) == len(phrases)
    for proposal, pairs in zip(proposals, expected, strict=True):
        alternatives = tuple(pairs) if preset == "memshare" else ()
        assert proposal.alternatives == ((alternatives,) if alternatives else ())
        assert list(proposal.pairs or alternatives) == pairs
    assert request.position == len(token_ids)


def test_positions_are_logical_and_the_delimiter_belongs_to_the_step() -> None:
    _, proposals = propose([_PHRASES[2]] * 2, start=100, block=3)
    first, second = (proposal.step for proposal in proposals)
    assert (first.start, first.end, second.start) == (100, 117, 117)
    assert Words().decode(list(first.token_ids)) == _PHRASES[2] + " \n\n"
    assert proposals[0].pairs == ()
    expected = tuple((117 + 3 * k, 100 + 3 * k) for k in range(5))
    assert proposals[1].pairs == expected
    # Blank tokens before or between steps belong to no step, but each takes a position.
    request, proposals = propose(["\n\n " * 5000 + "one two"], block=2)
    assert (len(proposals), request.position) == (1, 5003)


@pytest.mark.parametrize(
    ("knobs", "dropped", "shares"),
    [
        ({}, 1, False), ({"use_structure": False}, 0, True),
        ({"structure_tolerance": 1}, 1, False), ({"structure_tolerance": 2}, 0, True),
    ],
)  # fmt: skip
def test_a_differing_number_is_not_shared_unless_structure_allows_it(
    knobs: dict[str, Any], dropped: int, shares: bool
) -> None:
    _, (_, last) = propose([_PHRASES[0], _PHRASES[1]], block=4, **knobs)
    assert (last.counters.candidates, last.counters.dropped_structure) == (1, dropped)
    assert bool(last.pairs) is shares


def test_edit_distances_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile client could make each step similar to all before it. The most similar ones are compared."""
    tried = []
    monkeypatch.setattr(structure, "_is_near", lambda *_: tried.append(1))
    texts = [_PHRASES[0].replace("7", str(number)) for number in range(10)]
    _, proposals = propose(texts, block=4, structure_tolerance=2)
    assert proposals[-1].counters.candidates == 9 == proposals[-1].counters.dropped_structure
    assert len(tried) == sum(min(before, 4) for before in range(10))


@pytest.mark.parametrize(
    ("blocks", "sources", "most", "each"), [(3, 4, 12, 4), (3, 4, 8, 2), (9, 2, 4, 1), (1, 9, 4, 4)]
)
def test_alternatives_are_bounded(blocks: int, sources: int, most: int, each: int) -> None:
    """Within the bound each block has all sources, else those around its own index."""
    starts = [100 + 4 * k for k in range(blocks)]
    earlier = [4 * k for k in range(sources)]
    found = alternatives_of(starts, earlier, most)
    assert len(found) <= most and sorted(found) == found == sorted(set(found))
    assert Counter(start for start, _ in found) == dict.fromkeys(starts[:most], each)
    assert {source for _, source in found} <= set(earlier)
    for k, start in enumerate(starts[:most]):
        assert BlockPair(start, earlier[min(k, sources - 1)]) in found
    assert alternatives_of([], earlier, most) == alternatives_of(starts, [], most) == []


def test_alternatives_are_released_together_when_the_last_reader_is_old() -> None:
    """The first two steps have four blocks of four tokens each; 20 tokens must follow the second's last."""
    knobs: dict[str, Any] = {**filter_knobs("memshare"), "block": 4, "min_age": 20}
    _, proposals = propose([_PHRASES[2]] * 4, **knobs)
    assert [len(p.alternatives) for p in proposals] == [0, 0, 0, 1]
    (found,) = proposals[3].alternatives
    assert set(found) == {(17 + 4 * i, 4 * j) for i in range(4) for j in range(4)}
    assert all(p.pairs == () and p.across == () for p in proposals)


def test_bounds_on_blocks_and_checks() -> None:
    _, proposals = propose([_PHRASES[2]] * 5, block=2, max_blocks_per_step=3)
    assert len(proposals[-1].pairs) == 3
    # All steps have the same tokens, so all are equally similar. Then newer steps are checked first.
    one = "line c = 3 - 4 . here now ."
    other = "line c = 4 - 3 . here now ."
    for checks, shares in ((2, False), (3, True)):
        knobs = {"block": 4, "max_structure_checks": checks}
        _, proposals = propose([one, other, other, one], **knobs)
        assert proposals[-1].counters.candidates == 3
        assert bool(proposals[-1].pairs) is shares
    # A step that exceeds a bound shares nothing.
    _, (_, over) = propose([_PHRASES[2]] * 2, block=2, limits=Limits(max_chars=30))
    assert over.pairs == ()
    assert (over.counters.dropped_structure, over.counters.over_bound) == (0, 2)
    assert over.step.signature is not None and over.step.signature.bound


def test_random_sharing_is_seeded_in_range_and_of_the_given_ratio() -> None:
    rng = random.Random(5)
    phrases = [" ".join(f"w{rng.randrange(500)}" for _ in range(rng.randrange(3, 30)))
               for _ in range(300)]  # fmt: skip

    def run(**knobs: Any) -> list[Proposal]:
        return propose(phrases, **({"start": 7, "block": 4, "random_ratio": 0.25} | knobs))[1]

    proposals = run()
    assert [p.pairs for p in proposals] == [p.pairs for p in run()]
    other = [[(dst - 1, src - 1) for dst, src in p.pairs] for p in run(start=8)]
    assert [list(p.pairs) for p in proposals] != other
    num_blocks = sum(len(p.step) // 4 for p in proposals)
    assert 0.22 < sum(len(p.pairs) for p in proposals) / num_blocks < 0.28
    starts: set[int] = set()
    for proposal in proposals:
        assert all(pair.src_start in starts for pair in proposal.pairs)
        blocks = set(range(proposal.step.start, proposal.step.end - 3, 4))
        assert {pair.dst_start for pair in proposal.pairs} <= blocks
        starts |= blocks
    # Earlier blocks are drawn from the whole history. A bounded history has only recent steps.
    lags = [p.step.start - pair.src_start for p in proposals[200:] for pair in p.pairs]
    assert max(lags) > 2000
    recent = run(max_history_steps=2)
    assert max(p.step.start - pair.src_start for p in recent for pair in p.pairs) <= 62


@pytest.mark.parametrize(("fixed_tau", "num_candidates"), [(0.8, 0), (0.79, 1)])
def test_a_candidate_is_strictly_above_the_threshold(fixed_tau: float, num_candidates: int) -> None:
    """The two steps have a cosine of exactly 0.8."""
    knobs = {"fixed_tau": fixed_tau, "length_factor": False, "use_structure": False}
    _, (_, last) = propose(["up up down", "up down down"], **knobs)
    assert last.counters.candidates == num_candidates


_TOKEN_IDS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(deadline=None)
@given(_TOKEN_IDS, _TOKEN_IDS, st.integers(0, 9), st.integers(50, 59), st.integers(1, 6),
       st.sampled_from(["tokens", "index"]), st.data())  # fmt: skip
def test_pairs_are_sound(
    src_ids: list[int], dst_ids: list[int], src_start: int, dst_start: int, block: int,
    mode: AlignMode, data: st.DataObject,
) -> None:  # fmt: skip
    src = step_of(src_ids, src_start)
    dst = step_of(dst_ids, dst_start)
    flags = data.draw(
        st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=len(dst), max_size=len(dst))
    )
    covered = bytearray(flags)
    pairs = align_blocks(dst, src, block, mode, covered)
    assert bytes(covered) == bytes(flags)
    free_from = dst.start
    for pair in pairs:
        i = pair.dst_start - dst.start
        j = pair.src_start - src.start
        assert pair.dst_start >= free_from
        assert pair.dst_start + block <= dst.end
        assert src.start <= pair.src_start <= src.end - block
        assert not any(flags[i : i + block])
        if mode == "tokens":
            assert dst_ids[i : i + block] == src_ids[j : j + block]
        free_from = pair.dst_start + block


@settings(deadline=None)
@given(_TOKEN_IDS, _TOKEN_IDS, st.integers(1, 8), st.integers(0, 20))
def test_tokens_mode_misses_nothing(
    src_ids: list[int], dst_ids: list[int], block: int, gap: int
) -> None:
    """Pairing is greedy from the left, so no run of unpaired tokens contains a block of ``src``. A block of
    an exact copy is paired with the block at the same place in the original, even if blocks repeat."""
    src = step_of(src_ids)
    pairs = align_blocks(step_of(dst_ids, 100), src, block)
    taken = {pair.dst_start - 100 + k for pair in pairs for k in range(block)}
    grams = {tuple(src_ids[j : j + block]) for j in range(len(src_ids) - block + 1)}
    for i in range(len(dst_ids) - block + 1):
        if not taken & set(range(i, i + block)):
            assert tuple(dst_ids[i : i + block]) not in grams
    start = len(src_ids) + gap
    expected = [BlockPair(start + k, k) for k in range(0, len(src_ids) - block + 1, block)]
    assert align_blocks(step_of(src_ids, start), src, block) == expected


@pytest.mark.parametrize(
    ("dst", "src", "block", "expected"),
    [
        ("abcdef", "abcdef", 2, [(0, 0), (2, 2), (4, 4)]),
        ("xabcdef", "abcdef", 2, [(1, 0), (3, 2), (5, 4)]),
        # One token was replaced. Pairs after it keep the same distance (diagonal) between ``dst`` and ``src``.
        ("abXcdab", "abYcdab", 2, [(0, 0), (3, 3), (5, 5)]),
        # If the block on the diagonal differs, the next equal block after it is taken, or else the first.
        ("abcd", "cdabxcd", 2, [(0, 2), (2, 5)]), ("abcd", "cdcdab", 2, [(0, 4), (2, 0)]),
        # A source block may be paired twice.
        ("abab", "abz", 2, [(0, 0), (2, 0)]),
        ("abc", "xyz", 2, []), ("ab", "abc", 3, []), ("abc", "ab", 3, []),
    ],
)  # fmt: skip
def test_choices(dst: str, src: str, block: int, expected: list[tuple[int, int]]) -> None:
    """Each letter of ``dst`` and ``src`` stands for a token."""
    found = align_blocks(step_of([*map(ord, dst)], 1000), step_of([*map(ord, src)]), block)
    assert [(i - 1000, j) for i, j in found] == expected


def test_covered_tokens_and_the_kth_blocks() -> None:
    # A block is left out if one of its tokens is covered, that is, already paired with another earlier step.
    step = step_of([7] * 12, start=16)
    found = align_blocks(step, step_of([7] * 12), 4, covered=b"\0\1" + bytes(10))
    assert found == [BlockPair(18, 2), BlockPair(22, 6)]
    # Mode "index" pairs the k-th blocks of ``dst`` and ``src``, whatever their tokens.
    src = step_of(list(range(7)), start=5)
    dst = step_of(list(range(90, 100)), start=30)
    for covered, expected in ((b"", [(30, 5), (33, 8)]), (b"\0\1" + bytes(8), [(33, 8)])):
        assert align_blocks(dst, src, 3, mode="index", covered=covered) == expected


def test_many_uniform_tokens_stay_linear() -> None:
    """Every block equals every other: the worst case for looking up occurrences."""
    step = step_of([7] * 20_000)
    later = step_of([7] * 20_000, start=20_000)
    assert len(align_blocks(later, step, 16)) == 20_000 // 16


@pytest.mark.parametrize("name", PRESETS)
def test_explicit_values_win_over_a_preset(name: str) -> None:
    """A preset sets its values in ``PRESETS``. Percentile 100 accepts even the first finite KV distance."""
    resolved = ReasonCacheConfig.from_mapping({"preset": name}).to_dict()
    assert resolved["preset"] == name and PRESETS[name].items() <= resolved.items()
    assert not re.fullmatch(r"p\d+", name) or resolved["percentile"] == int(name[1:])
    given = {"percentile": 33.0, "warmup": 7}
    explicit = ReasonCacheConfig.from_mapping({"preset": name, **given}).to_dict()
    assert given.items() <= explicit.items()
    knobs = filter_knobs(name)
    config = FilterConfig(**knobs)
    assert {field: getattr(config, field) for field in knobs} == knobs
    fields = {field.name for field in dataclasses.fields(FilterConfig)}
    assert set(PRESETS[name]) - fields == set(PRESETS[name]) - set(knobs)
    threshold = AdaptiveThreshold(resolved["percentile"], resolved["warmup"])
    decided = threshold.decide([5.0, float("nan")]).tolist()
    assert decided == [PRESETS[name].get("percentile", 100.0) == 100.0, False]


def slow_cosine(a: Step, b: Step) -> float:
    counts_a = Counter(a.token_ids)
    counts_b = Counter(b.token_ids)
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
    """Similarities stay correct when a bounded history has dropped many of its oldest steps."""
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
    """``bag`` counts the token ids of a step without the blank line at the step's end, as in the papers."""
    step = Step.build(0, [4, 4, 7, 8], "ab\n\n\n", num_blank_tail=2)
    assert (step.bag, step.num_chars, len(step)) == ({4: 2}, 2, 4)
    for num_blank_tail in (-1, 2, 3):
        with pytest.raises(ValueError, match="num_blank_tail"):
            Step.build(0, [1, 2], "", num_blank_tail)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=200), st.randoms(use_true_random=False))
def test_the_threshold_is_the_formula_in_any_order(sims: list[float], rng: random.Random) -> None:
    """The order of the similarities does not change any bit of the threshold, so all ranks agree on it."""
    tau = dynamic_threshold(np.array(sims), 0.9, 0.7)
    shuffled = rng.sample(sims, len(sims))
    assert dynamic_threshold(np.array(shuffled), 0.9, 0.7) == tau
    # Both round() and the filter's rint round half to even.
    total = sum(round(sim * 2**40) for sim in sims)
    assert tau == 0.9 - (0.9 - 0.7) * (total / (max(1, len(sims)) * 2.0**40))
    assert tau == pytest.approx(0.9 - 0.2 * math.fsum(sims) / max(1, len(sims)), abs=1e-12)


def test_the_largest_history_of_nearly_equal_steps_is_compared_with_few_calls() -> None:
    """Each of 2,048 steps has 1,023 of the query's 1,024 tokens, so a query reads two million index entries."""
    index = LexicalIndex(2048)
    tokens = np.arange(1024)
    for i in range(2048):
        index.add(step_of([*tokens[:-1].tolist(), 2000 + i]))
    query = step_of(tokens.tolist())
    assert index.similarities(query).tolist() == pytest.approx([1023 / 1024] * 2048)
    # NumPy reads the entries: about 2,500 calls are made, which take some 15 ms on a current machine.
    assert count_calls(lambda: dynamic_threshold(index.similarities(query), 0.9, 0.7)) < 5000
    # The mean of a full history does not overflow.
    assert dynamic_threshold(np.ones(1 << 20), 0.9, 0.7) == 0.9 - (0.9 - 0.7)

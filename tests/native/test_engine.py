# SPDX-License-Identifier: Apache-2.0
"""The native filter against its Python twin: same steps, pairs and counters, on any tokens."""

from __future__ import annotations

import ctypes
import gc
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.span import ReasoningSpan
from sglang_reasoncache.filter.structure import Limits
from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.native.engine import NativeEngine, supports
from tests.filter.made_tokenizers import gpt2, traces

START, END = 0, 1
#: Few tokens, so that random steps are similar; newlines in every spelling.
PIECES = [
    *("<think>", "</think>", "\n\n", "\n", ".\n\n", ".\n", " \n", "\n\n\n", "\t", "", "\r\n"),
    *("So ", "x", " = ", "1", "2", " + ", "2x", "\\frac{1}{2}", " the", " sum", " is", ".", "$"),
    *("```", "```\n", "`", "(", ")", "{", "}", "^", "_", "n\nm", "a\n\nb", "\n\nc", " \n\nWait"),
]
VOCABULARY = Vocabulary(
    [*(piece.encode() for piece in PIECES), b"\xe2\x89", b"\xa4", b"\xff", "é".encode()]
)
CLASSES = TokenClasses(VOCABULARY)
TOKENS = st.lists(
    st.one_of(
        st.integers(-2, VOCABULARY.size + 1),
        # Blank lines often enough for many steps.
        st.sampled_from([2, 2, 4, 4, 14, 15, 17, 13]),
    ),
    max_size=400,
)
CONFIGS = st.builds(
    FilterConfig,
    strict=st.sampled_from([0.9, 0.7]),
    soft=st.sampled_from([0.7, 0.2, 0.0]),
    fixed_tau=st.sampled_from([None, None, 0.0, 0.3, 0.8, 1.0]),
    length_factor=st.booleans(),
    use_structure=st.booleans(),
    max_structure_checks=st.sampled_from([64, 3, 1]),
    block=st.sampled_from([1, 2, 3, 8]),
    page_size=st.just(1),
    align=st.sampled_from(["tokens", "index"]),
    max_step_tokens=st.sampled_from([1024, 30, 7]),
    max_history_steps=st.sampled_from([2048, 9, 2, 1]),
    max_candidates=st.sampled_from([4, 1]),
    max_blocks_per_step=st.sampled_from([256, 2]),
    limits=st.sampled_from([Limits(), Limits(max_chars=40), Limits(max_depth=2, max_nodes=9)]),
)


def run_native(
    engine: NativeEngine, tokens: Sequence[int], start: int, inside: bool
) -> list[StepResult]:
    """All steps of one response, fed in pieces of growing size."""
    request = engine.open(start, inside)
    ids = array("q", [request])
    at, size = 0, 1
    while at < len(tokens):
        piece = array("q", tokens[at : at + size])
        engine.feed(ids, array("q", [len(piece)]), piece)
        at, size = at + size, size + 1
    engine.close(request)
    engine.wait()
    return engine.take(1 << 20)


def assert_same(
    library: ctypes.CDLL,
    config: FilterConfig,
    spelling: tuple[TokenClasses, Vocabulary],
    tokens: Sequence[int],
    markers: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
    start: int = 5,
    inside: bool = True,
) -> int:
    """Compare both filters; returns the number of steps."""
    classes, vocabulary = spelling
    span = ReasoningSpan(*markers, inside) if markers[1] else None
    twin = RequestFilter(config, classes, vocabulary, start, span)
    wanted = twin.push(tokens)
    engine = NativeEngine(
        library, config, classes, vocabulary, sorted(markers[0]), sorted(markers[1]), 1 << 20
    )
    try:
        found = run_native(engine, tokens, start, inside)
    finally:
        engine.shut_down()
    assert [(r.start, r.end) for r in found] == [(p.step.start, p.step.end) for p in wanted]
    for result, proposal in zip(found, wanted, strict=True):
        assert result.pairs == proposal.pairs
        assert result.counters == proposal.counters
    return len(found)


@settings(max_examples=250, deadline=None)
@given(CONFIGS, TOKENS, st.booleans(), st.booleans())
def test_agrees_with_the_python_filter(
    library: ctypes.CDLL, config: FilterConfig, tokens: list[int], marked: bool, inside: bool
) -> None:
    markers = (frozenset({START}), frozenset({END})) if marked else (frozenset(), frozenset())
    assert_same(
        library, config, (CLASSES, VOCABULARY), tokens, markers, inside=inside or not marked
    )


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.sampled_from([2, 4, 16]), st.integers(0, 40))
def test_agrees_on_pages(library: ctypes.CDLL, tokens: list[int], page: int, start: int) -> None:
    for align in ("tokens", "index"):
        config = FilterConfig(block=page, page_size=page, align=align, soft=0.0)  # type: ignore[arg-type]
        assert_same(library, config, (CLASSES, VOCABULARY), tokens, start=start)


def test_agrees_on_real_responses(library: ctypes.CDLL) -> None:
    """Identical candidates, thresholds and decisions over thousands of steps."""
    if not traces():
        pytest.skip("no traces: set REASONCACHE_TRACES to a folder of JSONL files")
    texts = sorted(traces(), key=len)[:: len(traces()) // 40]
    tokenizer = gpt2()
    vocabulary = vocabulary_of(tokenizer)
    spelling = (TokenClasses(vocabulary), vocabulary)
    steps = sum(
        assert_same(library, FilterConfig(block=block), spelling, tokenizer.encode(text))
        for block in (8, 16)
        for text in texts
    )
    assert steps > 2000


def repeating(steps: int) -> array[int]:
    """The same step again and again: 'So x = 1 + 2 .\\n\\n'."""
    return array("q", [11, 12, 13, 14, 16, 15, 4] * steps)


CONFIG = FilterConfig(block=2)


def engine_of(library: ctypes.CDLL, max_pending: int = 1 << 20) -> NativeEngine:
    return NativeEngine(library, CONFIG, CLASSES, VOCABULARY, max_pending=max_pending)


def test_sheds_by_count_and_says_so(library: ctypes.CDLL) -> None:
    """What is shed depends on what was fed and taken, not on how fast the thread is."""
    for _ in range(5):
        engine = engine_of(library, max_pending=10)
        ids, tokens = array("q", [engine.open(0, True)]), repeating(100)
        engine.feed(ids, array("q", [len(tokens)]), tokens)
        assert (engine.outstanding, engine.steps_shed) == (10, 90)
        engine.wait()
        assert engine.ready() == 10
        assert len(engine.take(4)) == 4
        engine.feed(ids, array("q", [len(tokens)]), tokens)
        assert (engine.outstanding, engine.steps_shed) == (10, 186)
        engine.wait()
        taken = engine.take(100)
        assert len(taken) == 10
        # Steps that were shed are no candidates: the thread never saw them.
        assert taken[-1].counters.candidates == 13
        engine.shut_down()


def test_takes_no_more_pairs_than_wanted(library: ctypes.CDLL) -> None:
    """Up to the step with which there are enough; more than the buffers hold come in several goes."""
    engine = engine_of(library)
    tokens = repeating(600)
    engine.feed(array("q", [engine.open(0, True)]), array("q", [len(tokens)]), tokens)
    engine.wait()
    assert [len(result.pairs) for result in engine.take(100, max_pairs=4)] == [0, 3, 3]
    assert sum(len(result.pairs) for result in engine.take(1000)) == 3 * 597
    engine.shut_down()


def test_fence_is_followed_through_shed_steps(library: ctypes.CDLL) -> None:
    """A fence in a step that nobody looked at still opens and closes code."""
    fence, text = PIECES.index("```"), [11, 12]
    code = [*text, 13, 14, 16, 15, 4]
    results = []
    for shed in (False, True):
        engine = engine_of(library, max_pending=1)
        ids = array("q", [engine.open(0, True)])
        for tokens in (code, [fence, *text, 2], code, [fence, *text, 2], code):
            if fence not in tokens or not shed:
                engine.wait()
                engine.take(9)
            piece = array("q", tokens)
            engine.feed(ids, array("q", [len(piece)]), piece)
        engine.wait()
        # The last step is prose mathematics again, like the first.
        results.append(engine.take(9)[-1])
        engine.shut_down()
    assert results[0].pairs and results[0].pairs[0].src_start == 0
    assert [pair.src_start for pair in results[1].pairs] == [
        pair.src_start for pair in results[0].pairs
    ]


def test_closed_and_unknown_requests(library: ctypes.CDLL) -> None:
    engine = engine_of(library)
    request = engine.open(0, True)
    tokens = repeating(3)
    ids, counts = array("q", [request]), array("q", [len(tokens)])
    engine.feed(ids, counts, tokens)
    engine.close(request)
    engine.close(request)
    engine.feed(ids, counts, tokens)
    engine.feed(array("q", [12345]), counts, tokens)
    engine.feed(array("q"), array("q"), array("q"))
    engine.wait()
    assert len(engine.take(100)) == 3, "steps handed over before the close still come"
    assert engine.outstanding == 0
    engine.shut_down()


def test_many_requests_come_back_in_order(library: ctypes.CDLL) -> None:
    engine = engine_of(library)
    requests = [engine.open(i, True) for i in range(50)]
    for _ in range(20):
        tokens = repeating(1)
        engine.feed(
            array("q", requests),
            array("q", [len(tokens)] * len(requests)),
            array("q", list(tokens) * len(requests)),
        )
    engine.wait()
    found = engine.take(1 << 20)
    assert [result.request for result in found] == requests * 20
    for request in requests:
        starts = [r.start for r in found if r.request == request]
        assert starts == [request + 7 * i for i in range(20)]
    engine.shut_down()


def test_the_thread_works_without_the_interpreter(library: ctypes.CDLL) -> None:
    """A result arrives while this thread holds the interpreter's lock all the time."""
    engine = engine_of(library)
    tokens = repeating(2000)
    engine.feed(array("q", [engine.open(0, True)]), array("q", [len(tokens)]), tokens)
    others = threading.active_count()
    # `ready` itself gives the lock away for a moment; nobody else wants it.
    while engine.ready() < 2000:
        pass
    assert threading.active_count() == others, "the filter's thread is none of Python's"
    engine.shut_down()


def test_destroying_with_work_left(library: ctypes.CDLL) -> None:
    for _ in range(20):
        engine = engine_of(library)
        tokens = repeating(500)
        engine.feed(array("q", [engine.open(0, True)]), array("q", [len(tokens)]), tokens)
        del engine
        gc.collect()


def test_ablations_are_left_to_the_python_filter() -> None:
    assert supports(CONFIG)
    assert not supports(replace(CONFIG, random_ratio=0.5))
    assert not supports(replace(CONFIG, structure_tolerance=1))
    assert not supports(replace(CONFIG, encoder="embedding"))

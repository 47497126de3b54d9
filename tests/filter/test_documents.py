# SPDX-License-Identifier: Apache-2.0
"""Tests how unmarked documents are found in prompts."""

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_reasoncache.filter import documents
from sglang_reasoncache.filter.documents import LEAST, MOST_PROMPT, DocumentFinder

DRAW = random.Random(7)
TENANT = b"tenant"
#: Tokens of a long prompt.
LONG = 60_000
Spans = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _drawn_alike(request: pytest.FixtureRequest) -> None:
    """A test draws the same texts, whichever tests ran before it: now and then two texts' ends are equal."""
    DRAW.seed(request.node.name)


def _text(length: int) -> list[int]:
    return [DRAW.randrange(100, 50_000) for _ in range(length)]


SYSTEM = _text(20)
DOCUMENTS = [_text(length) for length in (64, 90, 150, 400, 70, 1000)]


def _prompt(*documents: Sequence[int]) -> list[int]:
    return [*SYSTEM, *itertools.chain(*documents), *_text(12)]


def _spans(*documents: Sequence[int]) -> Spans:
    ends = itertools.accumulate(map(len, documents), initial=len(SYSTEM))
    return list(itertools.pairwise(ends))


def _learn(finder: DocumentFinder, documents: Sequence[list[int]], tenant: bytes = TENANT) -> None:
    """Show each document twice, behind different text."""
    for at in range(len(documents)):
        for shift in (1, 2):
            finder.find(tenant, _prompt(documents[at - shift], documents[at]))


def test_documents_are_found_in_every_order() -> None:
    finder = DocumentFinder(64)
    _learn(finder, DOCUMENTS)
    known = len(finder)
    for order in itertools.islice(itertools.permutations(DOCUMENTS), 0, 720, 17):
        assert finder.find(TENANT, _prompt(*order)) == _spans(*order)
    # Nothing new was entered: questions are shorter than a document.
    assert len(finder) == known


def test_a_text_is_found_at_its_second_sight_behind_other_text() -> None:
    finder, (one, two, three) = DocumentFinder(64), DOCUMENTS[:3]
    assert finder.find(TENANT, _prompt(one, two)) == []
    assert finder.find(TENANT, _prompt(three, _text(80))) == []
    # All three stood elsewhere before, but only the first of them stood behind the base.
    assert finder.find(TENANT, _prompt(two, one)) == _spans(two, one)
    assert finder.find(TENANT, _prompt(three, two)) == _spans(three, two)


def test_a_prompt_that_goes_on_moves_nothing() -> None:
    """The next turn of a chat, a new question to the same text, and the same prompt are ordinary prefixes."""
    finder = DocumentFinder(64)
    turns = [_text(80) for _ in range(12)]
    finder.find(TENANT, _prompt(_text(80)))
    for last in range(1, len(turns)):
        assert finder.find(TENANT, [*SYSTEM, *itertools.chain(*turns[:last])]) == []
    for _ in range(3):
        assert finder.find(TENANT, _prompt(*turns)) == []
        assert finder.find(TENANT, [*SYSTEM, *itertools.chain(*turns)]) == []


def test_a_conversation_about_documents_is_no_document() -> None:
    """It is computed behind the documents that it is about, in each turn."""
    finder, (one, two, three, *_) = DocumentFinder(64), DOCUMENTS
    _learn(finder, DOCUMENTS[:3])
    turns = [_text(90) for _ in range(6)]
    for last in range(1, len(turns)):
        prompt = _prompt(three, one, two, *turns[:last])
        assert finder.find(TENANT, prompt) == _spans(three, one, two)


def test_what_is_in_place_is_the_first_document() -> None:
    """Text that all prompts had behind the base stays there; what follows it may move."""
    finder = DocumentFinder(64)
    fixed = _text(100)
    finder.find(TENANT, _prompt(_text(90)))
    _learn(finder, DOCUMENTS[:3])
    finder.find(TENANT, _prompt(fixed, _text(90)))
    expected = _spans(fixed, DOCUMENTS[1], DOCUMENTS[0])
    assert finder.find(TENANT, _prompt(fixed, DOCUMENTS[1], DOCUMENTS[0])) == expected


def test_short_gaps_are_documents_and_long_ones_end_the_run() -> None:
    finder, (one, two, three, *_) = DocumentFinder(64), DOCUMENTS
    _learn(finder, DOCUMENTS[:3])
    gap = _text(5)
    assert finder.find(TENANT, _prompt(one, gap, two)) == _spans(one, gap, two)
    assert finder.find(TENANT, _prompt(one, two, _text(60), three)) == _spans(one, two)
    assert finder.find(TENANT, _prompt(_text(60), one, two)) == []


def test_the_last_token_is_left_out() -> None:
    finder, (one, two, *_) = DocumentFinder(64), DOCUMENTS
    _learn(finder, DOCUMENTS[:3])
    [first, (start, end)] = _spans(one, two)
    assert finder.find(TENANT, [*SYSTEM, *one, *two]) == [first, (start, end - 1)]


def test_ends_that_a_tokenizer_changed() -> None:
    """What was found of a document is what is found of it from then on, between short gaps."""
    finder, (one, two, three, *_) = DocumentFinder(64), DOCUMENTS[1:]
    _learn(finder, DOCUMENTS[1:4])
    changed = [*_text(2), *two[2:-3], *_text(3)]
    edges = changed[:2], two[2:-3], changed[-3:]
    assert finder.find(TENANT, _prompt(one, changed, three)) == _spans(one, *edges, three)
    expected = _spans(one, two[:2], two[2:-3], two[-3:], three)
    assert finder.find(TENANT, _prompt(one, two, three)) == expected
    # The half of a document is another document.
    halved = one, two[:75], three
    assert finder.find(TENANT, _prompt(*halved)) == _spans(*halved)
    assert finder.find(TENANT, _prompt(one, two, three)) == expected


def test_tenants_find_nothing_of_each_other() -> None:
    finder = DocumentFinder(64)
    _learn(finder, DOCUMENTS)
    assert finder.find(b"other", _prompt(*DOCUMENTS)) == []
    assert finder.find(TENANT, _prompt(*DOCUMENTS)) == _spans(*DOCUMENTS)


def test_windows_of_equal_hash_are_told_apart_by_their_tokens() -> None:
    finder = DocumentFinder(64)
    # All windows, and all prefixes, have one hash.
    finder._factors = [factor * 0 for factor in finder._factors]
    _learn(finder, DOCUMENTS[:3])
    for _ in range(3):
        order = [_text(100), _text(100)]
        for start, end in finder.find(TENANT, _prompt(*order)):
            assert end - start < 0, "unseen text was found"


def test_an_equal_run_of_the_least_length_has_a_window_in_common() -> None:
    for _ in range(300):
        finder = DocumentFinder(LEAST)
        shared = _text(LEAST)
        finder.find(TENANT, _prompt(_text(50), shared))
        found = finder.find(TENANT, _prompt(_text(9), shared, shared))
        assert (len(SYSTEM) + 9, len(SYSTEM) + 9 + LEAST) in found


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    finder = DocumentFinder(64, most=5000)
    _learn(finder, DOCUMENTS[:3])
    for _ in range(100):
        finder.find(TENANT, _prompt(_text(1000)))
        assert len(finder) <= 5000
        assert finder.find(TENANT, _prompt(*DOCUMENTS[2::-1])) == _spans(*DOCUMENTS[2::-1])
    assert sum(map(len, finder._index.values())) <= len(finder)
    for _ in range(10):
        finder.find(TENANT, _prompt(_text(1000)))
    assert finder.find(TENANT, _prompt(*DOCUMENTS[:3])) == []
    finder.find(TENANT, _prompt(_text(6000)))
    assert len(finder) == 0 and not finder._index


@pytest.mark.parametrize(
    "hostile",
    [
        lambda: [5] * LONG,
        lambda: [1, 2, 3] * (LONG // 3),
        lambda: _text(LONG),
        lambda: _text(100) * (LONG // 100),
        lambda: list(itertools.chain(*([at] * 65 + [0] for at in range(LONG // 66)))),
    ],
    ids=["one token", "period", "random", "a document again and again", "runs"],
)
def test_time_is_linear_for_hostile_prompts(hostile: object) -> None:
    assert callable(hostile) and LONG < MOST_PROMPT - 1000
    finder = DocumentFinder(64)
    text = hostile()
    finder.find(TENANT, _prompt(_text(80)))
    for number in range(6):
        start = time.process_time()
        spans = finder.find(TENANT, [*SYSTEM, *range(number), *text, *text[: 100 * number]])
        assert time.process_time() - start < 3
        assert all(end > begin for begin, end in spans)
        assert all(one[1] == two[0] for one, two in itertools.pairwise(spans))


def test_crafted_texts_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text becomes a document, then its overlapping parts do, in reverse order. A prompt that lacks the
    text's end has all parts, but not the text: without a bound it would be compared again behind each part."""
    compared = 0

    def counted(*args: Any) -> Any:
        nonlocal compared
        match = matched(*args)
        compared += match.length
        return match

    matched = documents._matched
    monkeypatch.setattr(documents, "_matched", counted)
    finder = DocumentFinder(64)
    text = _text(16_384)
    parts = [[*text[max(at - 15, 0) : at + 64], 5] for at in range(0, len(text) - 100, 64)]
    for prompt in (_prompt(_text(60), text), _prompt(_text(50), text), _prompt(*parts[::-1])):
        finder.find(TENANT, prompt)
    compared = 0
    prompt = _prompt(_text(40), text[:-100])
    finder.find(TENANT, prompt)
    # The last comparison may go over the bound.
    assert compared <= 9 * len(prompt)


def test_nothing_is_found_in_short_prompts() -> None:
    finder = DocumentFinder(64)
    for prompt in ([], [1], SYSTEM, [*SYSTEM, *_text(30)]):
        assert finder.find(TENANT, prompt) == []
    assert len(finder) == 0


def test_many_tenants_in_turn_find_their_documents() -> None:
    """Clients are told to use a salt each. How a tenant's prompts begin is remembered over others' turns."""
    draw = random.Random(5)
    finder = DocumentFinder(LEAST)
    tenants = [
        (
            f"tenant {number}".encode(),
            [[draw.randrange(1000) for _ in range(length)] for length in (12, 48, 48, 48)],
        )
        for number in range(300)
    ]
    counts = []
    for _ in range(4):
        found = 0
        for name, (base, *texts) in tenants:
            draw.shuffle(texts)
            prompt = [*base, *(token for text in texts for token in text), draw.randrange(1000)]
            found += bool(finder.find(name, prompt))
        counts.append(found)
    assert counts[0] == 0 and counts[-1] > 250
    assert finder._in_bases == sum(map(len, finder._bases.values()))

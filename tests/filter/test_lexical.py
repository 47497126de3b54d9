# SPDX-License-Identifier: Apache-2.0
"""Similarities, the dynamic threshold and dense step encoders, against their formulas and bad input."""

import importlib.util
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.encoder import (
    SENTENCE_MODEL,
    DenseIndex,
    EmbeddingEncoder,
    EncoderChoice,
    SentenceEncoder,
    StepEncoder,
    Vector,
    unit,
)
from sglang_reasoncache.filter.lexical import LexicalIndex, dynamic_threshold
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.plugin.step_filter import make_encoder
from tests.filter.words import Words, step_of, with_length_factor


def slow_cosine(a: Step, b: Step) -> float:
    counts_a, counts_b = Counter(a.token_ids), Counter(b.token_ids)
    dot = sum(counts_a[token] * counts_b[token] for token in {*counts_a, *counts_b})
    norm_a = math.sqrt(sum(count**2 for count in counts_a.values()))
    norm_b = math.sqrt(sum(count**2 for count in counts_b.values()))
    return dot / (norm_a * norm_b)


def slow_dense_cosine(a: Step, b: Step) -> float:
    vectors = (slow_vector(step.token_ids) for step in (a, b))
    return sum(x * y for x, y in zip(*vectors, strict=True))


_STEPS = st.lists(
    st.tuples(st.lists(st.integers(-3, 20), min_size=1, max_size=20), st.integers(1, 200)),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize("is_dense", [False, True])
@settings(deadline=None)
@given(_STEPS, st.booleans(), st.integers(1, 40))
def test_similarities_equal_the_formula(
    is_dense: bool, drawn: list[tuple[list[int], int]], length_factor: bool, max_steps: int
) -> None:
    """Over a bounded history too, whose oldest step has made room many times."""
    index, cosine = LexicalIndex(max_steps, length_factor), slow_cosine
    if is_dense:
        index = DenseIndex(EmbeddingEncoder(MATRIX), max_steps, length_factor)
        cosine = slow_dense_cosine
    history: list[Step] = []
    for token_ids, num_chars in drawn:
        step = step_of(token_ids, text="x" * num_chars)
        kept = history[-max_steps:]
        sims = index.similarities(step)
        expected = [cosine(step, earlier) for earlier in kept]
        if length_factor:
            pairs = zip(expected, kept, strict=True)
            expected = [with_length_factor(*each, step) for each in pairs]
        assert (len(index), sims.shape, sims.dtype) == (len(kept), (len(kept),), float)
        assert sims == pytest.approx(expected, abs=2e-6 if is_dense else 1e-12)
        assert all(-1.0 <= sim <= 1.0 for sim in sims)
        assert all(index[i] is earlier for i, earlier in enumerate(kept))
        index.add(step)
        history.append(step)


@pytest.mark.parametrize(
    ("earlier", "step", "length_factor", "expected"),
    [
        ([5, 3, 3, 9, 9, 9], [9, 3, 9, 5, 3, 9], True, 1.0),
        ([1, 2], [3], True, 0.0),
        # (1,1,2) against (1,2,2), not above 0.8 by its last bit.
        ([1, 1, 2], [1, 2, 2], False, 0.8),
    ],
)
def test_by_hand_and_exactly(
    earlier: list[int], step: list[int], length_factor: bool, expected: float
) -> None:
    index = LexicalIndex(10, length_factor)
    index.add(step_of(earlier))
    assert index.similarities(step_of(step)).tolist() == [expected]


def test_blank_tail_is_neither_in_the_bag_nor_encoded() -> None:
    """The papers' step is the text between two blank lines, without them."""
    step, spy = Step.build(0, [4, 4, 7, 8], "ab\n\n\n", num_blank_tail=2), Spy()
    assert (step.bag, step.num_chars, len(step)) == ({4: 2}, 2, 4)
    index = DenseIndex(spy, 10)
    index.similarities(step)
    index.add(step)
    # Once, although two calls needed it.
    assert [ids for ids, _ in spy.seen] == [(4, 4)]
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


MATRIX = np.random.default_rng(0).normal(size=(13, 5)).astype(np.float32)


def slow_vector(token_ids: Sequence[int]) -> list[float]:
    rows = [MATRIX[token].tolist() for token in token_ids if 0 <= token < len(MATRIX)]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else []
    norm = math.sqrt(sum(value * value for value in mean))
    return [value / norm for value in mean] if norm else [0.0] * MATRIX.shape[1]


@given(st.lists(st.integers(-5, 30) | st.sampled_from([2**70, -(2**70)]), max_size=3000))
def test_embedding_is_the_normalised_mean_of_known_rows(token_ids: list[int]) -> None:
    vector = EmbeddingEncoder(MATRIX)(token_ids, "")
    assert (vector.shape, vector.dtype) == ((5,), np.float32)
    assert vector == pytest.approx(slow_vector(token_ids), abs=1e-5)


def test_copies_are_one_wherever_their_row_is_and_opposites_count_as_they_are() -> None:
    """The most recent of several copies is found first, not the luckiest rounding."""
    matrix = np.random.default_rng(1).normal(size=(50, 333)).astype(np.float32)
    index = DenseIndex(EmbeddingEncoder(matrix), 100)
    tokens = list(range(3, 40))
    for _ in range(37):
        index.add(step_of(tokens))
    assert set(index.similarities(step_of(tokens)).tolist()) == {1.0}
    # Nothing is clipped: -1 alone raises the threshold, the mean of 1 and -1 is 0.
    index = DenseIndex(EmbeddingEncoder(np.array([[1, 1], [-1, -1]], dtype=np.float32)), 10)
    for earlier, threshold in ((1, 1.1), (0, 0.9)):
        index.add(step_of([earlier]))
        sims = index.similarities(step_of([0]))
        assert sims[0] == -1.0
        assert dynamic_threshold(sims, 0.9, 0.7) == pytest.approx(threshold)


class Spy:
    """Gives the same vector to all steps and notes what it is asked."""

    def __init__(self, vector: Sequence[float] = (1.0,)) -> None:
        self._vector = np.array(vector, dtype=np.float32)
        self.seen: list[tuple[Sequence[int], str]] = []

    def __call__(self, step_token_ids: Sequence[int], text: str) -> Vector:
        self.seen.append((step_token_ids, text))
        return self._vector


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_similar_to_nothing(bad: float) -> None:
    """A row of the matrix, or what an encoder that breaks its promise gives."""
    matrix = MATRIX.copy()
    matrix[3, 2] = bad
    index = DenseIndex(EmbeddingEncoder(matrix), 10)
    spoilt, sound = step_of([1, 3, 5]), step_of([1, 5])
    index.add(spoilt)
    index.add(sound)
    assert index.similarities(spoilt).tolist() == [0.0, 0.0]
    assert index.similarities(sound).tolist() == [0.0, 1.0]
    index = DenseIndex(Spy([bad] * 4), 10)
    index.add(spoilt)
    assert index.similarities(spoilt).tolist() == [0.0]


@pytest.mark.parametrize("scale", [1e-38, 1e-44, 1e38])
def test_unit_at_the_ends_of_the_range(scale: float) -> None:
    vector = np.array([1, 1], dtype=np.float32) * np.float32(scale)
    assert unit(vector) == pytest.approx([math.sqrt(0.5)] * 2)


def make_with(words: Words, encoder: StepEncoder | None, **knobs: Any) -> RequestFilter:
    config = FilterConfig(block=2, encoder="embedding", **knobs)
    return RequestFilter(config, words.classes, words.vocabulary, 0, encoder=encoder)


def test_synonyms_are_candidates_only_where_their_embeddings_are_close() -> None:
    """A bag of tokens shares two of four tokens there, which is below any threshold."""
    words = Words()
    matrix = np.random.default_rng(3).normal(size=(len(words.vocabulary.pieces), 32))
    ids = words.encode("look need next line")
    matrix[ids[2:]] = matrix[ids[:2]]
    tokens = words.encode("that look all need \n\n that next all line \n\n")
    request = make_with(words, EmbeddingEncoder(matrix.astype(np.float32)), align="index")
    assert [pair[:2] for pair in request.push(tokens)[-1].pairs] == [(5, 0), (7, 2)]
    plain = RequestFilter(FilterConfig(block=2, align="index"), words.classes, words.vocabulary, 0)
    assert plain.push(tokens)[-1].counters.candidates == 0


def test_the_text_is_there_when_it_is_encoded_and_gone_afterwards() -> None:
    words = Words()
    for use_structure in (True, False):
        spy = Spy()
        request = make_with(words, spy, use_structure=use_structure)
        request.push(words.encode("one two \n\n"))
        step = request.push(words.encode("two now \n\n"))[-1].step
        assert [text.strip() for _, text in spy.seen] == ["one two", "two now"]
        assert step.text == ""


@pytest.mark.parametrize(
    ("text", "kind", "model"),
    [
        ("tokens", "tokens", ""), ("embedding", "embedding", ""),
        ("sentence-bert", "sentence-bert", SENTENCE_MODEL),
        ("sentence-bert:/a/folder", "sentence-bert", "/a/folder"),
        ("sentence-bert:C:/folder", "sentence-bert", "C:/folder"),
    ],
)  # fmt: skip
def test_choices(text: str, kind: str, model: str) -> None:
    assert EncoderChoice.parse(text) == (kind, model)


@pytest.mark.parametrize(
    "text",
    ["", "bert", "tokens:x", "tokens:", "sentence-bert:", "sentence-bert: ", "Tokens", 5, None],
)
def test_other_choices_are_refused(text: object) -> None:
    with pytest.raises(
        ValueError, match="--reasoncache-set encoder must be one of tokens, "
    ) as caught:
        EncoderChoice.parse(text)
    assert str(caught.value).endswith(f"got {text!r}")


def _make(encoder: str, model: object = None, tp_size: int = 1, **fields: Any) -> Any:
    config = ReasonCacheConfig(match="steps", encoder=encoder, **fields)
    return make_encoder(config, model, SimpleNamespace(tp_size=tp_size))


def test_who_needs_no_encoder_and_who_is_refused_one() -> None:
    with pytest.raises(ValueError, match="--reasoncache-set encoder=embedding was not built"):
        make_with(Words(), None)
    # Random sharing compares nothing.
    make_with(Words(), None, random_ratio=0.5)
    assert _make("tokens", tp_size=8) is None
    assert _make("embedding", random_ratio=0.3) is None
    for kind in ("embedding", "sentence-bert"):
        with pytest.raises(ValueError, match=f"encoder={kind} must run .* got --tp-size 2"):
            _make(kind, tp_size=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_models_embedding_is_copied(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Embedding.from_pretrained(torch.randn(6, 4).to(getattr(torch, dtype)))
    expected = layer.weight[2].float() / layer.weight[2].float().norm()
    encoder = _make("embedding", SimpleNamespace(get_input_embeddings=lambda: layer))
    layer.weight.zero_()
    found = EmbeddingEncoder(encoder.matrix)([2, 2], "")
    assert found == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SimpleNamespace(), r"needs a model with get_input_embeddings\(\), got SimpleNamespace"),
        # It wants token ids.
        (SimpleNamespace(get_input_embeddings=len), "needs a model with get_input_embed"),
        (SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=b"packed")),
         "needs an unquantised embedding layer, got bytes"),
    ],
)  # fmt: skip
def test_a_model_without_a_plain_embedding_is_refused(model: object, message: str) -> None:
    with pytest.raises(ValueError, match="--reasoncache-set encoder=embedding " + message):
        _make("embedding", model)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = (
        "--reasoncache-set encoder=sentence-bert needs the package sentence-transformers; "
        r'pip install "sglang-reasoncache\[sentence-bert\]"'
    )
    for refused in (SentenceEncoder, lambda *_: _make("sentence-bert")):
        with pytest.raises(ValueError, match=message):
            refused(SENTENCE_MODEL, 8192)


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT of random weights, some thousand, and mean pooling."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("the package sentence-transformers is not installed (extra: sentence-bert)")
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sentence")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "dog", "."]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(pieces), hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    made = tmp_path_factory.mktemp("made")
    SentenceTransformer(str(folder), device="cpu").save(str(made))
    return made


def test_a_real_sentence_model(sentence_model: Path) -> None:
    assert _make(f"sentence-bert:{sentence_model}") == (str(sentence_model), None)
    encoder = SentenceEncoder(str(sentence_model), 8192)
    vector = encoder([], "the cat sat .")
    assert (vector.shape, vector.dtype) == ((8,), np.float32)
    assert float(vector @ vector) == pytest.approx(1.0)
    assert encoder([], " the cat sat .\n\n").tolist() == vector.tolist()
    assert float(encoder([], "dog dog dog") @ vector) < 0.999
    words = Words()
    (_, again) = make_with(words, encoder).push(words.encode("one two now here \n\n " * 2))
    assert len(again.pairs) == 2


def test_no_text_and_too_much_text_are_similar_to_nothing(sentence_model: Path) -> None:
    encoder = SentenceEncoder(str(sentence_model), max_chars=20)
    for text in ("", " \n\n", "the cat " * 3):
        assert encoder([], text).tolist() == [0.0] * 8
    assert encoder([], "the cat the cat sat.").any()
    # Beyond the model's own bound of 32 pieces and made of unknown ones.
    assert SentenceEncoder(str(sentence_model), 8192)([], "\x00 zz \ufffd" * 500).any()


def test_a_sentence_model_that_is_not_there(
    sentence_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(sentence_model / "missing"), str(sentence_model / "vocab.txt")):
        with pytest.raises(
            ValueError, match="--reasoncache-set encoder=sentence-bert must name"
        ) as e:
            SentenceEncoder(name, 8192)
        assert repr(name) in str(e.value)

# SPDX-License-Identifier: Apache-2.0
"""Stage 1 on recorded responses, fed like live token streams, several at a time.

Times are CPU seconds of one thread, not wall clock: other work on the machine
disturbs them little, and they are what a server has to spend.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_reasoncache import native
from sglang_reasoncache.filter.engine import InlineEngine, StepEngine
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.span import ReasoningSpan
from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.native.engine import NativeEngine

_VOCABULARY_SIZE = 16_000
#: Earlier steps from which on the growth is fitted: below, fixed costs dominate.
_GROWTH_FROM = 50
_MEMORY_TOKENS = 20_000


@dataclass(frozen=True)
class Spelling:
    """A tokenizer, read once."""

    vocabulary: Vocabulary
    classes: TokenClasses


@dataclass(frozen=True)
class Replay:
    """What replaying all responses cost.

    Attributes:
        steps: finished steps.
        tokens: tokens fed.
        pairs: block pairs proposed.
        step_seconds: CPU time of each step, [steps].
        history: earlier steps of its response, [steps].
        feed_seconds: CPU time of the feeding thread, all tokens.
        feeds: calls that fed tokens, each of all streams.
    """

    steps: int
    tokens: int
    pairs: int
    step_seconds: np.ndarray
    history: np.ndarray
    feed_seconds: float
    feeds: int

    @property
    def median_ms(self) -> float:
        return float(np.median(self.step_seconds)) * 1e3

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.step_seconds, 99)) * 1e3

    @property
    def growth_exponent(self) -> float:
        """b of ``time = a * history ** b``, fitted to medians over doubling histories."""
        found = []
        low = _GROWTH_FROM
        while (inside := (self.history >= low) & (self.history < 2 * low)).sum() >= 100:
            found.append(
                (
                    np.log(np.median(self.history[inside])),
                    np.log(np.median(self.step_seconds[inside])),
                )
            )
            low *= 2
        if len(found) < 2:
            return math.nan
        x, y = zip(*found, strict=True)
        return float(np.polyfit(x, y, 1)[0])


def spelling_of(tokenizer: str | None, texts: Sequence[str]) -> tuple[Any, Spelling]:
    """A Hugging Face tokenizer and its reading; without a path, one trained on ``texts``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if tokenizer is not None:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    else:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=_VOCABULARY_SIZE,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        loaded = PreTrainedTokenizerFast(tokenizer_object=bpe)
    vocabulary = vocabulary_of(loaded)
    return loaded, Spelling(vocabulary, TokenClasses(vocabulary))


def make_engine(kind: str, config: FilterConfig, spelling: Spelling) -> StepEngine:
    """``native`` or ``python``. Nothing is shed: the replay feeds faster than any model."""
    if kind == "native":
        return NativeEngine(
            native.library(), config, spelling.classes, spelling.vocabulary, max_pending=1 << 30
        )

    def make_filter(start: int, inside: bool) -> RequestFilter:
        span = None if inside else ReasoningSpan(frozenset(), frozenset(), inside)
        return RequestFilter(config, spelling.classes, spelling.vocabulary, start, span)

    return InlineEngine(make_filter)


def replay(engine: StepEngine, streams: Sequence[Sequence[int]], at_once: int) -> Replay:
    """Feed responses token by token, ``at_once`` of them interleaved."""
    waiting: Iterator[Sequence[int]] = iter(streams)
    running: dict[int, Iterator[int]] = {}
    earlier: dict[int, int] = {}
    seconds: list[float] = []
    history: list[int] = []
    pairs = feeds = 0
    feed_seconds = 0.0

    def collect() -> int:
        found = engine.take(1 << 20, 1 << 30)
        for result in found:
            seconds.append(result.seconds)
            history.append(earlier[result.request])
            earlier[result.request] += 1
        return sum(len(result.pairs) for result in found)

    while True:
        for tokens in itertools.islice(waiting, at_once - len(running)):
            request = engine.open(0, True)
            running[request], earlier[request] = iter(tokens), 0
        if not running:
            break
        ids, counts, new = array("q"), array("q"), array("q")
        for request, stream in list(running.items()):
            token = next(stream, None)
            if token is None:
                del running[request]
                engine.close(request)
                continue
            ids.append(request)
            counts.append(1)
            new.append(token)
        start = time.thread_time()
        engine.feed(ids, counts, new)
        feed_seconds += time.thread_time() - start
        feeds += 1
        pairs += collect()
    while engine.outstanding:
        pairs += collect()
    return Replay(
        steps=len(seconds),
        tokens=sum(map(len, streams)),
        pairs=pairs,
        step_seconds=np.array(seconds),
        history=np.array(history),
        feed_seconds=feed_seconds,
        feeds=feeds,
    )


def segment_microseconds(
    config: FilterConfig, spelling: Spelling, streams: Sequence[Sequence[int]]
) -> float:
    """CPU time of the scheduler's thread for each token that the native engine takes.

    All tokens of a response at once, so that calling from Python does not count.
    """
    engine = make_engine("native", config, spelling)
    total = 0.0
    for tokens in streams:
        request = engine.open(0, True)
        arguments = array("q", [request]), array("q", [len(tokens)]), array("q", tokens)
        start = time.thread_time()
        engine.feed(*arguments)
        total += time.thread_time() - start
        engine.close(request)
    while engine.outstanding:
        engine.take(1 << 20, 1 << 30)
    return total / sum(map(len, streams)) * 1e6


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def peak_megabytes(
    config: FilterConfig, spelling: Spelling, streams: Sequence[Sequence[int]]
) -> float:
    """Peak of what the C library's heap holds for one request, per 20,000 tokens, in MB.

    Over the responses that are at least that long.

    Raises:
        ValueError: none is.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo

    def used() -> int:
        info = libc.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    worst = 0.0
    long = [tokens for tokens in streams if len(tokens) >= _MEMORY_TOKENS]
    if not long:
        raise ValueError(f"no response has {_MEMORY_TOKENS:,} tokens")
    for tokens in long:
        engine = make_engine("native", config, spelling)
        assert isinstance(engine, NativeEngine)
        chunks = [array("q", tokens[i : i + 500]) for i in range(0, _MEMORY_TOKENS, 500)]
        counts = [array("q", [len(chunk)]) for chunk in chunks]
        gc.collect()
        before = used()
        request = array("q", [engine.open(0, True)])
        for chunk, count in zip(chunks, counts, strict=True):
            engine.feed(request, count, chunk)
            engine.wait()
            engine.take(1 << 20, 1 << 30)
            worst = max(worst, (used() - before) / 1e6)
        engine.shut_down()
    return worst

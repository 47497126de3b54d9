# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.filter TRACES`` measures the CPU time that the filter takes: for recorded responses
with ``match=runs`` and ``match=steps``, and for hostile texts with ``match=runs``. Also, how much of
recorded responses may share, with their blank lines and without, by where steps are cut.

All times are CPU times of single threads, so other work on the machine hardly affects them."""

import itertools
import json
import random
import re
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from eval import command
from eval.command import option
from eval.jsonl import texts_of
from eval.replay.model import train_tokenizer
from eval.runs.config import describe_machine
from eval.runs.folder import write_json
from sglang_reasoncache.config import ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import LONGEST_OF_RUNS, LONGEST_STEP, FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of

_REQUESTS = 32
#: Decode steps between two polls (exchanges with the filter process), as in a server.
_INTERVAL = 4
_POLLS = 2000
#: Pause between two polls. The filter process works meanwhile, as it does during a server's decode steps.
_PAUSE_SECONDS = 0.004

#: Tokens of a hostile text.
_HOSTILE_TOKENS = 16_384
#: ``min_age`` of the rule that reads hostile texts: the default, and one at which many more blocks wait.
_AGES = (256, 4096)
_PERIODS = (1, 2, 3, 5, 7, 8, 9, 10, 12, 13, 15, 16, 17, 24, 31, 64, 100, 333, 1000, 3000)
#: Probabilities with which a token of a loop is exchanged.
_FLIPS = (0.0, 0.001, 0.01, 0.1)
_ALPHABETS = (1, 2, 3, 4, 8, 64)


def measure(step_filter: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measures the CPU time of the filter process for each finished reasoning step, and of the scheduler's
    thread for each decode step of 32 requests."""
    endless = [itertools.cycle(tokens) for tokens in streams]
    requests = array("q", [step_filter.open(0, True) for _ in range(_REQUESTS)])
    counts = array("q", [_INTERVAL] * _REQUESTS)
    polls: list[float] = []
    steps: list[float] = []
    for _ in range(_POLLS):
        tokens = array("q")
        for i in range(_REQUESTS):
            tokens.extend(itertools.islice(endless[i % len(endless)], _INTERVAL))
        start = time.thread_time()
        results = step_filter.take(min(step_filter.ready(), 256), 256) if polls else []
        step_filter.feed(requests, counts, tokens)
        polls.append((time.thread_time() - start) / _INTERVAL * 1e6)
        steps += [result.seconds * 1e3 for result in results]
        time.sleep(_PAUSE_SECONDS)
    figures = ["median", "mean", p99, "max"]
    return {
        "steps": len(steps),
        **pd.Series(steps).agg(figures).add_prefix("step_ms_"),
        **pd.Series(polls).agg(figures).add_prefix("scheduler_us_"),
        "steps_shed": step_filter.steps_shed,
        "process_mb": psutil.Process(step_filter.pid).memory_info().rss / 1e6,
    }


def p99(times: pd.Series) -> float:
    return float(times.quantile(0.99))


def hostile_texts() -> Iterator[tuple[str, list[int]]]:
    """Yields the name and tokens of texts that may make the filter work hard. Token 0 is a blank line."""
    rng = random.Random(0)
    places = range(_HOSTILE_TOKENS)
    for period, flips in itertools.product(_PERIODS, _FLIPS):
        text = [1 + at % period for at in places]
        for at in places:
            if rng.random() < flips:
                text[at] = rng.randrange(1 + period)
        yield f"period {period}, {flips:.1%} of the tokens exchanged", text
    for alphabet in _ALPHABETS:
        yield f"{alphabet} tokens at random", [1 + rng.randrange(alphabet) for _ in places]
    for length in (12, 20, 100):
        # Each passage follows a different token, so each begins a new match. Then all of it comes once more,
        # and is matched from its beginning, far behind the newest copy of the passage.
        half = [1 + length + at for at in range(30)]
        while len(half) < _HOSTILE_TOKENS // 2:
            half += [40 + length + len(half), *range(1, 1 + length)]
        yield f"passages of {length} tokens, then all of it again", half + half
    copies = [1 + rng.randrange(64) for _ in range(100)]
    while len(copies) < _HOSTILE_TOKENS:
        start = rng.randrange(len(copies))
        copies += copies[start : start + rng.randrange(1, 200)]
    yield "copies of random earlier passages", copies


def measure_hostile(rule: FilterConfig) -> dict[str, dict[str, float]]:
    """Measures CPU milliseconds for 1,000 tokens of each hostile text: the mean, and the slowest of the parts
    of 1,024 tokens."""
    part = 1024
    times: dict[str, dict[str, float]] = {}
    for name, text in hostile_texts():
        vocabulary = Vocabulary([b"\n\n", *[b"x"] * max(text)])
        request = RequestFilter(rule, TokenClasses(vocabulary), vocabulary, 0)
        spent: list[float] = []
        for at in range(0, len(text), part):
            start = time.thread_time()
            request.push(text[at : at + part])
            spent.append((time.thread_time() - start) * 1e6 / part)
        times[name] = {"mean": sum(spent) / len(spent), "slowest": max(spent)}
    return times


def shared(
    rule: FilterConfig, vocabulary: Vocabulary, streams: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Which part of a response's tokens may read other slots: at its end, and over its decode steps (the area
    below this part, for 1 if all may from the beginning). Means over ``streams``."""
    classes = TokenClasses(vocabulary)
    figures = []
    for tokens in streams:
        request = RequestFilter(rule, classes, vocabulary, 0)
        count = 0
        area = 0
        for at in range(0, len(tokens), _INTERVAL):
            for proposal in request.push(tokens[at : at + _INTERVAL]):
                count += rule.block * len(proposal.pairs)
            area += _INTERVAL * count
        figures.append({"end": count / len(tokens), "steps": 2 * area / len(tokens) ** 2})
    return {name: float(mean) for name, mean in pd.DataFrame(figures).mean().items()}


@dataclass(frozen=True)
class Options:
    traces: Path = option(text="JSONL file, or folder of aime*.jsonl")
    output: Path = option(Path("build/bench/filter.json"), "file of the figures")


def work(options: Options) -> None:
    traces = options.traces
    texts = texts_of(sorted(traces.glob("aime*.jsonl")) if traces.is_dir() else [traces])
    tokenizer = train_tokenizer(texts)
    vocabulary = vocabulary_of(tokenizer)
    streams = [tokenizer.encode(text) for text in texts]
    default = ReasonCacheConfig()
    rules = {"runs": filter_config(default), "steps": FilterConfig(block=16)}
    results: dict[str, Any] = {"machine": describe_machine()}
    for name, rule in rules.items():
        step_filter = FilterProcess(rule, vocabulary, max_pending=256)
        results[name] = measure(step_filter, streams)
        step_filter.shut_down()
    solid = [tokenizer.encode(re.sub(r"\n[ \t\r]*\n+", "\n", text)) for text in texts]
    for longest in (LONGEST_OF_RUNS, LONGEST_STEP):
        rule = replace(rules["runs"], max_step_tokens=longest)
        results[f"shared_cut_at_{longest}"] = {
            "recorded": shared(rule, vocabulary, streams),
            "without_blank_lines": shared(rule, vocabulary, solid),
        }
    for age in _AGES:
        times = measure_hostile(replace(rules["runs"], min_age=age))
        slowest = sorted(times, key=lambda name: -times[name]["slowest"])
        results[f"hostile_min_age_{age}"] = {name: times[name] for name in slowest}
    write_json(options.output, results)
    print(json.dumps(results, indent=1))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)

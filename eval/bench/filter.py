# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.filter TRACES`` measures the CPU time that the filter takes with ``match=steps``.

All times are CPU times of single threads, so other work on the machine hardly affects them."""

import itertools
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
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
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import vocabulary_of

_REQUESTS = 32
#: Decode steps between two polls (exchanges with the filter process), as in a server.
_INTERVAL = 4
_POLLS = 2000
#: Pause between two polls. The filter process works meanwhile, as it does during a server's decode steps.
_PAUSE_SECONDS = 0.004


def measure(step_filter: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measures the CPU time of the filter process for each finished reasoning step, and of the scheduler's
    thread for each decode step of 32 requests."""
    endless = [itertools.cycle(tokens) for tokens in streams]
    requests = array("q", [step_filter.open(0, True) for _ in range(_REQUESTS)])
    counts = array("q", [_INTERVAL] * _REQUESTS)
    polls, steps = list[float](), list[float]()
    for _ in range(_POLLS):
        tokens = array("q")
        for i in range(_REQUESTS):
            tokens.extend(itertools.islice(endless[i % len(endless)], _INTERVAL))
        start = time.thread_time()
        found = step_filter.take(min(step_filter.ready(), 256), 256) if polls else []
        step_filter.feed(requests, counts, tokens)
        polls.append((time.thread_time() - start) / _INTERVAL * 1e6)
        steps += [one.seconds * 1e3 for one in found]
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


@dataclass(frozen=True)
class Options:
    traces: Path = option(text="JSONL file, or folder of aime*.jsonl")
    output: Path = option(Path("build/bench/filter.json"), "file of the figures")


def work(options: Options) -> None:
    traces = options.traces
    texts = texts_of(sorted(traces.glob("aime*.jsonl")) if traces.is_dir() else [traces])
    tokenizer = train_tokenizer(texts)
    vocabulary, streams = vocabulary_of(tokenizer), [tokenizer.encode(text) for text in texts]
    step_filter = FilterProcess(FilterConfig(block=16), vocabulary, max_pending=256)
    results = {"machine": describe_machine(), **measure(step_filter, streams)}
    step_filter.shut_down()
    write_json(options.output, results)
    print(json.dumps(results, indent=1))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.filter TRACES``: what the step filter costs.

Times are CPU seconds of one thread, which other work on the machine disturbs little."""

import itertools
import json
import platform
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
from eval.runs.folder import write_json
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import vocabulary_of

_REQUESTS = 32
#: Decode steps between two polls, as in a server.
_INTERVAL = 4
_POLLS = 2000
#: Between two polls: the process is as far behind as in a server.
_PAUSE_SECONDS = 0.004


def wait_for(step_filter: FilterProcess) -> None:
    """Until every feed has its reply, or the process has failed."""
    while 0 <= step_filter.ready() < step_filter.outstanding:
        time.sleep(0.0005)


def step_times(step_filter: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """CPU time of each step in the filter's process, one response after the other."""
    steps: list[tuple[float, int]] = []
    for tokens in streams:
        request = step_filter.open(0, True)
        for at in range(0, len(tokens), _INTERVAL):
            new = array("q", tokens[at : at + _INTERVAL])
            step_filter.feed(array("q", [request]), array("q", [len(new)]), new)
        step_filter.close(request)
        wait_for(step_filter)
        results = step_filter.take(step_filter.outstanding, 1 << 60)
        steps += [(one.seconds * 1e3, len(one.pairs)) for one in results]
    found = pd.DataFrame(steps, columns=["ms", "pairs"])
    times = found["ms"].agg(["median", "mean", p99, "max"]).add_prefix("step_ms_")
    return {
        "steps": len(found),
        "pairs": int(found["pairs"].sum()),
        "tokens": sum(map(len, streams)),
        **times.to_dict(),
        "process_mb": psutil.Process(step_filter.pid).memory_info().rss / 1e6,
    }


def poll_times(step_filter: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """CPU time of the scheduler's thread, for 32 requests of one token a decode step."""
    endless = [itertools.cycle(tokens) for tokens in streams]
    requests = array("q", [step_filter.open(0, True) for _ in range(_REQUESTS)])
    counts = array("q", [_INTERVAL] * _REQUESTS)
    times = []
    for _ in range(_POLLS):
        tokens = array("q")
        for i in range(_REQUESTS):
            tokens.extend(itertools.islice(endless[i % len(endless)], _INTERVAL))
        start = time.thread_time()
        if step_filter.outstanding:
            step_filter.take(min(step_filter.ready(), 256), 256)
        step_filter.feed(requests, counts, tokens)
        times.append((time.thread_time() - start) / _INTERVAL * 1e6)
        time.sleep(_PAUSE_SECONDS)
    found = pd.Series(times).agg(["mean", "median", p99]).add_prefix("scheduler_us_").to_dict()
    return {**found, "steps_shed": step_filter.steps_shed}


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
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    # Nothing is shed where it is fed faster than by any model.
    for measure, max_pending in ((step_times, 1 << 30), (poll_times, 256)):
        step_filter = FilterProcess(FilterConfig(block=16), vocabulary, max_pending=max_pending)
        results |= measure(step_filter, streams)
        step_filter.shut_down()
    write_json(options.output, results)
    print(json.dumps(results, indent=1))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.filter TRACES``: what the step filter costs, alone and in a server.

TRACES is a JSONL file of responses, or a folder of files named aime*.jsonl. Prints Markdown
tables and writes every figure to a JSON file. Times are CPU seconds of one thread, which other
work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from eval.bench import distance, idle
from eval.redundancy.rows import texts_of
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of

_VOCABULARY_SIZE = 16_000
_REQUESTS = 32
#: Decode steps between two polls, as in a server.
_INTERVAL = 4
_POLLS = 2000
#: Pause between two polls: the process is as far behind as in a server.
_PAUSE_SECONDS = 0.004


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.filter", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("traces", type=Path, help="JSONL file, or folder of aime*.jsonl.")
    add("--tokenizer", help="Hugging Face folder; default: trained on TRACES.")
    add("--block", type=int, default=16, help="Tokens per block (default 16).")
    add("--rounds", type=int, default=32, help="Server rounds; 0: no servers.")
    add("--output", type=Path, default=Path("build/bench/filter.json"))
    options = parser.parse_args(argv)
    if not options.traces.exists():
        parser.error(f"TRACES: {options.traces} does not exist")
    return options


def tokenized(path: str | None, texts: Sequence[str]) -> tuple[Vocabulary, list[list[int]]]:
    """Token ids of ``texts``; without a tokenizer's path, by one trained on them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path is not None:
        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            texts, vocab_size=_VOCABULARY_SIZE, min_frequency=0, show_progress=False
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return vocabulary_of(tokenizer), ids


def step_times(engine: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """CPU time of each step in the filter's process, one response after the other."""
    lines = []
    for tokens in streams:
        request = engine.open(0, True)
        for at in range(0, len(tokens), _INTERVAL):
            new = array("q", tokens[at : at + _INTERVAL])
            engine.feed(array("q", [request]), array("q", [len(new)]), new)
        engine.close(request)
        engine.wait()
        engine.ready()
        results = engine.take(engine.outstanding, 1 << 60)
        lines += [(number, one.seconds * 1e3, len(one.pairs)) for number, one in enumerate(results)]
    steps = pd.DataFrame(lines, columns=["earlier steps", "ms", "pairs"])
    ages = pd.cut(steps["earlier steps"], (0, 50, 100, 200, 400, 800, 1600), right=False)
    groups = steps.groupby(lambda _: "any"), steps.groupby(ages, observed=True)
    table = pd.concat([group["ms"].agg(["size", "median", _p99, "max"]) for group in groups])
    heads = ["earlier steps", "steps", "median ms", "p99 ms", "max ms"]
    digits = ("", ".0f", ".3f", ".3f", ".2f")
    print("\n" + table.to_markdown(headers=heads, floatfmt=digits))
    times = steps["ms"]
    return {
        "steps": len(times),
        "pairs": int(steps["pairs"].sum()),
        "tokens": sum(map(len, streams)),
        "step_ms_median": float(times.median()),
        "step_ms_mean": float(times.mean()),
        "step_ms_p99": _p99(times),
        "step_ms_max": float(times.max()),
        "process_mb": psutil.Process(engine.pid).memory_info().rss / 1e6,
    }


def poll_times(engine: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """CPU time of the scheduler's thread, for 32 requests of one token a decode step."""
    endless = [itertools.cycle(tokens) for tokens in streams]
    requests = array("q", [engine.open(0, True) for _ in range(_REQUESTS)])
    counts = array("q", [_INTERVAL] * _REQUESTS)
    times = []
    for _ in range(_POLLS):
        tokens = array("q")
        for i in range(_REQUESTS):
            tokens.extend(itertools.islice(endless[i % len(endless)], _INTERVAL))
        start = time.thread_time()
        if engine.outstanding:
            engine.take(min(engine.ready(), 256), 256)
        engine.feed(requests, counts, tokens)
        times.append((time.thread_time() - start) / _INTERVAL * 1e6)
        time.sleep(_PAUSE_SECONDS)
    us = pd.Series(times)
    found = {"mean": float(us.mean()), "median": float(us.median()), "p99": _p99(us)}
    figures = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
    print(f"\nscheduler's thread, us a decode step of {_REQUESTS} requests: {figures}; ", end="")
    print(f"{engine.steps_shed} steps shed\n")
    return {f"scheduler_us_{name}": value for name, value in found.items()}


def _p99(times: pd.Series) -> float:
    return float(times.quantile(0.99))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    folder = options.traces.is_dir()
    files = sorted(options.traces.glob("aime*.jsonl")) if folder else [options.traces]
    try:
        texts = texts_of(files)
    except ValueError as error:
        said = f"{options.traces} (a folder needs files named aime*.jsonl): {error}"
        raise SystemExit(said) from error
    vocabulary, streams = tokenized(options.tokenizer, texts)
    config = FilterConfig(block=options.block)
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    # Nothing is shed where it is fed faster than by any model.
    for measure, max_pending in ((step_times, 1 << 30), (poll_times, 256)):
        engine = FilterProcess(config, vocabulary, max_pending=max_pending)
        results |= measure(engine, streams)
        engine.shut_down()
    results |= distance.summary()
    if options.rounds:
        results |= idle.summary(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()

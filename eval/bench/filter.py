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

import numpy as np
import psutil

from eval.bench import distance, idle
from eval.redundancy.rows import texts_of
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of

_VOCABULARY_SIZE = 16_000
_REQUESTS = 32
_INTERVAL = 4  # decode steps between two polls, as in a server
_POLLS = 2000
# Between two polls: the process is as far behind as in a server.
_PAUSE_SECONDS = 0.004


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.filter", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", type=Path, help="JSONL file, or folder of aime*.jsonl.")
    parser.add_argument("--tokenizer", help="Hugging Face folder; default: trained on TRACES.")
    parser.add_argument("--block", type=int, default=16, help="Tokens per block (default 16).")
    parser.add_argument("--rounds", type=int, default=32, help="Server rounds; 0: no servers.")
    parser.add_argument("--output", type=Path, default=Path("build/bench/filter.json"))
    options = parser.parse_args(argv)
    if not options.traces.exists():
        parser.error(f"TRACES: {options.traces} does not exist")
    return options


def tokenized(path: str | None, texts: Sequence[str]) -> tuple[Vocabulary, list[list[int]]]:
    """Token ids of ``texts``; without a tokenizer's path, by one trained on them."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path is not None:
        tokenizer = AutoTokenizer.from_pretrained(path)
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
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return vocabulary_of(tokenizer), ids


def step_times(engine: FilterProcess, streams: Sequence[Sequence[int]]) -> dict[str, Any]:
    """CPU time of each step in the filter's process, one response after the other."""
    seconds: list[float] = []
    earlier: list[int] = []
    pairs = 0
    for tokens in streams:
        request = engine.open(0, True)
        for at in range(0, len(tokens), _INTERVAL):
            new = array("q", tokens[at : at + _INTERVAL])
            engine.feed(array("q", [request]), array("q", [len(new)]), new)
        engine.close(request)
        engine.wait()
        engine.ready()
        results = engine.take(engine.outstanding, 1 << 60)
        seconds += [result.seconds for result in results]
        earlier += range(len(results))
        pairs += sum(len(result.pairs) for result in results)
    times, history = np.array(seconds) * 1e3, np.array(earlier)
    print(
        "\n| earlier steps | steps | median ms | p99 ms | max ms |\n| --- | --- | --- | --- | --- |"
    )
    for low, high in [(0, 1 << 60), *itertools.pairwise((0, 50, 100, 200, 400, 800, 1600))]:
        inside = times[(history >= low) & (history < high)]
        if len(inside):
            name = "any" if high == 1 << 60 else f"{low:,} to {high - 1:,}"
            print(
                f"| {name} | {len(inside):,} | {np.median(inside):.3f} "
                f"| {np.percentile(inside, 99):.3f} | {inside.max():.2f} |"
            )
    return {
        "steps": len(times),
        "pairs": pairs,
        "tokens": sum(map(len, streams)),
        "step_ms_median": float(np.median(times)),
        "step_ms_mean": float(times.mean()),
        "step_ms_p99": float(np.percentile(times, 99)),
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
    found = {
        "scheduler_us_mean": float(np.mean(times)),
        "scheduler_us_median": float(np.median(times)),
        "scheduler_us_p99": float(np.percentile(times, 99)),
    }
    print(
        f"\nscheduler's thread, us a decode step of {_REQUESTS} requests: mean "
        f"{found['scheduler_us_mean']:.1f}, median {found['scheduler_us_median']:.1f}, "
        f"p99 {found['scheduler_us_p99']:.1f}; {engine.steps_shed} steps shed\n"
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    folder = options.traces.is_dir()
    files = sorted(options.traces.glob("aime*.jsonl")) if folder else [options.traces]
    try:
        texts = texts_of(files)
    except ValueError as error:
        raise SystemExit(
            f"{options.traces} (a folder needs files named aime*.jsonl): {error}"
        ) from error
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

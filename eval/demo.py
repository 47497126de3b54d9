# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.demo``: stock SGLang and SGLang with sharing, in turn, on the embedded reasoner.

Same model, same KV budget, same requests through the official OpenAI client;
the only difference is ``--enable-reasoncache``. Writes ``demo.json`` and prints
a table and one response with its shared steps marked.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.marking import marked_response
from eval.measures.figures import figures
from eval.runs.cells import measure as run_cell
from eval.runs.cells import warm_up
from eval.runs.client import Request
from eval.runs.folder import Cell
from eval.runs.options import RunOptions, with_values
from eval.runs.progress import Display
from eval.runs.records import Response
from eval.runs.servers import StartedServer
from eval.serving import ServerProcess
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_FLAGS
from eval.tiny_reasoner.task import Problem, generate, grade

_SEED = 20_261
#: Seed of the short run before the measured one; its problems are others.
_WARM_UP_SEED = 77


@dataclass(frozen=True)
class Options:
    """What to run. ``kv_budget`` in slots (tokens), ``max_tokens`` per response.

    ``both`` are further flags of both servers, ``shared`` of ours alone.
    """

    problems: int
    kv_budget: int
    max_tokens: int
    output: Path
    logs: Path
    both: list[str]
    shared: list[str]


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m eval.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--problems", type=int, default=200, help="Problems sent at once (default 200)."
    )
    parser.add_argument(
        "--kv-budget", type=int, default=4000, help="KV slots of the server (default 4000)."
    )
    parser.add_argument(
        "--max-tokens", type=int, default=1500, help="max_tokens of each request (default 1500)."
    )
    parser.add_argument("--output", type=Path, default=Path("demo.json"))
    parser.add_argument(
        "--logs", type=Path, default=Path("build/demo"), help="Folder for server logs."
    )
    parser.add_argument(
        "--both",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="Further flags of both servers.",
    )
    parser.add_argument(
        "--shared", type=shlex.split, default=[], metavar="FLAGS", help="Further flags of ours."
    )
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(with_values(words, ("--both", "--shared")))
    for name in ("problems", "kv_budget", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    return Options(**vars(args))


def server_flags(options: Options) -> list[str]:
    """Flags both servers get."""
    return [
        "--max-total-tokens", str(options.kv_budget),
        "--max-running-requests", "128",
        "--decode-log-interval", "1",
        *options.both,
    ]  # fmt: skip


def measure(
    options: Options, name: str, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any], list[Response]]:
    """Start a server, warm it up, run the problems.

    Returns:
        The arm's figures for ``demo.json``, the server's own report (empty for stock), and
        the responses.
    """
    problems = generate(_SEED, options.problems)
    asked = {str(number): problem for number, problem in enumerate(problems)}
    display = Display()
    display.say(f"{name}: starting the server (about a minute)", "bold")
    started = ServerProcess(
        CHECKPOINT,
        flags=[*server_flags(options), *flags],
        log_path=options.logs / f"{name}.log",
    )
    # One log line a decode step, and no request sent twice.
    how = RunOptions(tasks=("demo",), decode_log_interval=1, attempts=1)
    with tempfile.TemporaryDirectory() as folder, started as process, display.shown():
        server, cell = StartedServer(process), Cell(Path(folder), "demo", name, 0)
        spare = requests_of(dict(enumerate(generate(_WARM_UP_SEED, 8))), options.max_tokens)
        with display.bar("warm-up", len(spare)) as advance:
            warm_up(server, spare, how, advance)
        with display.bar(name, len(asked)) as advance:
            leg = run_cell(cell, requests_of(asked, options.max_tokens), server, how, advance)
        responses, timeline = cell.responses(), cell.timeline()
    failed = [row.error for row in responses if row.error]
    if failed:
        display.say(f"{len(failed)} requests failed, first: {failed[0]}", "red")
    seen = figures(responses, [leg], timeline)
    texts = {row.problem_id: row.text for row in responses}
    right = {number: grade(texts[number], problem) for number, problem in asked.items()}
    found = {
        "problems": len(problems),
        "accuracy": share(list(right.values())),
        "accuracy_clean": share([ok for n, ok in right.items() if not asked[n].error]),
        "accuracy_error": share([ok for n, ok in right.items() if asked[n].error]),
        "output_tokens_per_s": seen.tokens_per_s or 0.0,
        "output_tokens": leg.output_tokens,
        "seconds": leg.seconds,
        "failed_requests": len(failed),
        "peak_slots": seen.peak_slots or 0,
        "mean_slots": seen.mean_slots or 0.0,
        "mean_running": seen.mean_running or 0.0,
        "decode_steps": leg.decode_steps,
        "retractions": leg.retractions,
        "leaked_slots": leg.leaked_slots,
        "memory_saving_ratio": seen.saving or 0.0,
        "final_saving_ratio": seen.final_saving or 0.0,
    }
    return found, leg.report, responses


def requests_of(problems: Mapping[Any, Problem], max_tokens: int) -> list[Request]:
    body = {"temperature": 0.0, "max_tokens": max_tokens}
    return [Request(str(number), problem.prompt, body) for number, problem in problems.items()]


def share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


_ROWS = (
    ("accuracy", "accuracy", "{:.3f}"),
    ("accuracy, clean", "accuracy_clean", "{:.3f}"),
    ("accuracy, wrong draft", "accuracy_error", "{:.3f}"),
    ("output tokens/s", "output_tokens_per_s", "{:.0f}"),
    ("mean running requests", "mean_running", "{:.2f}"),
    ("decode steps", "decode_steps", "{}"),
    ("KV slots, peak", "peak_slots", "{}"),
    ("KV slots, mean", "mean_slots", "{:.0f}"),
    ("slots saved, over decode steps", "memory_saving_ratio", "{:.1%}"),
    ("slots saved, end of a response", "final_saving_ratio", "{:.1%}"),
    ("retractions", "retractions", "{}"),
    ("leaked slots", "leaked_slots", "{}"),
)


def print_table(result: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Embedded reasoner, same KV budget")
    table.add_column("")
    for arm in result:
        table.add_column(arm, justify="right")
    table.add_column("ratio", justify="right")
    for title, key, form in _ROWS:
        first, second = (arm[key] for arm in result.values())
        ratio = f"{second / first:.3f}" if first else ""
        table.add_row(title, form.format(first), form.format(second), ratio)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    options.logs.mkdir(parents=True, exist_ok=True)
    stock, _, _ = measure(options, "stock", [])
    shared, report, responses = measure(
        options, "reasoncache", ["--enable-reasoncache", *EMBEDDED_FLAGS, *options.shared]
    )
    result = {"stock": stock, "reasoncache": shared}
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)
    Console().print(marked_response(report, responses, CHECKPOINT))
    Console().print(f"wrote {options.output}; server logs in {options.logs}")


if __name__ == "__main__":
    main()

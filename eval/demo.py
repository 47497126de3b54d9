# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.demo``: stock SGLang and SGLang with sharing, in turn, on the embedded reasoner.

Same model, same KV budget, same requests through the official OpenAI client;
the only difference is ``--enable-reasoncache``. Writes ``demo.json`` and prints
a table and one response with its shared steps marked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval.load import Answer, ask_all
from eval.marking import marked_response
from eval.server_log import summarise
from eval.serving import MODEL_NAME, ServerProcess
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
    args = parser.parse_args(argv)
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


async def run_problems(
    server: ServerProcess, problems: Sequence[Problem], max_tokens: int, title: str
) -> list[Answer]:
    """Send all problems at once and show how many have been answered."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    async with server.async_openai() as client:
        with Progress(*columns) as progress:
            task = progress.add_task(title, total=len(problems))
            return await ask_all(
                client,
                MODEL_NAME,
                [problem.prompt for problem in problems],
                max_tokens,
                lambda _answer: progress.advance(task),
            )


def measure(
    options: Options, name: str, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start a server, warm it up, run the problems.

    Returns:
        The arm's figures for ``demo.json``, and the server's own report (empty for stock).
    """
    problems = generate(_SEED, options.problems)
    console = Console()
    console.print(f"[bold]{name}[/bold]: starting the server (about a minute)")
    log = options.logs / f"{name}.log"
    with ServerProcess(CHECKPOINT, flags=[*server_flags(options), *flags], log_path=log) as server:
        asyncio.run(run_problems(server, generate(_WARM_UP_SEED, 8), options.max_tokens, "warm-up"))
        server.post("/flush_cache")
        offset = server.log_size()
        answers = asyncio.run(run_problems(server, problems, options.max_tokens, name))
        report = server.get("/reasoncache").json()["schedulers"][0] if flags else {}
        seen = summarise(server.log_text(offset))
        leaked = leaked_slots(server)
    failed = [a.error for a in answers if a.error]
    if failed:
        console.print(f"[red]{len(failed)} requests failed, first: {failed[0]}[/red]")
    return {
        **figures(problems, answers),
        **log_figures(seen),
        "leaked_slots": leaked,
        **saving(report),
    }, {
        **report,
        "answers": answers,
    }


def figures(problems: Sequence[Problem], answers: Sequence[Answer]) -> dict[str, Any]:
    """Accuracy and speed of one arm."""
    right = [grade(answer.text, problem) for answer, problem in zip(answers, problems, strict=True)]
    clean = [ok for ok, problem in zip(right, problems, strict=True) if not problem.error]
    wrong_draft = [ok for ok, problem in zip(right, problems, strict=True) if problem.error]
    seconds = max(a.ended for a in answers) - min(a.started for a in answers)
    tokens = sum(a.output_tokens for a in answers)
    return {
        "problems": len(problems),
        "accuracy": share(right),
        "accuracy_clean": share(clean),
        "accuracy_error": share(wrong_draft),
        "output_tokens_per_s": tokens / seconds,
        "output_tokens": tokens,
        "seconds": seconds,
        "failed_requests": sum(a.error is not None for a in answers),
    }


def share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def log_figures(seen: Any) -> dict[str, Any]:
    return {
        "peak_slots": seen.peak_slots,
        "mean_slots": seen.mean_slots,
        "mean_running": seen.mean_running,
        "decode_steps": seen.decode_steps,
        "retractions": seen.retractions,
    }


def saving(report: dict[str, Any]) -> dict[str, float]:
    """Saving ratios; a stock server saves nothing."""
    totals = report.get("totals", {})
    return {key: totals.get(key, 0.0) for key in ("memory_saving_ratio", "final_saving_ratio")}


def leaked_slots(server: ServerProcess) -> int:
    """Slots in use once nothing runs and the cache is flushed."""
    server.post("/flush_cache")
    return int(
        sum(load["num_used_tokens"] for load in server.get("/v1/loads?include=all").json()["loads"])
    )


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
    stock, _ = measure(options, "stock", [])
    shared, report = measure(
        options, "reasoncache", ["--enable-reasoncache", *EMBEDDED_FLAGS, *options.shared]
    )
    result = {"stock": stock, "reasoncache": shared}
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)
    Console().print(marked_response(report, CHECKPOINT))
    Console().print(f"wrote {options.output}; server logs in {options.logs}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.demo``: stock SGLang and SGLang with sharing, in turn, on the embedded reasoner.

Writes ``demo.json``, prints a table and one response with its shared steps marked."""

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from eval.bench import at_least
from eval.measures.figures import of_cells
from eval.methods import find_methods
from eval.runs.folder import Cell, Response, write_whole
from eval.runs.options import RunOptions, with_values
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_SETTINGS

_TASK, _SEED = "tiny_reasoner", 20_261
#: Row of the table -> field and format.
_ROWS = {
    "accuracy": ("accuracy", "{:.3f}"),
    "accuracy, clean": ("accuracy_clean", "{:.3f}"),
    "accuracy, wrong draft": ("accuracy_error", "{:.3f}"),
    "output tokens/s": ("output_tokens_per_s", "{:.0f}"),
    "mean running requests": ("mean_running", "{:.2f}"),
    "decode steps": ("decode_steps", "{}"),
    "KV slots, peak": ("peak_slots", "{}"),
    "KV slots, mean": ("mean_slots", "{:.0f}"),
    "slots saved, over decode steps": ("memory_saving_ratio", "{:.1%}"),
    "slots saved, end of a response": ("final_saving_ratio", "{:.1%}"),
    "retractions": ("retractions", "{}"),
    "leaked slots": ("leaked_slots", "{}"),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.demo", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--problems", type=at_least(1), default=200, help="Problems sent at once (default 200).")
    add("--kv-budget", type=at_least(1), default=4000, help="KV slots (default 4000).")
    add("--max-tokens", type=at_least(1), default=1500, help="Of each request (default 1500).")
    add("--output", type=Path, default=Path("demo.json"))
    add("--logs", type=Path, default=Path("build/demo"), help="Folder for logs and records.")
    for name, of in (("--both", "both servers"), ("--shared", "ours")):
        text = f"Further flags of {of}."
        add(name, type=shlex.split, default=[], metavar="FLAGS", help=text)
    words = sys.argv[1:] if argv is None else argv
    return parser.parse_args(with_values(words, ("--both", "--shared")))


def run_options(args: argparse.Namespace) -> RunOptions:
    """What both servers are asked: one log line a decode step, and no request sent twice."""
    most: dict[str, Any] = dict(limit=args.problems, max_tokens=args.max_tokens, attempts=1)
    most |= dict(kv_budget=args.kv_budget, server_flags=args.both, decode_log_interval=1)
    return RunOptions(tasks=(_TASK,), seeds=(_SEED,), device="cpu", **most)


def measure(args: argparse.Namespace) -> dict[str, Cell]:
    """Run both arms; their cells by name."""
    from eval.runs.work import run

    options, folder = run_options(args), args.logs / "run"
    # What was measured with other code or on another day does not count.
    shutil.rmtree(folder, ignore_errors=True)
    dense, ours = find_methods(options.methods, EMBEDDED_SETTINGS)
    ours = dataclasses.replace(ours, more=tuple(args.shared))
    run(options, folder, [dense, ours])
    names = {"stock": dense.name, "reasoncache": ours.name}
    return {arm: Cell(folder, _TASK, name, _SEED) for arm, name in names.items()}


def arm_of(cell: Cell) -> dict[str, Any]:
    seen, results, (leg,) = of_cells([cell]), cell.results(), cell.legs()

    def share(group: str = "") -> float:
        chosen = [row.correct for row in results if group in ("", row.group)]
        return sum(chosen) / len(chosen) if chosen else 0.0

    told = ("output_tokens", "seconds", "decode_steps", "retractions", "leaked_slots")
    return {
        **{"problems": len(results), "failed_requests": seen.failed},
        **{"accuracy": share(), "accuracy_clean": share("clean"), "accuracy_error": share("error")},
        **{name: getattr(leg, name) for name in told},
        "output_tokens_per_s": seen.tokens_per_s or 0.0,
        "peak_slots": seen.peak_slots or 0,
        "mean_slots": seen.mean_slots or 0.0,
        "mean_running": seen.mean_running or 0.0,
        "memory_saving_ratio": seen.saving or 0.0,
        "final_saving_ratio": seen.final_saving or 0.0,
    }


def print_table(result: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Embedded reasoner, same KV budget")
    table.add_column("")
    for arm in (*result, "ratio"):
        table.add_column(arm, justify="right")
    for title, (key, form) in _ROWS.items():
        first, second = (arm[key] for arm in result.values())
        ratio = f"{second / first:.3f}" if first else ""
        table.add_row(title, form.format(first), form.format(second), ratio)
    Console().print(table)


def marked_response(report: dict[str, Any], responses: Sequence[Response]) -> Text:
    """The response among one scheduler's ``report["recent"]`` that shares most, with the steps that
    share memory highlighted."""
    answers = {response.request_id: response for response in responses}
    known = [entry for entry in report.get("recent", ()) if entry["rid"] in answers]
    if not known:
        return Text("no finished request with shared steps to show")
    entry = max(known, key=lambda e: e["shared_positions"])
    start, block, positions = entry["prompt_tokens"], entry["block"], entry["shared_positions"]
    shared = {at - start for _, dst, _ in entry["blocks"] for at in range(dst, dst + block)}
    share = f"{positions / (start + entry['output_tokens']):.0%}"
    out = Text(f"\nRequest {entry['rid']}: {positions} positions share earlier slots ({share}). ")
    out.append("Green text owns no memory.\n\n", style="green")
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(answers[entry["rid"]].text, add_special_tokens=False).ids
    for number, token_id in enumerate(ids):
        word = tokenizer.decode([token_id])
        out.append(f"{word} " if word.strip() else "\n", style="green" if number in shared else "")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    cells = measure(args)
    result = {arm: arm_of(cell) for arm, cell in cells.items()}
    write_whole(args.output, json.dumps(result, indent=2) + "\n")
    print_table(result)
    ours = cells["reasoncache"]
    report = ours.legs()[0].report
    Console().print(marked_response(report, ours.responses()))
    Console().print(f"wrote {args.output}; logs and records in {args.logs}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.demo`` serves a tiny model of this repository with stock SGLang, with stock SGLang tuned for
scarce memory, then with sharing.

Prints the address of the sharing server's web page, a table that compares the servers, and a response in which
the words without KV slots of their own are marked. Writes ``demo.json`` and ``demo.png``."""

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer

from eval import command
from eval.command import flags_of, option
from eval.measures.figures import of_cell
from eval.report.pictures import timeline
from eval.report.tables import load
from eval.runs.folder import Cell, Response, write_json
from eval.runs.options import RunOptions
from eval.runs.session import run
from eval.tiny_reasoner import CHECKPOINT

_TASK = "tiny_reasoner"
_SEED = 20_261
#: The servers by the names of the table's columns, and their methods. At conservativeness 0.3, a clip of 64 is
#: the fastest of 8, 64, 256 and 4096 for this load (``eval.run --methods tuned`` sweeps both settings).
_SERVERS = {
    "stock": "dense",
    "tuned stock": "dense:clip=64:conservativeness=0.3",
    "reasoncache": "newest",
}
#: Flags that let the sharing server's web page show the texts of responses.
_SHOWS_TEXTS = ("--reasoncache-set", "keep_responses=8")
#: Maps each row of the table to a key of the result of :func:`arm_of` and the format of its value.
_ROWS = {
    "accuracy": ("accuracy", "{:.3f}"),
    "output tokens/s": ("tokens_per_s", "{:.0f}"),
    "mean running requests": ("mean_running", "{:.2f}"),
    "decode steps": ("decode_steps", "{}"),
    "KV slots, peak": ("peak_slots", "{}"),
    "KV slots, mean": ("mean_slots", "{:.0f}"),
    "slots saved, over decode steps": ("saving", "{:.1%}"),
    "slots saved, end of a response": ("final_saving", "{:.1%}"),
    "retractions": ("retractions", "{}"),
    "seconds per token, 99th percentile": ("tpot_p99", "{:.3f}"),
    "leaked slots": ("leaked_slots", "{}"),
}


@dataclass(frozen=True)
class Options:
    problems: int = option(200, "problems, sent at once", least=1)
    kv_budget: int = option(4000, "KV slots of each server", least=1)
    max_tokens: int = option(1500, "most tokens of a response", least=1)
    output: Path = option(Path("demo.json"), "JSON file of the figures; the picture is beside it")
    logs: Path = option(Path("build/demo"), "folder for logs and records")
    flags: tuple[str, ...] = option((), "further flags of all servers", read=flags_of)
    shared: tuple[str, ...] = option((), "further flags of our server", read=flags_of)

    @property
    def run(self) -> RunOptions:
        """The options of ``eval.run``. Servers log every decode step, and no failed request is sent again."""
        most: dict[str, Any] = dict(limit=self.problems, max_tokens=self.max_tokens, attempts=1)
        most |= dict(kv_budget=self.kv_budget, server_flags=self.flags, decode_log_interval=1)
        methods = tuple(_SERVERS.values())
        return RunOptions(tasks=(_TASK,), seeds=(_SEED,), device="cpu", methods=methods, **most)


def measure(options: Options) -> dict[str, Cell]:
    """Measure all servers; return the records of each by name. Raises RunError if a server has no records."""
    run_options = options.run
    folder = options.logs / "run"
    # An earlier run is not continued, because the code or the machine may have changed since.
    shutil.rmtree(folder, ignore_errors=True)
    run(run_options, folder, {_SERVERS["reasoncache"]: (*_SHOWS_TEXTS, *options.shared)})
    return {arm: Cell(folder, _TASK, name, _SEED).whole() for arm, name in _SERVERS.items()}


def draw(options: Options) -> Path:
    """Draw KV slots and running requests over the decode steps; return the path of the picture."""
    data = load([options.logs / "run"])
    path = options.output.with_suffix(".png")
    names = {method: name for name, method in _SERVERS.items()}
    timeline(dataclasses.replace(data, timeline=data.timeline.replace(names)), _TASK, path)
    return path


def arm_of(cell: Cell) -> dict[str, Any]:
    right = [row.correct for row in cell.results()]
    served = cell.served()
    totals = {name: getattr(served, name) for name in ("output_tokens", "seconds", "decode_steps")}
    accuracy = sum(right) / len(right)
    return {"problems": len(right), **vars(of_cell(cell)), "accuracy": accuracy, **totals}


def table_of(result: dict[str, dict[str, Any]]) -> str:
    """The table. Its last column divides the last server's figures by those of the server before it."""
    lines = []
    for title, (key, form) in _ROWS.items():
        figures = [arm[key] or 0 for arm in result.values()]
        shown = dict(zip(result, map(form.format, figures), strict=True))
        *_, peer, ours = figures
        ratio = f"{ours / peer:.3f}" if peer else ""
        lines.append({"same KV budget": title, **shown, "ours over tuned": ratio})
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def marked_response(report: dict[str, Any], responses: Sequence[Response]) -> str:
    """Takes a scheduler's report. Returns the text of the response in ``report["recent"]`` with the most shared
    positions. On a terminal, words without KV slots of their own are green."""
    answers = {response.request_id: response for response in responses}
    entries = [entry for entry in report.get("recent", ()) if entry["rid"] in answers]
    if not entries:
        return "no finished request with shared steps to show"
    entry = max(entries, key=lambda e: e["shared_positions"])
    start = entry["prompt_tokens"]
    positions = entry["shared_positions"]
    shared = {
        at - start for _, dst, _, length in entry["blocks"] for at in range(dst, dst + length)
    }
    share = f"{positions / (start + entry['output_tokens']):.0%}"
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(answers[entry["rid"]].text, add_special_tokens=False).ids
    words = [tokenizer.decode([token_id]).strip() or "\n" for token_id in ids]
    marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")
    text = " ".join(word.join(marks if i in shared else ("", "")) for i, word in enumerate(words))
    head = f"\nRequest {entry['rid']}: {positions} positions own no slots ({share})."
    return f"{head} On a terminal their text is green.\n\n{text}"


def work(options: Options) -> None:
    cells = measure(options)
    result = {arm: arm_of(cell) for arm, cell in cells.items()}
    write_json(options.output, result)
    print(table_of(result))
    ours = cells["reasoncache"]
    (report,) = ours.served().reports
    print(marked_response(report, ours.responses()))
    print(f"wrote {options.output}, {draw(options)}; logs and records in {options.logs}")


if __name__ == "__main__":
    command.run(Options, work)

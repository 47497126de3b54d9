# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.report RUN...`` makes tables and pictures from folders that ``python -m eval.run`` wrote."""

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown import markdown

from eval import command
from eval.command import option
from eval.report import tables
from eval.report.pictures import draw
from eval.report.tables import Data, load, words
from eval.runs.folder import RunError, write_json, write_whole


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...] = option(text="folders of runs")
    out: Path | None = option(None, "folder of the report, by default report/ in the first run")


def work(options: Options) -> None:
    """Read the runs and write the report. Raises RunError if a run cannot be read or nothing was measured."""
    out = options.out or options.runs[0] / "report"
    data = load(options.runs)
    if data.cells.empty:
        raise RunError(f"{options.runs[0]}: nothing has been measured")
    write(data, out)
    print(out / "REPORT.md", out / "report.html", sep="\n")


def write(data: Data, out: Path) -> None:
    """Write ``REPORT.md`` with pictures, ``report.html`` with both, ``summary.json`` with cells and tables."""
    made = [table for maker in tables.ALL if (table := maker(data)) is not None]
    parts = ["# Evaluation", *(_source(run, config) for run, config in data.configs.items())]
    parts += [table.markdown() for table in made]
    parts += [f"![{caption}]({file})" for file, caption in draw(data, out).items()]
    cells = json.loads(data.cells.to_json(orient="records"))
    summary = {"cells": cells, "tables": {table.name: table.rows for table in made}}
    write_json(out / "summary.json", summary)
    text = "\n\n".join(parts) + "\n"
    write_whole(out / "REPORT.md", text)
    write_whole(out / "report.html", html(text, out))


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:3px 8px;text-align:left}img{max-width:100%}code{font-size:12px}"""


def html(text: str, folder: Path) -> str:
    """Converts a report's Markdown into an HTML page that embeds the pictures in ``folder``."""

    def held(match: re.Match[str]) -> str:
        data = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([^":/]+\.png)"', held, markdown(text, extensions=["tables"]))
    head = f'<!doctype html><meta charset="utf-8"><title>Evaluation</title><style>{_STYLE}</style>'
    return f"{head}\n{body}\n"


def _source(run: str, config: Mapping[str, Any]) -> str:
    """The model, code, machine and command of a run, in Markdown."""
    machine = config.get("machine", {})
    versions = config.get("versions", {})
    gpus = machine.get("gpus") or []
    cpu = f"{machine.get('cpu')}, {machine.get('cores')} cores"
    facts = [
        f"model {config.get('model')}",
        f"commit {str(versions.get('commit'))[:12]}",
        f"SGLang {versions.get('sglang')}",
        f"{len(gpus)} GPU {gpus[0]}" if gpus else cpu,
        str(config.get("date")),
    ]
    command = str(config.get("command_line", "")).replace("`", "'").replace("\n", " ")
    return f"{words(run)}: {words(', '.join(facts))}.\n`{command or ' '}`"


if __name__ == "__main__":
    command.run(Options, work)

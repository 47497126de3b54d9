# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.report RUN...``: tables and pictures of folders of ``python -m eval.run``."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.report import tables
from eval.report.pictures import draw
from eval.report.tables import Data, load, words
from eval.runs.folder import RunError, write_whole


def main(argv: Sequence[str] | None = None) -> int:
    """Read, measure, draw, write; 0, or 1 with a message if a run cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.report",
        description="Writes REPORT.md, pictures and summary.json from folders of python -m eval.run. "
        "Several runs that differ in --kv-budget make a sweep.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: report/ in the first RUN")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0] / "report"
    try:
        data = load(args.runs)
        if data.cells.empty:
            raise RunError(f"{args.runs[0]}: nothing has been measured")
        write(data, out)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(out / "REPORT.md")
    return 0


def write(data: Data, out: Path) -> None:
    """``REPORT.md`` with its pictures, and the tables again in ``summary.json``."""
    made = [table for maker in tables.ALL if (table := maker(data)) is not None]
    parts = ["# Evaluation", *(_source(run, config) for run, config in data.configs.items())]
    parts += [table.markdown() for table in made]
    parts += [f"![{caption}]({file})" for file, caption in draw(data, out).items()]
    cells = json.loads(data.cells.to_json(orient="records"))
    summary = {"cells": cells, "tables": {table.name: table.rows for table in made}}
    write_whole(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_whole(out / "REPORT.md", "\n\n".join(parts) + "\n")


def _source(run: str, config: Mapping[str, Any]) -> str:
    """What a run was measured on, with which code and by which command."""
    machine, versions = config.get("machine", {}), config.get("versions", {})
    gpus = machine.get("gpus") or []
    cpu = f"{machine.get('cpu')}, {machine.get('cores')} cores"
    resumed = len(config.get("resumed", []))
    facts = [
        f"model {config.get('model')}",
        f"commit {str(versions.get('commit'))[:12]}",
        f"SGLang {versions.get('sglang')}",
        f"{len(gpus)} GPU {gpus[0]}" if gpus else cpu,
        str(config.get("date")),
        *([f"resumed {resumed} times"] if resumed else []),
    ]
    command = str(config.get("command_line", "")).replace("`", "'").replace("\n", " ")
    return f"{words(run)}: {words(', '.join(facts))}.\n`{command or ' '}`"


if __name__ == "__main__":
    sys.exit(main())

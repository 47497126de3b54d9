# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.small_reasoner.paths RUN...``: how many responses of a run's methods are right, go
through the checks as asked, and are word for word those of ``dense``."""

import sys
from pathlib import Path

import pandas as pd

from eval.methods import DENSE
from eval.runs.folder import Cell, cells
from eval.small_reasoner.task import follows_prompt, generate


def row(cell: Cell) -> dict[str, object]:
    problems = {
        f"small_reasoner-{cell.seed}-{i}": p for i, p in enumerate(generate(cell.seed, 500))
    }
    dense = Cell(cell.run, cell.task, DENSE, cell.seed).answered()
    answers = cell.answered()
    return {
        "method": cell.method,
        "seed": cell.seed,
        "responses": len(answers),
        "right": sum(result.correct for result in cell.results()),
        "as asked": sum(follows_prompt(a.text, problems[name]) for name, a in answers.items()),
        "as dense": sum(
            name in dense and a.text == dense[name].text for name, a in answers.items()
        ),
    }


if __name__ == "__main__":
    found = [row(cell) for run in sys.argv[1:] for cell in cells(Path(run))]
    print(pd.DataFrame(found).to_markdown(index=False))

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.small_reasoner.paths RUN...``: how many responses of a run's methods are right, go
through the checks as asked, and are word for word those of ``dense``."""

import sys
from pathlib import Path

import pandas as pd

from eval.methods import DENSE
from eval.runs.folder import Cell, cells
from eval.small_reasoner.task import follows_prompt, generate

TASK = "small_reasoner"


def row(cell: Cell) -> dict[str, object]:
    dense = Cell(cell.run, cell.task, DENSE, cell.seed).answered()
    texts = {name: answer.text for name, answer in cell.answered().items()}
    numbers = {name: int(name.rpartition("-")[2]) for name in texts}
    problems = generate(cell.seed, max(numbers.values(), default=-1) + 1)
    return {
        "method": cell.method,
        "seed": cell.seed,
        "responses": len(texts),
        "right": sum(result.correct for result in cell.results()),
        "as asked": sum(follows_prompt(text, problems[numbers[n]]) for n, text in texts.items()),
        "as dense": sum(n in dense and text == dense[n].text for n, text in texts.items()),
    }


if __name__ == "__main__":
    runs = [cell for run in sys.argv[1:] for cell in cells(Path(run)) if cell.task == TASK]
    print(pd.DataFrame(map(row, runs)).to_markdown(index=False))

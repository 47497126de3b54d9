# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.passages 2wikimqa.jsonl DOCUMENTS.jsonl`` makes rows for ``eval.fidelity
--documents`` of LongBench's questions on several passages (2WikiMQA, MuSiQue, HotpotQA), which the SamKV paper
asks. LongBench accepts any of several answers; these rows have the first."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import command
from eval.command import option
from eval.jsonl import read_rows, text_of
from eval.runs.folder import write_whole

#: LongBench numbers the passages of a context.
_PASSAGE = re.compile(r"^Passage \d+:\s*$", re.MULTILINE)
#: LongBench's prompt for these tasks, around the passages.
_ASKED = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words."
)
SYSTEM = f"{_ASKED}\n\nThe following are given passages."
QUESTION = f"{_ASKED}\n\nQuestion: {{}}\nAnswer:"


@dataclass(frozen=True)
class Options:
    source: Path = option(text="LongBench's file of a task: rows with input, context and answers")
    target: Path = option(text="JSONL file to write")
    limit: int = option(200, "rows, from the first on", least=1)


def documents_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row for ``eval.fidelity --documents``. Raises ValueError if a field is missing or wrong, and if the
    context has no passages."""
    context = text_of(row, "context")
    passages = [part.strip() for part in _PASSAGE.split(context)[1:]]
    answers = row.get("answers")
    if not passages or not all(passages):
        raise ValueError("field 'context' has no passages ('Passage 1:', ...), or empty ones")
    if not isinstance(answers, list) or not answers:
        raise ValueError("field 'answers' is no list of texts, or empty")
    return {
        "id": str(row.get("_id", "")),
        "group": str(row.get("dataset", "all")),
        "system": SYSTEM,
        "documents": passages,
        "question": QUESTION.format(text_of(row, "input")),
        "answer": text_of({"answers[0]": answers[0]}, "answers[0]"),
    }


def work(options: Options) -> None:
    """Write the rows. Raises OSError or ValueError if the source cannot be read."""
    if options.target.resolve() == options.source.resolve():
        raise ValueError(f"{options.target} is what is read")

    def lines() -> Iterator[str]:
        for number, (_, row) in enumerate(read_rows(options.source, documents_of)):
            if number == options.limit:
                return
            yield json.dumps(row) + "\n"

    text = "".join(lines())
    if not text:
        raise ValueError(f"{options.source}: no rows")
    write_whole(options.target, text)
    print(f"wrote {options.target}")


if __name__ == "__main__":
    command.run(Options, work)

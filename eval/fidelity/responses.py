# SPDX-License-Identifier: Apache-2.0
"""Recorded responses as tokens, and which group each belongs to."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.jsonl import read_rows, valid_text

GROUPS = ("right", "loops", "wrong")
#: Tokens of a run, and the share of runs that stand earlier in a response from which on it loops.
_RUN, _LOOPS = 32, 0.1


class Response(NamedTuple):
    """One row; ``tokens`` are cut at the cap, the first ``prompt`` of them are the question."""

    name: str
    group: str
    tokens: tuple[int, ...]
    prompt: int


def read(path: Path, tokenizer: Any, cap: int, shortest: int) -> Iterator[Response]:
    """Responses of at least ``shortest`` tokens, question and response cut at ``cap``.

    ``path`` is a JSONL file of rows with ``question`` and ``response``, perhaps ``id`` and
    ``correct``, or a folder of such, of which the first response to each question counts. Raises
    OSError, ValueError: a file or line that cannot be read; names it.
    """
    asked: set[str] = set()
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, row in read_rows(file, _texts):
            if path.is_dir() and row["question"] in asked:
                continue
            asked.add(row["question"])
            response = _tokenized({"id": f"{file.stem}:{number}", **row}, tokenizer, cap)
            if len(response.tokens) - response.prompt >= shortest:
                yield response


def loops(tokens: Sequence[int]) -> bool:
    """Whether a tenth of the runs of 32 tokens stand earlier in the response, word for word."""
    runs = [tuple(tokens[i : i + _RUN]) for i in range(len(tokens) - _RUN + 1)]
    return bool(runs) and 1 - len(set(runs)) / len(runs) >= _LOOPS


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    for field in ("question", "response"):
        if not isinstance(row.get(field), str):
            raise ValueError(f"no text in field {field!r}")
        row[field] = valid_text(row[field])
    return row


def _tokenized(row: dict[str, Any], tokenizer: Any, cap: int) -> Response:
    asked = row["question"] + "\n\n"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": row["question"]}]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt, response = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, row["response"])
    )
    response = response[: max(0, cap - len(prompt))]
    group = "right" if row.get("correct") is True else "loops" if loops(response) else "wrong"
    return Response(str(row["id"]), group, (*prompt, *response), len(prompt))

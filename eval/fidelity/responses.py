# SPDX-License-Identifier: Apache-2.0
"""Recorded responses as tokens, and which group each belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from eval.jsonl import read_object, valid_text

GROUPS = ("right", "loops", "wrong")
#: Tokens of a run, and the share of a response's runs that stand earlier in it, from which on
#: it loops.
_RUN, _LOOPS = 32, 0.1


class ResponseError(ValueError):
    """Responses that cannot be read; the message names the file."""


@dataclass(frozen=True)
class Response:
    """One row; ``tokens`` are cut at the cap, the first ``prompt`` of them are the question."""

    name: str
    group: str
    tokens: tuple[int, ...]
    prompt: int


def read(
    path: Path, tokenizer: Any, cap: int, shortest: int, groups: Sequence[str], limit: int | None
) -> list[Response]:
    """At most ``limit`` responses of each group, the groups in turn.

    Of a folder, the first response to each question counts, and files take turns.

    Args:
        path: JSONL file, or folder of such, of rows with ``question``, ``response`` and perhaps
            ``id`` and ``correct``.
        cap: Tokens of question and response together.
        shortest: Tokens that a response must have to be read.

    Raises:
        ResponseError: a bad line, or no response of any of the groups.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows: list[list[dict[str, Any]]] = []
    asked: set[str] = set()
    for file in files:
        fresh = [row for row in _rows(file) if not path.is_dir() or row["question"] not in asked]
        asked.update(row["question"] for row in fresh)
        rows.append(fresh)
    found: dict[str, list[Response]] = defaultdict(list)
    for row in (row for turn in zip_longest(*rows) for row in turn if row is not None):
        response = _tokenized(row, tokenizer, cap)
        if len(response.tokens) - response.prompt >= shortest:
            found[response.group].append(response)
    kept = [islice(found[group], limit) for group in groups]
    responses = [one for turn in zip_longest(*kept) for one in turn if one is not None]
    if not responses:
        raise ResponseError(f"{path}: no response of {shortest} tokens in {', '.join(groups)}")
    return responses


def loops(tokens: Sequence[int]) -> bool:
    """Whether a tenth of the runs of 32 tokens stand earlier in the response, word for word."""
    runs = [tuple(tokens[i : i + _RUN]) for i in range(len(tokens) - _RUN + 1)]
    return bool(runs) and 1 - len(set(runs)) / len(runs) >= _LOOPS


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ResponseError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_object(line)
        except ValueError as error:
            raise ResponseError(f"{path}:{number}: {error}") from error
        for field in ("question", "response"):
            if not isinstance(row.get(field), str):
                raise ResponseError(f"{path}:{number}: no text in field {field!r}")
            row[field] = valid_text(row[field])
        yield {"id": f"{path.stem}:{number}", **row}


def _tokenized(row: dict[str, Any], tokenizer: Any, cap: int) -> Response:
    asked = f"{row['question']}\n\n"
    if tokenizer.chat_template:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
    prompt, response = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, row["response"])
    )
    response = response[: max(0, cap - len(prompt))]
    group = "right" if row.get("correct") is True else "loops" if loops(response) else "wrong"
    return Response(str(row["id"]), group, (*prompt, *response), len(prompt))

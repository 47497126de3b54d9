# SPDX-License-Identifier: Apache-2.0
"""Long recorded responses cut into shorter ones, for replays that have no hour to run.

A response of 30,000 tokens takes as many decode steps however fast a server is. Its
consecutive pieces, cut at the ends of steps, repeat themselves nearly as much: of the
looping AIME responses 54% of the tokens could share memory over time, of their pieces
of 4,000 tokens 48% (docs/benchmarks.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.runs.folder import write_whole
from eval.tasks.task import Problem

_STEP_END = "\n\n"


def cut(response: str, tokenizer: Any, tokens: int) -> list[str]:
    """Whole steps of a response in pieces of about ``tokens`` tokens; the remainder is left out.

    Args:
        tokenizer: of Hugging Face, called as ``tokenizer(text)``.
        tokens: a piece ends with the step that reaches so many.
    """
    pieces: list[str] = []
    begun: list[str] = []
    length = 0
    for step in _steps(response):
        begun.append(step)
        length += len(tokenizer.encode(step, add_special_tokens=False, verbose=False))
        if length >= tokens:
            pieces.append("".join(begun))
            begun, length = [], 0
    return pieces


def write_pieces(
    problems: Sequence[Problem], tokenizer: Any, tokens: int, least: int, path: Path
) -> int:
    """Write the pieces of all records of at least ``least`` tokens as JSONL; return how many.

    Args:
        problems: of a replay; the reference is the recorded response, ``max_tokens`` its length.
    """
    lines = []
    for problem in problems:
        if (problem.max_tokens or 0) < least:
            continue
        for number, piece in enumerate(cut(problem.reference, tokenizer, tokens)):
            name = f"{problem.id}.{number}"
            lines.append({"id": name, "question": problem.prompt, "response": piece})
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def _steps(response: str) -> Iterator[str]:
    start = 0
    while start < len(response):
        end = response.find(_STEP_END, start)
        end = len(response) if end < 0 else end + len(_STEP_END)
        yield response[start:end]
        start = end

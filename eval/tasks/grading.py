# SPDX-License-Identifier: Apache-2.0
"""Filters and graders of the task files in this folder. They limit their work, as responses may be hostile."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from eval.tasks.mathematics import MATHEMATICS

_MAX_ANSWER_CHARS = 1000
_MAX_BOXES = 100
_BOXES = (re.compile(r"\\boxed ?\{"), re.compile(r"\\fbox ?\{"))

Responses = Sequence[Sequence[str]]
Documents = Sequence[Mapping[str, Any]]


def boxed(responses: Responses, _docs: Documents) -> list[list[str]]:
    r"""Returns the content of the last ``\boxed{}`` in each response, or "" (see :func:`last_boxed`)."""
    return [[last_boxed(text) for text in row] for row in responses]


def stripped(responses: Responses, _docs: Documents) -> list[list[str]]:
    """Strips responses, because incremental detokenizing may put a space before the first word."""
    return [[text.strip() for text in row] for row in responses]


def same(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {"score": float(results[0] == doc["target"].strip())}


def equal_mathematics(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score is 1 if answer and target are equal, as text or according to math-verify, else 0."""
    answer = results[0].removesuffix(".").rstrip()
    right = answer == doc["target"] or bool(answer and MATHEMATICS.equal(doc["target"], answer))
    return {"score": float(right)}


def last_boxed(text: str) -> str:
    """Returns the content of :func:`last_box` without spaces around it, or "" if there is no such box."""
    box = last_box(text)
    return "" if box is None else text[box].strip()


def last_box(text: str) -> slice | None:
    r"""Finds the last closed box that is not blank, in linear time. Returns where its content is, or None.
    ``\fbox{}`` counts only without a ``\boxed{}``."""
    for box in _BOXES:
        starts = deque((match.end() for match in box.finditer(text)), maxlen=_MAX_BOXES)
        for start in reversed(starts):
            end = start + _length_in_braces(text[start : start + _MAX_ANSWER_CHARS + 1])
            if text[start:end].strip():
                return slice(start, end)
        if starts:
            break
    return None


def _length_in_braces(text: str) -> int:
    """The length of ``text`` before its first unmatched closing brace; 0 if there is no such brace."""
    depth = 1
    escaped = False
    for i, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return i
    return 0

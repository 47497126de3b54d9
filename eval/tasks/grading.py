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
    r"""Finds the last closed box's content in linear time. ``\fbox{}`` counts only without a ``\boxed{}``."""
    for box in _BOXES:
        starts = deque((match.end() for match in box.finditer(text)), maxlen=_MAX_BOXES)
        for start in reversed(starts):
            content = _braced(text[start : start + _MAX_ANSWER_CHARS + 1])
            if content:
                return content
        if starts:
            break
    return ""


def _braced(text: str) -> str:
    """The part of ``text`` before its first unmatched closing brace; "" if there is no such brace."""
    depth, escaped = 1, False
    for i, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[:i].strip()
    return ""

# SPDX-License-Identifier: Apache-2.0
"""Filters and graders of the task files in this folder. They limit their work, as responses may be hostile."""

import re
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from eval.tasks import sandbox
from eval.tasks.mathematics import MATHEMATICS

_MAX_ANSWER_CHARS = 1000
_MAX_BOXES = 100
_MAX_CODE_CHARS = 100_000
_FENCE = re.compile(r"^[ \t]*```[^\n]*$", re.MULTILINE)
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[^\n]*$", re.MULTILINE)
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


def code_blocks(responses: Responses, docs: Documents) -> list[list[str]]:
    """Returns the code of each response (see :func:`extract_code`)."""
    rows = zip(responses, docs, strict=True)
    return [[extract_code(text, doc["entry_point"]) for text in row] for row, doc in rows]


def passes_tests(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score is 1 if the code passes the problem's tests in the sandbox. The code stands behind the prompt,
    whose imports and helpers hold; only its imports from ``__future__`` stand before everything. Raises
    SandboxError if there is no sandbox."""
    code = results[0]
    if not code.strip() or len(code) > _MAX_CODE_CHARS:
        return {"score": 0.0}
    parts = (*_FUTURE.findall(code), doc["code"], _FUTURE.sub("", code), doc["test"])
    program = "\n".join((*parts, f"check({doc['entry_point']})"))
    return {"score": float(sandbox.run(program).passed)}


def names_target(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The score is 1 if the target stands in the response, not as a part of a longer word or number."""
    target = re.escape(doc["target"].strip())
    return {"score": float(re.search(rf"(?<!\w){target}(?!\w)", results[0]) is not None)}


def extract_code(text: str, entry_point: str) -> str:
    """The last fenced block that defines the function, else the last block, else all of the text. A block that
    was cut off counts."""
    parts = _FENCE.split(text)
    blocks = [block for block in parts[1::2] if block.strip()]
    defines = re.compile(rf"^[ \t]*def[ \t]+{re.escape(entry_point)}[ \t]*\(", re.MULTILINE)
    defining = [block for block in blocks if defines.search(block)]
    # A block within a list is indented.
    return textwrap.dedent((defining or blocks or [text])[-1])


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

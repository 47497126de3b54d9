# SPDX-License-Identifier: Apache-2.0
"""Filters and graders of the task files beside this. Responses are hostile: all is bounded."""

import atexit
import contextlib
import json
import re
import select
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.tasks import sandbox

_MAX_ANSWER_CHARS = 1000
_MAX_BOXES = 100
_MAX_CODE_CHARS = 100_000
_START_S, _COMPARE_S = 120.0, 15.0
_MEMORY_BYTES = 2 << 30
_BOXES = (re.compile(r"\\boxed ?\{"), re.compile(r"\\fbox ?\{"))
_FENCE = re.compile(r"^[ \t]*```[^\n]*$", re.MULTILINE)
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[^\n]*$", re.MULTILINE)

Responses = Sequence[Sequence[str]]
Documents = Sequence[Mapping[str, Any]]


def boxed(responses: Responses, _docs: Documents) -> list[list[str]]:
    r"""Content of the last ``\boxed{}`` that closes, "" without one."""
    return [[last_boxed(text) for text in row] for row in responses]


def stripped(responses: Responses, _docs: Documents) -> list[list[str]]:
    """Some tokenizers put a space before the first word when they decode piece by piece."""
    return [[text.strip() for text in row] for row in responses]


def code_blocks(responses: Responses, docs: Documents) -> list[list[str]]:
    """The last fenced block that defines the function, else the last one, else all."""
    return [
        [extract_code(text, doc["entry_point"]) for text in row]
        for row, doc in zip(responses, docs, strict=True)
    ]


def same(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {"score": float(results[0] == doc["target"].strip())}


def equal_mathematics(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """By text, else by math-verify."""
    answer = results[0].removesuffix(".").rstrip()
    right = answer == doc["target"] or bool(answer and MATHEMATICS.equal(doc["target"], answer))
    return {"score": float(right)}


def passes_tests(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Run the problem's tests in the sandbox, behind the prompt (whose imports and helpers hold) and
    the response; only imports from ``__future__`` stand before everything."""
    code = results[0]
    if not code.strip() or len(code) > _MAX_CODE_CHARS:
        return {"score": 0.0}
    future = _FUTURE.findall(code)
    parts = (*future, doc["prompt"], _FUTURE.sub("", code), doc["test"])
    program = "\n".join((*parts, f"check({doc['entry_point']})"))
    return {"score": float(sandbox.run(program).passed)}


def last_boxed(text: str) -> str:
    r"""Linear in the text; ``\fbox{}`` counts only in a text without ``\boxed{}``."""
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
    """What stands before the brace that closes one before ``text``."""
    depth, escaped = 1, False
    for i, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[:i].strip()
    return ""


def extract_code(text: str, entry_point: str) -> str:
    """A block that was cut off counts; without any fence all of the text is code."""
    parts = _FENCE.split(text)
    blocks = [block for block in parts[1::2] if block.strip()]
    defines = re.compile(rf"^[ \t]*def[ \t]+{re.escape(entry_point)}[ \t]*\(", re.MULTILINE)
    named = [block for block in blocks if defines.search(block)]
    # A block within a list is indented.
    return textwrap.dedent((named or blocks or [text])[-1])


class MathGrader:
    """math-verify in a child process, started when first needed and again after it was killed: a
    hostile exponent tower ends in C code that no signal handler interrupts, or eats all memory."""

    def __init__(self, limit_s: float = _COMPARE_S, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.limit_s, self.memory_bytes = limit_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, reference: str, answer: str) -> bool:
        """False also for what cannot be compared within the limits. Raises SandboxError: the child
        does not start."""
        if self._process is None:
            self._start()
        reply = self._ask({"reference": reference, "answer": answer}, self.limit_s)
        if not isinstance(reply, bool):
            # What is left of an exhausted process is not worth keeping.
            self.close()
        return reply is True

    def close(self) -> None:
        """End the child; a later comparison starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        worker, pipe = Path(__file__).with_name("math_worker.py"), subprocess.PIPE
        command = [sys.executable, "-I", str(worker), str(self.memory_bytes)]
        pipes: dict[str, Any] = dict(stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        # A new session: Ctrl-C reaches only the run, which closes this process later.
        self._process = subprocess.Popen(command, env={}, start_new_session=True, **pipes)
        # 1/2 is 0.5, or math-verify does not work here.
        if self._ask({"reference": "\\frac{1}{2}", "answer": "0.5"}, _START_S) is not True:
            self.close()
            raise sandbox.SandboxError("math-verify's process did not start")

    def _ask(self, job: Mapping[str, str], limit_s: float) -> Any:
        """The child's reply; None if it takes too long or dies."""
        assert self._process is not None
        jobs, replies = self._process.stdin, self._process.stdout
        assert jobs is not None and replies is not None
        with contextlib.suppress(OSError, ValueError):
            jobs.write(json.dumps(job).encode("ascii") + b"\n")
            jobs.flush()
            # The child writes each reply, a short line, at once.
            if select.select([replies], [], [], limit_s)[0]:
                return json.loads(replies.readline(4096))
        return None


MATHEMATICS = MathGrader()
atexit.register(MATHEMATICS.close)

# SPDX-License-Identifier: Apache-2.0
"""HumanEval: complete a function, judged by running its tests in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.tasks import sandbox
from eval.tasks.answers import after_thinking, shorten
from eval.tasks.rows import Hub, Row, load
from eval.tasks.task import Problem, Source, TaskError, Verdict

PROMPT = """\
Complete the following Python function. Give the whole function, with the imports it needs, in one \
```python code block.

```python
{prompt}
```"""
_FENCE = "```"
# Also right behind the mark of a list's item.
_OPENING = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?(?=```)")
_FUTURE = re.compile(
    r"^from[ \t]+__future__[ \t]+import[ \t]*(?:\([^()]{0,200}\)|[^(\n][^\n]*)", re.MULTILINE
)
_MAX_CODE_CHARS = 100_000


@dataclass(frozen=True)
class HumanEvalTask:
    """pass@1: the function passes its tests in its first version.

    Attributes:
        limits: what a program may use.
    """

    name: str = "humaneval"
    title: str = "HumanEval"
    measure: str = "accuracy"
    limits: sandbox.Limits = field(default_factory=sandbox.Limits)

    def load(self, source: Source) -> list[Problem]:
        """Rows as the hub has them: task_id, prompt, test, entry_point.

        Raises:
            TaskError: running code is not allowed or cannot be made safe here; a bad row; no such
                data set.
        """
        if not source.allow_code:
            raise TaskError(
                f"--tasks {self.name} runs code that the model wrote, in a sandbox; "
                "allow it with --allow-code-execution"
            )
        try:
            sandbox.check()
        except sandbox.SandboxError as error:
            raise TaskError(f"--tasks {self.name}: {error}") from error
        return load(self.name, source, Hub("openai/openai_humaneval", "openai_humaneval"), _problem)

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Run the response's code and the problem's tests.

        Raises:
            SandboxError: the sandbox that was there on loading is gone.
        """
        reference = problem.reference
        code = extract_code(after_thinking(response), reference["entry_point"])
        if code is None:
            return Verdict(False, 0.0, None, "no code found")
        if len(code) > _MAX_CODE_CHARS:
            return Verdict(False, 0.0, None, f"code longer than {_MAX_CODE_CHARS} characters")
        # The prompt comes first: its imports and helpers hold, and what the response defines again
        # replaces them. Only imports from __future__ must stand before everything.
        program = "\n".join(
            (
                *(match[0] for match in _FUTURE.finditer(code)),
                reference["prompt"],
                _FUTURE.sub("", code),
                reference["test"],
                f"check({reference['entry_point']})",
            )
        )
        outcome = sandbox.run(program, self.limits)
        return Verdict(outcome.passed, float(outcome.passed), shorten(code), outcome.note)

    def server_flags(self) -> Sequence[str]:
        return ()


def extract_code(text: str, entry_point: str) -> str | None:
    """The last fenced block that defines ``entry_point``, else the last one, else bare code."""
    blocks = _blocks(text)
    # No \s: it runs over line ends, in quadratic time over empty lines.
    defines = re.compile(rf"^[ \t]*def[ \t]+{re.escape(entry_point)}[ \t]*\(", re.MULTILINE)
    for block in reversed(blocks):
        if defines.search(block):
            return block
    if blocks:
        return blocks[-1]
    return text if defines.search(text) or text.startswith(("    ", "\t")) else None


def _blocks(text: str) -> list[str]:
    """What stands between lines that start with a fence; a last one may be cut off.

    Lines lose the indent of the fence, as far as they have it (CommonMark's rule).
    """
    blocks: list[str] = []
    lines: list[str] | None = None
    indent = 0
    for line in text.split("\n"):
        if lines is None:
            if opening := _OPENING.match(line):
                lines, indent = [], opening.end()
        elif line.lstrip().startswith(_FENCE):
            blocks.append("\n".join(lines))
            lines = None
        else:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    if lines:
        blocks.append("\n".join(lines))
    return [block for block in blocks if block.strip()]


def _problem(row: Row) -> Problem:
    reference = {name: row.text(name) for name in ("prompt", "test", "entry_point")}
    entry = reference["entry_point"]
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", entry):
        raise row.fault(f"field 'entry_point' is no name of a function: {shorten(entry, 40)!r}")
    prompt = PROMPT.format(prompt=reference["prompt"].strip("\n"))
    return Problem(row.id("humaneval", "task_id", "id"), prompt, reference)

# SPDX-License-Identifier: Apache-2.0
"""What a task is: problems to send and a grader for what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class TaskError(ValueError):
    """A task cannot be loaded or graded; the message names the file and line, or the option."""


@dataclass(frozen=True)
class Problem:
    """One request to send.

    Attributes:
        id: unique within its task and seed, stable between runs.
        prompt: the user message.
        reference: what the grader compares with; plain JSON values.
        group: a class of problems with an accuracy of its own, "" for none.
        extra: further fields of the request's body (``extra_body`` of the OpenAI client).
        max_tokens: this problem's own limit, None for the run's.
    """

    id: str
    prompt: str
    reference: Any
    group: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What a grader says.

    Attributes:
        correct: whether the response counts as right.
        score: in 0 to 1; 1.0 or 0.0 where a task knows only right and wrong.
        extracted: the answer found in the response, shortened, None if there is none.
        note: why, where that is not plain ("no \\boxed{} found", "timed out").
    """

    correct: bool
    score: float
    extracted: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Source:
    """Where problems come from, and how many.

    Attributes:
        path: a local JSONL file; None: the Hugging Face hub, by the task's own name.
        seed: chooses problems where a task generates or shuffles them.
        limit: the first so many problems only; None for all.
        model: folder or hub name of the model, for tasks that must know its tokens.
        allow_code: whether the operator allowed running code that a model wrote.
    """

    path: Path | None = None
    seed: int = 0
    limit: int | None = None
    model: str = ""
    allow_code: bool = False


class Task(Protocol):
    """A named set of problems with its grader; one instance serves any number of runs.

    Attributes:
        name: as in ``--tasks``, ``[a-z0-9_]+``.
        title: for tables and pictures.
        measure: what ``Verdict.score`` is: "accuracy", "F1", or "reproduced" of a replay.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def measure(self) -> str: ...

    def load(self, source: Source) -> list[Problem]:
        """The problems, in the order to send them.

        Raises:
            TaskError: a file that cannot be read, a bad line, or no such data set.
        """

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Judge one response, reasoning included; any text whatsoever, in bounded time.

        Raises:
            TaskError, SandboxError: what grades cannot be started; says nothing of the response.
        """

    def server_flags(self) -> Sequence[str]:
        """Flags that a server needs to answer this task at all."""

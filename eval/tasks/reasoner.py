# SPDX-License-Identifier: Apache-2.0
"""The embedded reasoner's own task: generated problems, some with a wrong draft to correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.tasks.answers import shorten
from eval.tasks.task import Problem, Source, TaskError, Verdict
from eval.tiny_reasoner import task as reasoner

MAX_TOKENS = 1500
_DEFAULT_LIMIT = 500
_MAX_LIMIT = 100_000
# Many times what MAX_TOKENS words take.
_MAX_RESPONSE_CHARS = 1 << 16


@dataclass(frozen=True)
class ReasonerTask:
    """Held-out problems; ``source.seed`` chooses them. Sampling is greedy: see ``sampling_for``."""

    name: str = "tiny_reasoner"
    title: str = "Embedded reasoner"
    measure: str = "accuracy"

    def load(self, source: Source) -> list[Problem]:
        """``source.limit`` problems, 500 without one, in groups "error" and "clean".

        Raises:
            TaskError: a file was given, or too many problems were asked for.
        """
        return [
            Problem(
                f"{self.name}-{source.seed}-{i}",
                problem.prompt,
                problem.answer,
                "error" if problem.error else "clean",
                max_tokens=MAX_TOKENS,
            )
            for i, problem in enumerate(reasoner.generate(source.seed, self.count(source)))
        ]

    def count(self, source: Source) -> int:
        """How many problems are asked for; raises as :meth:`load`."""
        if source.path is not None:
            raise TaskError(f"--data {self.name}={source.path}: this task's problems are generated")
        count = _DEFAULT_LIMIT if source.limit is None else source.limit
        if count > _MAX_LIMIT:
            raise TaskError(f"--limit is at most {_MAX_LIMIT} for {self.name}, not {count}")
        return count

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Judge the last boxed digit; the note tells of assignments that the prompt does not have."""
        text = response[-_MAX_RESPONSE_CHARS:]
        asked = reasoner.Problem(
            problem.prompt, problem.reference, problem.group == "error", "", 0, (), False
        )
        answer = reasoner.extract_answer(text)
        notes = []
        if answer is None:
            notes.append("no \\boxed{ } found")
        if not reasoner.follows_prompt(text, asked):
            notes.append("states an assignment that is not the prompt's")
        correct = reasoner.grade(text, asked)
        found = None if answer is None else shorten(answer)
        return Verdict(correct, float(correct), found, "; ".join(notes))

    def server_flags(self) -> Sequence[str]:
        return ()

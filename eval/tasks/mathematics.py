# SPDX-License-Identifier: Apache-2.0
"""AIME, MATH-500 and GSM8K: a question, and an answer in ``\\boxed{}``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eval.tasks import math_grading
from eval.tasks.answers import after_thinking, last_boxed, shorten
from eval.tasks.rows import Hub, Row, load
from eval.tasks.task import Problem, Source, Verdict

# As the cards of DeepSeek-R1 and QwQ-32B recommend for mathematics.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
MAX_ANSWER_CHARS = 1000


@dataclass(frozen=True)
class MathTask:
    """Problems whose answers math-verify compares.

    Attributes:
        hub: where the data set lies.
        largest: answers are integers from 0 to this, None for anything in LaTeX.
        worked: references end with ``#### ANSWER``, as GSM8K's solutions do.
    """

    name: str
    title: str
    hub: Hub
    largest: int | None = None
    worked: bool = False
    measure: str = "accuracy"

    def load(self, source: Source) -> list[Problem]:
        """Rows ``{id, question, answer}``, or as the data set's own files have them.

        Raises:
            TaskError: a bad row, no such data set, or math-verify is missing.
        """
        math_grading.require()
        return load(self.name, source, self.hub, self._problem)

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Judge the last ``\\boxed{}`` after the reasoning; takes seconds at most."""
        answer = last_boxed(after_thinking(response), MAX_ANSWER_CHARS)
        if answer is None:
            return Verdict(
                False, 0.0, None, f"no \\boxed{{}} of up to {MAX_ANSWER_CHARS} characters"
            )
        # A sentence's end, inside of the box.
        answer = answer.removesuffix(".").rstrip()
        if not answer:
            return Verdict(False, 0.0, "", "empty \\boxed{}")
        note, correct = "", answer == problem.reference
        if not correct:
            correct, note = math_grading.GRADER.equal(problem.reference, answer)
        return Verdict(correct, float(correct), shorten(answer), note)

    def server_flags(self) -> Sequence[str]:
        return ()

    def _problem(self, row: Row) -> Problem:
        question = row.text("question", "problem", "Problem")
        answer = row.words("answer", "Answer").strip()
        if self.worked:
            answer = answer.rpartition("####")[2].strip().replace(",", "")
        if self.largest is not None:
            answer = self._integer(row, answer)
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            raise row.fault(f"an answer has 1 to {MAX_ANSWER_CHARS} characters, not {len(answer)}")
        return Problem(
            row.id(self.name, "id", "ID", "unique_id"), f"{question}\n\n{INSTRUCTION}", answer
        )

    def _integer(self, row: Row, answer: str) -> str:
        digits = re.fullmatch(r"[0-9]{1,6}", answer)
        if digits is None or int(answer) > (self.largest or 0):
            raise row.fault(
                f"answers of {self.name} are integers from 0 to {self.largest}, "
                f"not {shorten(answer, 40)!r}"
            )
        return str(int(answer))


AIME24 = MathTask("aime24", "AIME 2024", Hub("HuggingFaceH4/aime_2024", split="train"), 999)
AIME25 = MathTask("aime25", "AIME 2025", Hub("math-ai/aime25"), 999)
MATH500 = MathTask("math500", "MATH-500", Hub("HuggingFaceH4/MATH-500"))
GSM8K = MathTask("gsm8k", "GSM8K", Hub("openai/gsm8k", "main"), worked=True)

# SPDX-License-Identifier: Apache-2.0
"""GPQA Diamond: four choices in an order of their own for every problem."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from eval.tasks.answers import after_thinking
from eval.tasks.rows import Hub, Row, load
from eval.tasks.task import Problem, Source, Verdict

LETTERS = "ABCD"
# OpenAI's simple-evals asks so, and most published numbers come from it.
PROMPT = """\
Answer the following multiple choice question. The last line of your response should be of the \
following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step \
before answering.

{question}

A) {A}
B) {B}
C) {C}
D) {D}"""
_MARKS = r"[^A-Za-z0-9]{0,20}"
_WRAPPERS = r"(?:(?:boxed|text|textbf|mathrm|mathbf)[^A-Za-z0-9]{1,4}){0,2}"
_ANSWER = re.compile(
    rf"(?:(?i:answer)(?:\s{{1,3}}is)?{_MARKS}|\\boxed\s?\{{[^A-Za-z0-9]{{0,4}}){_WRAPPERS}"
    r"([A-D])(?![A-Za-z0-9])"
)
_LONE = re.compile(r"[^A-Za-z0-9]{0,10}([A-D])[^A-Za-z0-9]{0,10}")
# Answers stand at the end; what comes long before it is not looked at.
_TAIL_CHARS = 20_000


@dataclass(frozen=True)
class GpqaTask:
    """Multiple choice, graded by the letter."""

    name: str = "gpqa_diamond"
    title: str = "GPQA Diamond"
    measure: str = "accuracy"

    def load(self, source: Source) -> list[Problem]:
        """Rows as the hub has them, or ``{id, question, answer, wrong}`` with three wrong answers.

        ``source.seed`` and the problem's id decide the order of the choices.

        Raises:
            TaskError: a bad row, or no such data set (on the hub it asks for consent first).
        """
        hub = Hub("Idavidrein/gpqa", "gpqa_diamond", "train")
        return load(self.name, source, hub, lambda row: _problem(row, source.seed))

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Judge the last letter that is called the answer, or a last line of one letter."""
        letter = extract_letter(after_thinking(response)[-_TAIL_CHARS:])
        if letter is None:
            return Verdict(False, 0.0, None, "no 'Answer: LETTER' found")
        correct = letter == problem.reference
        return Verdict(correct, float(correct), letter)

    def server_flags(self) -> Sequence[str]:
        return ()


def extract_letter(text: str) -> str | None:
    """A to D, or None; time is linear in the text."""
    letter = None
    for match in _ANSWER.finditer(text):
        letter = match[1]
    if letter is None:
        lone = _LONE.fullmatch(text.strip().rpartition("\n")[2])
        letter = lone[1] if lone else None
    return letter


def _problem(row: Row, seed: int) -> Problem:
    right = row.text("answer", "Correct Answer").strip()
    names = [f"Incorrect Answer {i}" for i in (1, 2, 3)]
    wrong = row.texts("wrong") if row.has("wrong") else [row.text(name) for name in names]
    if len(wrong) != 3:
        raise row.fault(f"field 'wrong' holds {len(wrong)} answers, not 3")
    name = row.id("gpqa_diamond", "id", "Record ID")
    order = [0, 1, 2, 3]
    random.Random(f"{seed}/{name}").shuffle(order)
    choices = [right, *(text.strip() for text in wrong)]
    listed = {letter: choices[i] for letter, i in zip(LETTERS, order, strict=True)}
    question = row.text("question", "Question").strip()
    return Problem(name, PROMPT.format(question=question, **listed), LETTERS[order.index(0)])

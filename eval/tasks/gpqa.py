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
# Nothing here matches across the end of a line: after a heading "Answer" anything may follow.
_MARKS = r"[^A-Za-z0-9\n]{0,20}"
_NAME = r"(?i:answer(?: option| choice)?|(?:correct|right|best|final) (?:option|choice))"
_WRAPPERS = r"(?:(?:boxed|text|textbf|mathrm|mathbf)[^A-Za-z0-9\n]{1,4}){0,2}"
_BEFORE = rf"{_WRAPPERS}(?:(?i:option|choice)[^A-Za-z0-9\n]{{1,4}})?"
# Not "Carbon", "C_6" or "D-glucose".
_LETTER = r"[A-D](?![A-Za-z0-9]|[-'_^][A-Za-z0-9{])"
# No words behind it: "a" is one itself.
_SMALL = r"[a-d](?![ \t]*[-'_^A-Za-z0-9])"
# The first that is found anywhere counts, in its last place: what the prompt asks for, a box, prose.
_ANSWERS = tuple(
    re.compile(expression)
    for expression in (
        rf"{_NAME}[^A-Za-z0-9\n:]{{0,10}}:{_MARKS}{_BEFORE}({_LETTER}|{_SMALL})",
        rf"\\(?:boxed|fbox) ?\{{[^A-Za-z0-9\n]{{0,4}}{_BEFORE}({_LETTER})",
        rf"{_NAME}[ \t]{{1,3}}is{_MARKS}{_BEFORE}({_LETTER})",
    )
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
        """Judge the last letter after "Answer:", else boxed, else "answer is", else alone at the end."""
        letter = extract_letter(after_thinking(response)[-_TAIL_CHARS:])
        if letter is None:
            return Verdict(False, 0.0, None, "no 'Answer: LETTER' found")
        correct = letter == problem.reference
        return Verdict(correct, float(correct), letter)

    def server_flags(self) -> Sequence[str]:
        return ()


def extract_letter(text: str) -> str | None:
    """A to D, or None; time is linear in the text."""
    for expression in _ANSWERS:
        letters = [match[1] for match in expression.finditer(text)]
        if letters:
            return letters[-1].upper()
    lone = _LONE.fullmatch(text.strip().rpartition("\n")[2])
    return lone[1] if lone else None


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

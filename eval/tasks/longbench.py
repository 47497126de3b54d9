# SPDX-License-Identifier: Apache-2.0
"""HotpotQA and TREC as LongBench asks and scores them (Bai et al. 2023, github.com/THUDM/LongBench).

Prompts are those of its ``dataset2prompt.json``, sent as a chat message; scores those of its
``metrics.py`` and ``eval.py``. It lets a model write 32 (HotpotQA) or 64 (TREC) tokens. A reasoning
model needs many more before its answer, so the run's own limit holds, and only so many *words*
after ``</think>`` count: a word is a token or more, so the bound is never tighter than LongBench's.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.tasks.answers import after_thinking, shorten
from eval.tasks.rows import Hub, Row, load
from eval.tasks.task import Problem, Source, Verdict

_HOTPOTQA_ORDER = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_PREDICTION_CHARS = 10_000


@dataclass(frozen=True)
class LongBenchTask:
    """One LongBench data set.

    Attributes:
        template: the prompt with places for ``{context}`` and ``{input}``.
        max_words: how much of the answer counts.
        score: from prediction, one right answer and the classes, 0 to 1; the best answer counts.
        first_line: only the first line of the answer counts.
        classes: rows carry ``all_classes``.
    """

    name: str
    title: str
    measure: str
    template: str
    max_words: int
    score: Callable[[str, str, Sequence[str]], float]
    first_line: bool = False
    classes: bool = False

    def load(self, source: Source) -> list[Problem]:
        """Rows with input, context, answers (or question, answer), and all_classes for TREC.

        Raises:
            TaskError: a bad row, or no such data set.
        """
        member = f"data/{self.name}.jsonl"
        hub = Hub("THUDM/LongBench", self.name, archive="data.zip", member=member)
        return load(self.name, source, hub, self._problem)

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Score what follows the reasoning; ``correct`` is a full score."""
        prediction = after_thinking(response).strip()[:_MAX_PREDICTION_CHARS]
        if self.first_line:
            prediction = prediction.split("\n")[0]
        prediction = _first_words(prediction, self.max_words)
        if not prediction:
            return Verdict(False, 0.0, None, "no answer")
        reference: dict[str, Any] = problem.reference
        score = max(
            self.score(prediction, answer, reference["classes"]) for answer in reference["answers"]
        )
        return Verdict(score == 1.0, score, shorten(prediction))

    def server_flags(self) -> Sequence[str]:
        return ()

    def _problem(self, row: Row) -> Problem:
        # No str.format: passages are full of braces.
        parts = {"{context}": row.text("context"), "{input}": row.text("input", "question")}
        pieces = re.split(r"(\{context\}|\{input\})", self.template)
        prompt = "".join(parts.get(piece, piece) for piece in pieces)
        answers = row.texts("answers", "answer")
        classes = row.texts("all_classes") if self.classes else []
        missing = [answer for answer in answers if self.classes and answer not in classes]
        if missing:
            raise row.fault(f"answer {shorten(missing[0], 40)!r} is not among 'all_classes'")
        return Problem(
            row.id(self.name, "_id", "id"), prompt, {"answers": answers, "classes": classes}
        )


def normalise_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces (LongBench ``normalize_answer``)."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 over the words of both, repeats counted (LongBench ``qa_f1_score``)."""
    found, wanted = normalise_answer(prediction).split(), normalise_answer(answer).split()
    same = (Counter(found) & Counter(wanted)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named, 0 if the right one is not (``classification_score``).

    Classes that are part of the right one's name do not count as named. LongBench takes them out
    of the list while walking it, so one right after another stays; so it does here. Its fallback by
    similarity is never reached there, and is left out.
    """
    named = [name for name in classes if name in prediction]
    i = 0
    while i < len(named):
        if named[i] in answer and named[i] != answer:
            del named[i]
        i += 1
    return 1.0 / len(named) if answer in named else 0.0


def _first_words(text: str, count: int) -> str:
    match = re.match(rf"(?:\S+\s+){{0,{count - 1}}}\S+", text.strip())
    return match[0] if match else ""


HOTPOTQA = LongBenchTask(
    "hotpotqa",
    "HotpotQA (LongBench)",
    "F1",
    f"{_HOTPOTQA_ORDER}\n\nThe following are given passages.\n{{context}}\n\n{_HOTPOTQA_ORDER}\n\n"
    "Question: {input}\nAnswer:",
    32,
    qa_f1,
)
TREC = LongBenchTask(
    "trec",
    "TREC (LongBench)",
    "accuracy",
    "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}",
    64,
    classification,
    first_line=True,
    classes=True,
)

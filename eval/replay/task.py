# SPDX-License-Identifier: Apache-2.0
"""Recorded responses as a task: what comes back must be the record, word for word.

Accuracy then says that the server lost no token, and nothing about the model.
Throughput, memory and how much was shared are what a replay is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.tasks import rows
from eval.tasks.task import Problem, Source, TaskError, Verdict
from eval.tokenizers import TokenizerError, load_tokenizer

_MAX_RESPONSE_CHARS = 4 << 20
#: Tokens between two pieces of a streamed response: parsing each token's piece in the
#: client takes as much of a small machine as the decode step does.
_STREAM_INTERVAL = 16


@dataclass(frozen=True)
class ReplayTask:
    """Rows ``{id, question, response}``; there is no data set on a hub.

    With a limit, responses are taken evenly from the shortest to the longest. The
    longest are sent first, as offline loads are, so that a run does not end with one
    long response alone in a batch.
    """

    name: str
    title: str
    measure: str = "reproduced"

    def load(self, source: Source) -> list[Problem]:
        """The recorded responses in tokens of ``source.model``.

        Raises:
            TaskError: no file, a bad row, or a model whose tokenizer cannot be had.
        """
        if source.path is None:
            raise TaskError(
                f"--tasks {self.name}: needs recorded responses, --data {self.name}=FILE.jsonl"
            )
        try:
            tokenizer = load_tokenizer(source.model)
        except TokenizerError as error:
            raise TaskError(f"--model: {error}") from error
        everything = replace(source, limit=None)
        problems = rows.load(
            self.name, everything, rows.Hub(""), lambda row: self._problem(row, tokenizer)
        )
        problems.sort(key=lambda problem: (problem.max_tokens or 0, problem.id), reverse=True)
        limit = len(problems) if source.limit is None else min(source.limit, len(problems))
        return [problems[(2 * i + 1) * len(problems) // (2 * limit)] for i in range(limit)]

    def _problem(self, row: rows.Row, tokenizer: Any) -> Problem:
        # Brings SGLang in, which whoever only lists tasks need not load.
        from eval.replay.forcing import forced_request

        response = row.text("response")
        token_ids = tokenizer.encode(response, add_special_tokens=False, verbose=False)
        if not token_ids:
            raise row.fault("a response without tokens")
        return Problem(
            id=row.id(self.name, "id"),
            prompt=row.text("question"),
            reference=tokenizer.decode(token_ids),
            extra=forced_request(token_ids),
            max_tokens=len(token_ids),
        )

    def grade(self, problem: Problem, response: str) -> Verdict:
        """Whether the response is the record, but for white space around it.

        Some tokenizers put a space before the first word when they decode piece by piece.
        """
        text, record = response[:_MAX_RESPONSE_CHARS].strip(), problem.reference.strip()
        same = text == record
        note = "" if same else f"differs at character {_first_difference(text, record)}"
        return Verdict(same, float(same), None, note)

    def server_flags(self) -> Sequence[str]:
        return ("--enable-custom-logit-processor", "--stream-interval", str(_STREAM_INTERVAL))


AIME24_REPLAY = ReplayTask("aime24_replay", "AIME 2024, replayed")
MATH500_REPLAY = ReplayTask("math500_replay", "MATH-500, replayed")


def _first_difference(one: str, other: str) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))

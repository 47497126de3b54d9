# SPDX-License-Identifier: Apache-2.0
"""Replays that do not fit, and responses that were cut short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.replay.model import train_tokenizer
from eval.runs.folder import RunError
from eval.runs.options import RunOptions
from eval.runs.problems import ProblemSet
from eval.runs.records import Response
from eval.runs.room import cut_short, refuse_what_cannot_fit
from eval.tasks.task import Problem, Source, Verdict


class Replays:
    """Two problems, the response of one of which is forced."""

    name, title, measure = "t", "T", "reproduced"

    def load(self, source: Source) -> list[Problem]:
        forced = {"ignore_eos": True}
        return [Problem("free", "x" * 999, ""), Problem("p", "abc", "", "", forced, 100)]

    def grade(self, problem: Problem, response: str) -> Verdict:
        return Verdict(response == problem.reference, 0.0)

    def server_flags(self) -> Sequence[str]:
        return ()


def test_a_replay_needs_room_for_prompt_and_record(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["zzz"])
    tokenizer.save_pretrained(tmp_path)
    problems = ProblemSet(RunOptions(model=str(tmp_path), tasks=("t",)), {"t": Replays()})
    # <|user|>, a, b, c, <|assistant|>, 100 forced tokens, and two slots that SGLang keeps.
    refuse_what_cannot_fit(problems, "t", 107)
    with pytest.raises(
        RunError, match=r"--kv-budget: t: problem 'p' needs at least 107 .* got 106"
    ):
        refuse_what_cannot_fit(problems, "t", 106)


def test_cut_short_is_less_than_what_was_asked_for() -> None:
    def response(problem: str, tokens: int, reason: str, error: str | None = None) -> Response:
        return Response(problem, 0, "r", "", 5, tokens, 0.0, 0.1, 1.0, reason, error)

    rows = [
        response("a", 99, "length"),
        response("b", 100, "length"),
        response("c", 50, "stop"),
        response("d", 50, "length", "broken"),
        response("unknown", 50, "length"),
    ]
    assert cut_short(rows, dict.fromkeys("abcd", 100)) == 1

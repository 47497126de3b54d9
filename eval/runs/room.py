# SPDX-License-Identifier: Apache-2.0
"""Whether responses fit into a server at all; SGLang shortens those that do not and says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.runs.folder import RunError
from eval.runs.problems import ProblemSet, forced, model_path
from eval.runs.records import Leg, Response
from eval.tasks.task import Problem
from eval.tokenizers import load_tokenizer

#: SGLang leaves so many slots of its pool free after prompt and longest response.
_SPARE_SLOTS = 2


def refuse_what_cannot_fit(problems: ProblemSet, task: str, slots: int) -> None:
    """A replay cut short would be no replay.

    Args:
        problems: of the run; only those whose response is forced are looked at.
        task: which of its tasks.
        slots: of the servers, wished for or real.

    Raises:
        RunError: prompt and forced tokens of one of them need more than ``slots``.
    """
    asked = {
        p.id: p for (name, _), row in problems.all_measured.items() if name == task for p in row
    }
    replayed = [problem for problem in asked.values() if forced(problem)]
    if not replayed:
        return
    tokenizer = load_tokenizer(model_path(problems.options))
    for problem in sorted(replayed, key=lambda one: one.max_tokens or 0, reverse=True):
        needed = _prompt_tokens(tokenizer, problem) + (problem.max_tokens or 0) + _SPARE_SLOTS
        if needed > slots:
            raise RunError(
                f"--kv-budget: {task}: problem {problem.id!r} needs at least {needed} KV slots for its "
                f"prompt and its {problem.max_tokens} forced tokens, got {slots}"
            )


def warnings(slots: int, wanted: int | None, longest: int) -> list[str]:
    """What an operator should know before the requests of a cell are sent.

    Args:
        slots: KV slots of the server.
        wanted: those it was asked to have.
        longest: greatest ``max_tokens`` of the requests.
    """
    found = []
    if wanted is not None and slots < wanted:
        found.append(f"the server has {slots} KV slots, not the {wanted} of --kv-budget")
    if longest >= slots:
        found.append(
            f"max_tokens is {longest}, the server has {slots} KV slots: longer responses are cut short"
        )
    return found


def faults(leg: Leg, responses: Sequence[Response], limits: dict[str, int]) -> list[str]:
    """What did not fit into a leg, and what its server did not give back.

    Args:
        leg: which one.
        responses: of the cell.
        limits: ``max_tokens`` by problem.
    """
    found = []
    if leg.leaked_slots:
        found.append(f"{leg.leaked_slots} KV slots leaked")
    where = "the model's context or the KV slots"
    if leg.cut_prompts:
        found.append(f"{leg.cut_prompts} prompts were cut: longer than {where}")
    cut = cut_short([row for row in responses if row.leg == leg.leg], limits)
    if cut:
        found.append(f"{cut} responses were cut before max_tokens: {where} were full")
    return found


def cut_short(responses: Sequence[Response], limits: dict[str, int]) -> int:
    """Complete responses that ended by length before ``max_tokens``, given by problem."""
    return sum(
        row.finish_reason == "length" and row.output_tokens < limits.get(row.problem_id, 0)
        for row in responses
        if row.error is None
    )


def _prompt_tokens(tokenizer: Any, problem: Problem) -> int:
    messages = [{"role": "user", "content": problem.prompt}]
    return len(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )

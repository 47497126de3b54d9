# SPDX-License-Identifier: Apache-2.0
"""From the responses of a cell to its results; needs no server and can be done again."""

from __future__ import annotations

from collections.abc import Sequence

from eval.runs.folder import Cell
from eval.runs.problems import forced
from eval.runs.records import Response, Result
from eval.tasks.task import Problem, Task
from eval.tasks.thinking import with_opened_thinking


def grade_cell(
    cell: Cell, task: Task, problems: Sequence[Problem], opens_thinking: bool = False
) -> list[Result]:
    """Grade what a cell has, one result for each problem that was sent, in the problems' order.

    A request that failed for good is a wrong answer: leaving it out would flatter the
    method that fails most.

    Args:
        cell: where the responses are and the results go.
        task: grades.
        problems: of the cell.
        opens_thinking: whether the model's chat template begins each response with
            ``<think>``, which then is in no response.
    """
    answered = cell.answered()
    failed = {row.problem_id: row for row in cell.responses() if row.error is not None}
    results = []
    for problem in problems:
        if problem.id in answered:
            results.append(_grade(task, problem, answered[problem.id], opens_thinking))
        elif problem.id in failed:
            note = f"no response: {failed[problem.id].error}"[:500]
            results.append(Result(problem.id, False, 0.0, None, note, problem.group, 0))
    cell.write_results(results)
    return results


def _grade(task: Task, problem: Problem, response: Response, opens_thinking: bool) -> Result:
    text = response.text
    if opens_thinking and not forced(problem):
        text = with_opened_thinking(text)
    verdict = task.grade(problem, text)
    return Result(
        problem_id=problem.id,
        correct=verdict.correct,
        score=verdict.score,
        extracted=verdict.extracted,
        note=verdict.note,
        group=problem.group,
        output_tokens=response.output_tokens,
    )

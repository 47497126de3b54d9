# SPDX-License-Identifier: Apache-2.0
"""All tasks by name."""

from __future__ import annotations

from eval.replay.task import AIME24_REPLAY, MATH500_REPLAY
from eval.tasks.gpqa import GpqaTask
from eval.tasks.humaneval import HumanEvalTask
from eval.tasks.longbench import HOTPOTQA, TREC
from eval.tasks.mathematics import AIME24, AIME25, GSM8K, MATH500
from eval.tasks.reasoner import ReasonerTask
from eval.tasks.reasoner_long import LongReasonerTask
from eval.tasks.task import Task, TaskError

_ALL: tuple[Task, ...] = (
    AIME24,
    AIME25,
    MATH500,
    GSM8K,
    GpqaTask(),
    HumanEvalTask(),
    HOTPOTQA,
    TREC,
    ReasonerTask(),
    LongReasonerTask(),
    AIME24_REPLAY,
    MATH500_REPLAY,
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def find_task(name: str) -> Task:
    """
    Raises:
        TaskError: there is no such task; names those that there are.
    """
    try:
        return TASKS[name]
    except KeyError:
        known = ", ".join(sorted(TASKS))
        raise TaskError(f"--tasks: no task {name[:80]!r}; there are {known}") from None

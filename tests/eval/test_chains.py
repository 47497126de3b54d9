# SPDX-License-Identifier: Apache-2.0
"""Tests word problems that small models solve and check."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

from eval.chains import STEPS, chain, rows
from eval.small_reasoner.task import HIGHEST
from eval.tasks.harness import EvalTask, Source


def test_a_solution_is_right_and_repeated() -> None:
    for seed in range(200):
        made = chain(random.Random(seed), 8)
        assert len(made.facts) == len(made.solution) == 9
        for step in made.solution[1:]:
            [(first, sign, second, result)] = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", step)
            left = int(first)
            right = int(second)
            assert int(result) == {"+": left + right, "-": left - right, "*": left * right}[sign]
            assert 1 <= int(result) <= HIGHEST
        assert made.solution[-1].endswith(f"= {made.answer} {made.items}.")
        assert all(made.response.count(step) == 3 for step in made.solution)
        assert f"\\boxed{{{made.answer}}}" in made.response


def test_a_run_reads_what_the_command_prints(tmp_path: Path) -> None:
    """The example is an earlier turn of each prompt. The number of steps alternates."""
    command = [sys.executable, "-m", "eval.chains", "6", "--seed", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = [json.loads(line) for line in printed.splitlines()]
    assert made == list(rows(6, 3)) and len({row["question"] for row in made}) == 6
    assert [row["question"].count(". ") for row in made] == [STEPS[0] + 1, STEPS[1] + 1] * 3
    file = tmp_path / "chains.jsonl"
    file.write_text(printed)
    task = EvalTask("gsm8k", Source(file=str(file)))
    for problem, row in zip(task.problems, made, strict=True):
        asked, shown, last = problem.messages
        assert (asked["role"], shown["role"], last["role"]) == ("user", "assistant", "user")
        assert shown["content"] == row["examples"][0]["response"]
        assert last["content"].startswith(row["question"])
    answers = [f"\\boxed{{{row['answer']}}}" for row in made]
    found = task.evaluate([*answers[:-1], "\\boxed{0}"], False)
    assert [found[problem.id].score for problem in task.problems] == [1.0] * 5 + [0.0]

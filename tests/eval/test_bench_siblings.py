# SPDX-License-Identifier: Apache-2.0
"""What the bench of siblings makes of several answers to one problem."""

import dataclasses

import pytest

from eval.bench.siblings import majority
from tests.eval.peer import result


def test_a_majority_is_of_one_problem_and_its_answer() -> None:
    answers: dict[str, str | None] = {
        "p.0": "4", "p.1": "3", "p.2": "3", "q.0": "4", "q.1": "5", "r.0": "4",
    }  # fmt: skip
    answers |= {"s.0": None, "s.1": None, "s.2": "4"}
    found = [dataclasses.replace(result(at, x == "4"), extracted=x) for at, x in answers.items()]
    assert majority(found) == pytest.approx(2 / 4)

# SPDX-License-Identifier: Apache-2.0
"""Tests the problems of ``eval/small_reasoner``, and merging of a LoRA adapter into a model."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.small_reasoner.__main__ import write
from eval.small_reasoner.task import CHANGED, NOTED, Difficulty, make_problem
from eval.tasks.harness import EvalTask, Source
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate, split_of

_SUM = re.compile(r"(\d+) ([+-]) (\d+) = (-?\d+)")


@pytest.mark.parametrize(
    "difficulty", [Difficulty(), Difficulty(2, 6, 1, 6, shuffled=True, fewer=True)]
)
def test_a_reference_response_computes_and_corrects_what_it_says(difficulty: Difficulty) -> None:
    errors = 0
    rng = random.Random(7)
    for problem in (make_problem(rng, difficulty) for _ in range(200)):
        for x, sign, y, result in _SUM.findall(problem.response):
            assert int(result) == int(x) + (int(y) if sign == "+" else -int(y)) >= 0
        first, last = problem.answer.split(" then ")
        sums = re.findall(r"Together .* = (\d+) ", problem.response)
        assert (sums[0], sums[-1]) == (first, last) and len(set(sums[1:])) == 1
        marks = [str(mark).partition("{")[0].strip() for mark in (NOTED, CHANGED)]
        said = [mark in problem.response for mark in marks]
        assert said[1] == problem.error and said[0] >= problem.error
        assert ("A note says" in problem.prompt) == said[0]
        errors += problem.error
    assert 70 < errors < 130


def test_problems_of_a_run_are_held_out_and_graded() -> None:
    problems = EvalTask("small_reasoner", Source(seed=3, limit=30)).problems
    made = {one.prompt: one for one in generate(3, 30, make=make_problem)}
    assert [one.messages[-1]["content"] for one in problems] == list(made)
    assert {split_of(prompt) for prompt in made} == {"test"}
    task = EvalTask("small_reasoner", Source(seed=3, limit=30))
    texts = [one.response for one in made.values()]
    texts[0] = texts[0].replace(" then ", " than ")
    grades = task.evaluate(texts, opens_thinking=False)
    assert [grade.score for grade in grades.values()] == [0.0] + [1.0] * 29


def test_the_folder_is_the_model_with_its_adapter(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    made = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    made.save_pretrained(str(tmp_path / "adapter"))
    write(CHECKPOINT, tmp_path / "adapter", tmp_path / "merged")
    tokens = torch.tensor([[5, 6, 7, 8]])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, made(tokens).logits, atol=0.2, rtol=0)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 0

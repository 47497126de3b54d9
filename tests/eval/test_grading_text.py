# SPDX-License-Identifier: Apache-2.0
"""Letters, words, classes, code and the embedded reasoner's digits."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks import sandbox
from eval.tasks.humaneval import HumanEvalTask, extract_code
from eval.tasks.longbench import HOTPOTQA, TREC, classification, normalise_answer, qa_f1
from eval.tasks.registry import TASKS, find_task
from eval.tasks.task import Problem, Source, Verdict
from eval.tiny_reasoner.task import generate

GPQA = find_task("gpqa_diamond")
TINY = find_task("tiny_reasoner")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: C", "C"),
        ("answer: c", "C"),
        ("Answer: c) 5 m", "C"),
        ("Answer: a", "A"),
        ("Answer: a mystery", None),
        ("Answer: d-orbitals", None),
        ("Answer: D-glucose", None),
        ("**Answer**: (b)", "B"),
        ("Answer: Option D", "D"),
        ("Answer: \\text{Option D}", "D"),
        ("Correct option: B", "B"),
        ("The correct choice is (B).", "B"),
        ("The answer is option C", "C"),
        ("So the answer is Choice **C**.", "C"),
        ("Answer: C\n\nNote that answer B is wrong.", "C"),
        ("Answer: C\n\nThe answer is not B, the answer is A.", "C"),
        ("Answer: C, and not \\boxed{B}", "C"),
        ("The answer is A? No: \\boxed{B}", "B"),
        ("### Answer\n\nA detailed look shows the product is D.", None),
        ("Answer:\n\nB is what remains of the sample.", None),
        ("The answer is\nA thing of beauty", None),
        ("I looked at answer B.", None),
        ("\\boxed{C_6H_6}", None),
        ("\\boxed{\\text{Option C}}", "C"),
        ("<think>Answer: A</think>\nAnswer: C", "C"),
        ("Answer: A ... no.\n\n**Answer: C**", "C"),
        ("**Answer:** C", "C"),
        ("Answer: $C$", "C"),
        ("Answer: (C) because", "C"),
        ("Answer: $\\boxed{C}$", "C"),
        ("Answer: \\text{C}", "C"),
        ("so \\boxed{C}.", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("\\boxed{\\textbf{(C)}}", "C"),
        ("The answer is C.", "C"),
        ("The correct answer is **C)** 5 m", "C"),
        ("The answer is a mystery", None),
        ("Answer: Carbon", None),
        ("Answer: ABCD", None),
        ("Answer: $LETTER", None),
        ("Answer: E", None),
        ("Because of that\nC", "C"),
        ("Because of that\n(C).", "C"),
        ("C is not B", None),
        ("", None),
        ("<think>Answer: C", None),
    ],
)
def test_letters(response: str, letter: str | None) -> None:
    for reference in "ABCD":
        verdict = GPQA.grade(Problem("p", "Q", reference), response)
        assert verdict.extracted == letter
        assert verdict.correct == (letter == reference) and verdict.score == float(verdict.correct)
        assert bool(verdict.note) == (letter is None)


@pytest.mark.parametrize(
    "text",
    ["Answer:" * 3000, "answer is " * 2000, "\\boxed{" * 3000, "Answer" + ": " * 10_000],
    ids=range(4),
)
def test_letters_are_found_in_time(text: str) -> None:
    begin = time.monotonic()
    assert GPQA.grade(Problem("p", "Q", "A"), text).extracted is None
    assert time.monotonic() - begin < 5


def test_code_is_found_in_time() -> None:
    begin = time.monotonic()
    for text in ("\n" * 10**6, " " * 10**6, "  ```\n" * 10**5, "def " * 10**5):
        extract_code(text, "one")
    assert time.monotonic() - begin < 20


def test_normalisation_is_longbenchs() -> None:
    assert normalise_answer("The  U.S., an old\tname!") == "us old name"
    assert normalise_answer("Theatre a-b") == "theatre ab"
    assert normalise_answer("the") == ""


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Ada Lovelace", "ada lovelace.", 1.0),
        ("The Ada", "Ada", 1.0),
        ("Ada", "Ada Lovelace", 2 / 3),
        ("It was Ada Lovelace", "Ada Lovelace", 2 / 3),
        ("Ada Ada", "Ada", 2 / 3),
        ("Charles", "Ada", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_f1(prediction: str, answer: str, score: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(score)


CLASSES = ["Number", "Number of something", "Other number", "Person", "Other", "Other entity"]


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Person", "Person", 1.0),
        ("Type: Person", "Person", 1.0),
        ("Person or Other", "Person", 0.5),
        ("person", "Person", 0.0),
        ("Number", "Person", 0.0),
        ("", "Person", 0.0),
        # Part of the right class's name: not counted.
        ("Number of something", "Number of something", 1.0),
        ("Other entity", "Other entity", 1.0),
        # Right, but the longer name counts as a second class.
        ("Number of something", "Number", 0.5),
    ],
)
def test_classes(prediction: str, answer: str, score: float) -> None:
    assert classification(prediction, answer, CLASSES) == score


def test_classes_removed_while_walking() -> None:
    """LongBench's list shrinks under its loop: the class after a removed one stays."""
    assert classification("a b abc", "abc", ["a", "b", "abc"]) == 0.5
    assert classification("a b abc", "abc", ["a", "abc", "b"]) == 1.0
    assert classification("a x abc", "abc", ["a", "x", "abc"]) == 0.5


def _words(*answers: str) -> Problem:
    return Problem("p", "Q", {"answers": list(answers), "classes": CLASSES})


def test_hotpotqa_takes_the_best_answer_after_the_reasoning() -> None:
    problem = _words("Charles Babbage", "Ada")
    assert HOTPOTQA.grade(problem, "<think>Charles</think>\n\nAda\n") == Verdict(True, 1.0, "Ada")
    partly = HOTPOTQA.grade(problem, "Charles")
    assert partly.score == pytest.approx(2 / 3) and not partly.correct
    assert HOTPOTQA.grade(problem, "<think>Ada") == Verdict(False, 0.0, None, "no answer")
    assert HOTPOTQA.grade(problem, "") == Verdict(False, 0.0, None, "no answer")
    # 32 words count, as LongBench stops after 32 tokens.
    assert HOTPOTQA.grade(problem, "x " * 31 + "Ada").score > 0
    assert HOTPOTQA.grade(problem, "x " * 32 + "Ada").score == 0


def test_trec_takes_the_first_line() -> None:
    problem = _words("Person")
    assert TREC.grade(problem, "hm</think>\n\nPerson\n\nQuestion: x\nType: Other").correct
    assert not TREC.grade(problem, "Let me see.\nPerson").correct
    half = TREC.grade(problem, "Person, Other")
    assert half.score == 0.5 and not half.correct


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\ndef one():\n    return 1\n```", "def one():\n    return 1"),
        ("Try\n```py\ndef two(): 2\n```\nand\n```\ndef one(): 1\n```", "def one(): 1"),
        ("```\ndef one(): 1\n```\nUsage:\n```\none()\n```", "def one(): 1"),
        ("```python\ndef one(): 1", "def one(): 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("def one():\n    return 1", "def one():\n    return 1"),
        ("    return 1", "    return 1"),
        (
            "1. So:\n   ```python\n   def one():\n       return 1\n   ```",
            "def one():\n    return 1",
        ),
        ("- ```python\n  def one():\n      return 1\n  ```", "def one():\n    return 1"),
        ("  ```\ndef one():\n    return 1\n  ```", "def one():\n  return 1"),
        ("```\n    return 1\n```", "    return 1"),
        ("```\ndef one(): 1\n```\n```\ndef one_more(): 2\n```", "def one(): 1"),
        ("```\ndef one(): 1\n```\n```\n# a call, not def one\none()\n```", "def one(): 1"),
        ("I would write def one like this.", None),
        ("I cannot.", None),
        ("```\n```", None),
        ("", None),
    ],
)
def test_code_extraction(text: str, code: str | None) -> None:
    assert extract_code(text, "one") == code


def test_humaneval_runs_the_tests() -> None:
    try:
        sandbox.check()
    except sandbox.SandboxError as error:
        pytest.skip(str(error))
    task = HumanEvalTask(limits=sandbox.Limits(wall_s=10.0, cpu_s=2))
    prompt = 'from typing import List\n\ndef first(x: List[int]) -> int:\n    """The first."""\n'
    test = "def check(candidate):\n    assert candidate([7, 8]) == 7\n"
    problem = Problem("p", prompt, {"prompt": prompt, "test": test, "entry_point": "first"})

    def grade(code: str) -> Verdict:
        return task.grade(problem, f"<think>hm</think>Here:\n```python\n{code}\n```\nDone.")

    assert grade("def first(x: List[int]) -> int:\n    return x[0]").correct
    assert grade("    return x[0]").correct
    assert task.grade(problem, "    return x[0]\n").correct
    later = "def first(x: Later) -> int:\n    return x[0]"
    assert grade(f"from __future__ import annotations\n\n{later}").correct
    assert grade(f"import re\nfrom __future__ import (\n    annotations,\n)\n{later}").correct
    assert grade(later).note.startswith("NameError")
    wrong = grade("def first(x):\n    return x[1]")
    assert not wrong.correct and wrong.note.startswith("AssertionError")
    assert grade("def first(x):\n  return y").note.startswith("NameError")
    assert grade("def first(x) return").note.startswith("SyntaxError")
    assert grade("import os\nos._exit(0)").note == "ended before its last line"
    assert not grade("def first(x):\n    while True: pass").correct
    assert task.grade(problem, "No idea.") == Verdict(False, 0.0, None, "no code found")
    assert "longer than" in grade("def first(x): 1\n" + "#" * 200_000).note
    hidden = task.grade(problem, "<think>```\ndef first(x): return x[0]\n```")
    assert hidden.note == "no code found"


def test_reasoner_grades_its_reference_responses() -> None:
    problems = TINY.load(Source(seed=1, limit=30))
    for problem, made in zip(problems, generate(1, 30), strict=True):
        assert problem.group == ("error" if made.error else "clean")
        assert TINY.grade(problem, made.response) == Verdict(True, 1.0, made.answer)
        other = f"{(int(made.answer) + 1) % 10}"
        wrong = TINY.grade(problem, made.response + f" the answer is \\boxed{{ {other} }}")
        assert (wrong.correct, wrong.extracted) == (False, other)
    missing = TINY.grade(problems[0], "no answer")
    assert (missing.correct, missing.extracted, missing.note) == (
        *(False, None),
        "no \\boxed{ } found",
    )
    strayed = TINY.grade(problems[0], f"q = q + 1\n\n\\boxed{{ {problems[0].reference} }}")
    assert strayed.correct and "assignment that is not the prompt's" in strayed.note


REFERENCES = {
    "gpqa_diamond": "A",
    "hotpotqa": {"answers": ["Ada"], "classes": []},
    "trec": {"answers": ["Person"], "classes": CLASSES},
    "tiny_reasoner": "3",
}
HOSTILE = {
    "empty": "",
    "braces": "\\boxed{" * 100_000,
    "fences": "```\n" * 100_000,
    "answers": "Answer: " * 200_000,
    "marks": "answer" + "*" * 1_000_000,
    "spaces": " " * 1_000_000 + "x",
    "lines": "\n" * 1_000_000,
    "word": "x" * 5_000_000,
    "null bytes": "\x00" * 1000,
    "lone surrogates": "\ud800" * 1000,
    "thoughts": "<think>" * 100_000 + "</think>" * 100_000,
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_text_is_graded_at_once(attack: str) -> None:
    for name, reference in REFERENCES.items():
        begin = time.monotonic()
        verdict = TASKS[name].grade(Problem("p", "a 1 . find a .", reference), HOSTILE[attack])
        # Anything that is not linear would take hours.
        assert time.monotonic() - begin < 20, name
        assert not verdict.correct and len(verdict.extracted or "") <= 200
    begin = time.monotonic()
    extract_code(HOSTILE[attack], "one")
    assert time.monotonic() - begin < 20


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200), name=st.sampled_from(sorted(REFERENCES)))
def test_any_text_gets_a_verdict(text: str, name: str) -> None:
    verdict = TASKS[name].grade(Problem("p", "a 1 . find a .", REFERENCES[name]), text)
    assert 0.0 <= verdict.score <= 1.0
    assert verdict.correct == (verdict.score == 1.0)


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["red", "green", "blue", "the", "a"]), max_size=8),
    data=st.data(),
)
def test_f1_does_not_care_about_order(words: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(words))
    score = qa_f1(" ".join(words), " ".join(other))
    assert score == pytest.approx(1.0 if {*words} - {"the", "a"} else 0.0)
    assert qa_f1(" ".join(words), "red") == pytest.approx(qa_f1("red", " ".join(words)))


def test_frozen_tasks_are_shared_safely() -> None:
    """Tasks hold no state: a copy grades the same."""
    copy = replace(HOTPOTQA)
    assert copy.grade(_words("Ada"), "Ada") == HOTPOTQA.grade(_words("Ada"), "Ada")

# SPDX-License-Identifier: Apache-2.0
"""Mathematics: right, wrong, malformed, missing and hostile answers, in bounded time."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks.answers import after_thinking, last_boxed, with_opened_thinking
from eval.tasks.math_grading import GRADER, MathGrader
from eval.tasks.mathematics import AIME24, GSM8K, MATH500
from eval.tasks.task import Problem, TaskError, Verdict

BENCHMARKS = Path(__file__).resolve().parents[3] / "shared" / "data" / "benchmarks"


def _grade(reference: str, response: str) -> Verdict:
    return MATH500.grade(Problem("p", "Q", reference), response)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("204", "204"),
        ("25", "025"),
        ("204", " 204 "),
        ("204", "204."),
        ("204", "\\text{204}"),
        ("204", "n = 204"),
        ("1002", "1,002"),
        ("18", "\\$18.00"),
        ("\\frac{14}{3}", "\\dfrac{14}{3}"),
        ("\\frac{14}{3}", "14/3"),
        ("\\frac{1}{2}", "0.5"),
        ("p - q", "-q+p"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
        ("\\text{Evelyn}", "Evelyn"),
        ("\\text{(C)}", "(C)"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\{1, 2\\}", "\\{2, 1\\}"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("5", "x \\in \\{5\\}"),
    ],
)
def test_right_answers(reference: str, answer: str) -> None:
    verdict = _grade(reference, f"<think>\\boxed{{0}}</think>So \\boxed{{{answer}}}.")
    assert verdict == Verdict(True, 1.0, answer.strip().removesuffix("."))


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("204", "205"),
        ("204", "-204"),
        ("204", "204x"),
        ("\\frac{14}{3}", "\\frac{3}{14}"),
        ("\\frac{1}{3}", "0.33"),
        ("p - q", "q - p"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(\\frac{\\pi}{2}, 3)"),
        ("\\text{Evelyn}", "Evan"),
        ("(1,2)", "[1,2]"),
        ("3", "\\frac{1}{"),
        ("3", "3, 4"),
        ("3", "\\infty"),
        ("3", "__import__('os')"),
    ],
)
def test_wrong_answers(reference: str, answer: str) -> None:
    verdict = _grade(reference, f"\\boxed{{{answer}")
    assert verdict == Verdict(False, 0.0, None, verdict.note) and "no \\boxed{}" in verdict.note
    if answer.count("{") == answer.count("}"):
        verdict = _grade(reference, f"\\boxed{{{reference}}} or \\boxed{{{answer}}}")
        assert (verdict.correct, verdict.score, verdict.extracted) == (False, 0.0, answer)


@pytest.mark.parametrize(
    ("response", "note"),
    [
        ("", "no \\boxed{}"),
        ("The answer is 3.", "no \\boxed{}"),
        ("\\boxed", "no \\boxed{}"),
        ("\\boxed{", "no \\boxed{}"),
        ("\\boxed{3", "no \\boxed{}"),
        ("\\boxed{}", "empty"),
        ("\\boxed{  }", "empty"),
        ("\\boxed{3}</think>", "no \\boxed{}"),
        ("<think>\\boxed{3}", "no \\boxed{}"),
        ("a</think>\\boxed{3}</think>done", "no \\boxed{}"),
    ],
)
def test_missing_answers(response: str, note: str) -> None:
    verdict = _grade("3", response)
    assert not verdict.correct and not verdict.extracted and note in verdict.note


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1\\right\\}}", "\\left\\{1\\right\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\fbox{8}", "8"),
        ("\\boxed {9}", "9"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{1} \\boxed{ } \\boxed{}", "1"),
        ("\\boxed{1} or \\boxed{\\boxed{}", "1"),
        ("\\boxed{1} in an \\fbox{2}", "1"),
        ("in \\boxed form: \\fbox{2}", "2"),
        ("\\boxed{} \\fbox{2}", ""),
        ("\\boxed{", None),
        ("\\boxed{1}" + "\\boxed{" * 1000, None),
        ("\\boxed{123456}", None),
        ("\\boxed{12345}", "12345"),
    ],
)
def test_last_box(response: str, found: str | None) -> None:
    limit = 5 if "12345" in response else 100
    assert last_boxed(response, limit) == found


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("hm \\boxed{1}, no", ""),
        ("", ""),
        ("hm</think>\\boxed{2}", "\\boxed{2}"),
        ("<think>hm</think>\\boxed{2}", "\\boxed{2}"),
        ("\n<think>\\boxed{1}", ""),
    ],
)
def test_reasoning_that_the_prompt_opened(response: str, answer: str) -> None:
    """A response that was cut off within it has no answer, whatever it wrote down on its way."""
    opened = with_opened_thinking(response)
    assert after_thinking(opened) == answer
    assert with_opened_thinking(opened) == opened
    assert not _grade("1", opened).correct


HOSTILE = {
    "braces": "\\boxed{" + "{" * 100_000,
    "closed braces": "\\boxed{" + "{" * 100_000 + "}" * 100_001,
    "boxes": "\\boxed{" * 100_000,
    "thoughts": "</think>" * 100_000 + "\\boxed{",
    "backslashes": "\\boxed{" + "\\" * 999 + "}",
    "depth": "\\boxed{" + "\\sqrt{" * 150 + "2" + "}" * 151,
    "tower": "\\boxed{9^{9^{9^{9}}}}",
    "factorial": "\\boxed{(10^{9})!}",
    "digits": "\\boxed{" + "9" * 1000 + "}",
    "null bytes": "\\boxed{1\x002}",
    "lone surrogates": "\\boxed{\ud800\udfff}",
    "lines": "\\boxed{1\n2\r\n3}",
    "dollars": "\\boxed{$$$1$$}",
    "code": "\\boxed{__import__('os').system('exit 1')}",
    "huge": "x" * 20_000_000 + "\\boxed{4}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_and_in_time(name: str) -> None:
    begin = time.monotonic()
    verdict = _grade("3", HOSTILE[name])
    # A parse, a comparison and a process killed and started again, on a busy machine.
    assert time.monotonic() - begin < 30
    assert not verdict.correct
    assert len(verdict.extracted or "") <= 200
    json.dumps(vars(verdict)).encode("ascii")
    if name in ("tower", "factorial"):
        assert "timed out" in verdict.note or "not comparable" in verdict.note
    assert _grade("3", "\\boxed{\\frac{6}{2}}").correct


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="\\boxed{}</think> 17^$_", max_size=60))
def test_any_text_gets_a_verdict(text: str) -> None:
    verdict = _grade("3", text)
    assert verdict.score == float(verdict.correct)
    assert after_thinking(text) in text


@given(number=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_integers_equal_themselves_only(number: int) -> None:
    problem = Problem("p", "Q", str(number))
    assert AIME24.grade(problem, f"\\boxed{{{number:03}}}").correct
    assert not AIME24.grade(problem, f"\\boxed{{{number + 1}}}").correct
    assert GSM8K.grade(problem, f"\\boxed{{{number}.00}}").correct


@pytest.mark.parametrize("name", ["aime24", "aime25", "math500"])
def test_every_reference_equals_itself(name: str) -> None:
    """By math-verify, past the shortcut for equal texts."""
    path = BENCHMARKS / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    wrong = [a for a in answers if not GRADER.equal(a, a)[0]]
    assert not wrong


@pytest.fixture
def grader() -> Iterator[MathGrader]:
    grader = MathGrader()
    yield grader
    grader.close()


def test_a_process_that_takes_too_long_is_replaced(grader: MathGrader) -> None:
    assert grader.equal("1", "1.0") == (True, "")
    first, grader.limit_s = grader._process, 0.3
    assert grader.equal("3", "9^{9^{9^{9}}}") == (False, "not comparable: more than 0.3 s")
    assert first is not None and first.poll() is not None
    grader.limit_s = 15.0
    assert grader.equal("1", "1.0") == (True, "")


def test_a_process_that_dies_is_replaced(grader: MathGrader) -> None:
    assert grader.equal("1", "1.0") == (True, "")
    assert grader._process is not None
    grader._process.kill()
    assert grader.equal("1", "1.0") == (False, "not comparable: the process ended")
    assert grader.equal("1", "1.0") == (True, "")
    limits = Path(f"/proc/{grader._process.pid}/limits").read_text()
    assert f"Max address space         {2 << 30}" in limits


def test_a_process_without_memory_is_an_error() -> None:
    grader = MathGrader(memory_bytes=40 << 20)
    with pytest.raises(TaskError, match="did not start"):
        grader.equal("1", "2")


def test_a_process_that_cannot_be_made_is_an_error(
    grader: MathGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(TaskError, match=r"did not start: .*/nowhere/python"):
            grader.equal("1", "2")


def test_threads_take_turns() -> None:
    """Timeouts by signals would fail outside of the main thread; these do not."""
    results: list[bool] = []

    def work(i: int) -> None:
        results.append(_grade(str(i), f"\\boxed{{{2 * i}/2}}").correct)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8

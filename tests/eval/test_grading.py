# SPDX-License-Identifier: Apache-2.0
"""Mathematics: right, wrong, malformed, missing and hostile answers, in bounded time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks import grading
from eval.tasks.grading import MATHEMATICS, MathGrader, extract_code, last_boxed
from eval.tasks.harness import _after_thinking
from eval.tasks.sandbox import SandboxError

BENCHMARKS = Path(__file__).resolve().parents[3] / "shared" / "data" / "benchmarks"


def _grade(reference: str, response: str) -> bool:
    """As the harness does: reasoning away, filter, grader."""
    ((answer,),) = grading.boxed([[_after_thinking(response, False)]], [])
    found = grading.equal_mathematics({"target": reference}, [answer])["score"]
    assert found in (0.0, 1.0)
    return found == 1.0


RIGHT = {
    "204": ["204", " 204 ", "204.", "\\text{204}", "n = 204"],
    "25": ["025"],
    "1002": ["1,002"],
    "18": ["\\$18.00"],
    "\\frac{14}{3}": ["\\dfrac{14}{3}", "14/3"],
    "\\frac{1}{2}": ["0.5"],
    "p - q": ["-q+p"],
    "\\left( 3, \\frac{\\pi}{2} \\right)": ["(3, \\pi/2)"],
    "\\text{Evelyn}": ["Evelyn"],
    "\\text{(C)}": ["(C)"],
    "2\\sqrt{3}": ["\\sqrt{12}"],
    "\\{1, 2\\}": ["\\{2, 1\\}"],
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": ["\\begin{pmatrix}1\\\\2\\end{pmatrix}"],
    "5": ["x \\in \\{5\\}"],
}
WRONG = {
    "204": ["205", "-204", "204x"],
    "\\frac{14}{3}": ["\\frac{3}{14}"],
    "\\frac{1}{3}": ["0.33"],
    "p - q": ["q - p"],
    "\\left( 3, \\frac{\\pi}{2} \\right)": ["(\\frac{\\pi}{2}, 3)"],
    "\\text{Evelyn}": ["Evan"],
    "(1,2)": ["[1,2]"],
    "3": ["\\frac{1}{", "3, 4", "\\infty", "__import__('os')"],
}


@pytest.mark.parametrize("reference", RIGHT)
def test_right_answers(reference: str) -> None:
    for answer in RIGHT[reference]:
        assert _grade(reference, f"<think>\\boxed{{0}}</think>So \\boxed{{{answer}}}."), answer


@pytest.mark.parametrize("reference", WRONG)
def test_wrong_answers(reference: str) -> None:
    for answer in WRONG[reference]:
        assert not _grade(reference, f"\\boxed{{{answer}"), answer
        if answer.count("{") == answer.count("}"):
            assert not _grade(reference, f"\\boxed{{{reference}}} or \\boxed{{{answer}}}"), answer


def test_last_box() -> None:
    for response, found in {
        "\\boxed{1} then \\boxed{2}": "2",
        "\\boxed{\\frac{1}{2}}": "\\frac{1}{2}",
        "\\boxed{\\left\\{1\\right\\}}": "\\left\\{1\\right\\}",
        "\\boxed{\\boxed{7}}": "7",
        "\\fbox{8}": "8",
        "\\boxed {9}": "9",
        "\\boxed{1} \\boxed{2": "1",
        "\\boxed{1} \\boxed{ } \\boxed{}": "1",
        "\\boxed{1} or \\boxed{\\boxed{}": "1",
        "\\boxed{1} in an \\fbox{2}": "1",
        "in \\boxed form: \\fbox{2}": "2",
        **dict.fromkeys(("\\boxed{} \\fbox{2}", "\\boxed{", ""), ""),
        "\\boxed{1}" + "\\boxed{" * 1000: "",
        "\\boxed{" + "1" * 1001 + "}": "",
    }.items():
        assert last_boxed(response) == found, response[:99]


def test_a_response_that_was_cut_off_within_its_reasoning_has_no_answer() -> None:
    for response, opened, answer in (
        ("hm \\boxed{1}, no", True, ""),
        ("hm \\boxed{1}, no", False, "hm \\boxed{1}, no"),
        ("", True, ""),
        ("hm</think>\\boxed{2}", True, "\\boxed{2}"),
        ("<think>hm</think>\\boxed{2}", False, "\\boxed{2}"),
        ("\n<think>\\boxed{1}", False, ""),
        ("a</think>\\boxed{3}</think>done", False, "done"),
        ("\\boxed{3}</think>", False, ""),
    ):
        assert _after_thinking(response, opened) == answer, response


def test_code_is_found() -> None:
    two = "```python\ndef f(x):\n    return x\n```\nor\n```\nf(1)\n```"
    for text, code in {
        two: "def f(x):\n    return x",
        "```\na\n```\n```\nb\n```": "b",
        "so:\n  ```py\n  def f(x):\n    pass\n  ```": "def f(x):\n  pass",
        "```python\ndef f(x): pass": "def f(x): pass",
        "def f(x): pass": "def f(x): pass",
        "": "",
    }.items():
        assert extract_code(text, "f").strip() == code, text
    assert len(extract_code("```\nx\n" * 50_000 + "```", "f")) < 10


HOSTILE = {
    "braces": "{" * 100_000,
    "closed braces": "{" * 100_000 + "}" * 100_001,
    "boxes": "\\boxed{" * 100_000,
    "thoughts": "}" + "</think>" * 100_000 + "\\boxed{",
    "backslashes": "\\" * 999 + "}",
    "depth": "\\sqrt{" * 150 + "2" + "}" * 151,
    "tower": "9^{9^{9^{9}}}}",
    "factorial": "(10^{9})!}",
    "digits": "9" * 1000 + "}",
    "null bytes": "1\x002}",
    "lone surrogates": "\ud800\udfff}",
    "lines": "1\n2\r\n3}",
    "dollars": "$$$1$$}",
    "code": "__import__('os').system('exit 1')}",
    "huge": "x" * 20_000_000 + "\\boxed{4}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_and_in_time(name: str) -> None:
    begin = time.monotonic()
    assert not _grade("3", "\\boxed{" + HOSTILE[name])
    # A parse, a comparison and a process killed and started again, on a busy machine.
    assert time.monotonic() - begin < 30
    assert _grade("3", "\\boxed{\\frac{6}{2}}")


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="\\boxed{}</think> 17^$_", max_size=60))
def test_any_text_gets_a_verdict(text: str) -> None:
    _grade("3", text)
    assert _after_thinking(text, False) in text


@pytest.mark.parametrize("name", ["aime24", "aime25", "math500"])
def test_every_reference_equals_itself(name: str) -> None:
    """By math-verify, past the shortcut for equal texts."""
    path = BENCHMARKS / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert not [a for a in answers if not MATHEMATICS.equal(a, a)]


@pytest.fixture
def grader() -> Iterator[MathGrader]:
    grader = MathGrader()
    yield grader
    grader.close()


def test_a_process_that_takes_too_long_or_dies_is_replaced(grader: MathGrader) -> None:
    assert grader.equal("1", "1.0")
    first, grader.limit_s = grader._process, 0.3
    assert not grader.equal("3", "9^{9^{9^{9}}}")
    assert first is not None and first.poll() is not None
    grader.limit_s = 15.0
    assert grader.equal("1", "1.0")
    assert grader._process is not None
    grader._process.kill()
    assert not grader.equal("1", "1.0")
    assert grader.equal("1", "1.0")
    limits = Path(f"/proc/{grader._process.pid}/limits").read_text()
    assert f"Max address space         {2 << 30}" in limits


def test_a_process_without_memory_is_an_error() -> None:
    with pytest.raises(SandboxError, match="did not start"):
        MathGrader(memory_bytes=40 << 20).equal("1", "2")

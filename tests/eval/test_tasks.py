# SPDX-License-Identifier: Apache-2.0
"""Tests task files, refusals of broken files, and graders, which must end in bounded time."""

import contextlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks import grading, harness, sandbox
from eval.tasks.documents import MATHEMATICS
from eval.tasks.grading import last_boxed
from eval.tasks.harness import EvalTask, Problem, Source, TaskError, _after_thinking, opens_thinking
from eval.tasks.mathematics import MathGrader
from eval.tasks.sandbox import SandboxError
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.model import build_tokenizer
from tests.eval.peer import write_rows

ROOT = Path(__file__).resolve().parents[2]


def test_the_embedded_reasoners_problems() -> None:
    problems = EvalTask("tiny_reasoner", Source(seed=3, limit=40)).problems
    assert len(EvalTask("tiny_reasoner", Source(seed=3)).problems) == 500
    assert {p.group for p in problems} == {"error", "clean"}
    assert len({p.id for p in problems}) == 40 and {p.max_tokens for p in problems} == {1500}
    asked = {p.messages[0]["content"] for p in problems}
    others = EvalTask("tiny_reasoner", Source(seed=4, limit=40)).problems
    assert asked.isdisjoint(p.messages[0]["content"] for p in others)
    with pytest.raises(TaskError, match="--data tiny_reasoner=x.jsonl"):
        EvalTask("tiny_reasoner", Source(file="x.jsonl"))


MATH = {"question": "Q", "answer": "\\frac{1}{2}"}
WORKED = {"question": "Q", "answer": "1\n#### 1002"}
CHOICES = {f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}
CHOICES |= {"Question": "Q {x}", "Correct Answer": "r"}
WHO = {"question": "Who?", "context": "P {{0}}", "answers": ["Ada", "Ada Lovelace"]}
CLASS = {"question": "?", "context": "c", "answers": ["Number"], "all_classes": ["Number", "P"]}


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("aime24", {"id": 60, "problem": "Q", "answer": "033"}, "\\boxed{33}", "\\boxed{34}"),
        ("aime25", {"problem": "Q", "answer": 33}, "<think>?</think>\\boxed{33.}", "33"),
        ("math500", MATH, "\\boxed{0.5}", "\\boxed{2}"),
        ("gsm8k", WORKED, "\\boxed{1,002}", "<think>1002"),
        ("gpqa_diamond", CHOICES, "r", ""),
        ("hotpotqa", WHO, "<think>Bob</think>Ada Lovelace", "Bob"),
        ("trec", CLASS, "Number", "P"),
        ("musique", WHO, "<think>Bob</think>Ada Lovelace", "Bob"),
        ("2wikimqa", WHO, "Ada", "Bob"),
        ("needle", {"context": "c", "question": "?", "answer": "42"}, "It is 42.", "It is 142."),
    ],
)
def test_a_file(name: str, row: dict[str, Any], right: str, wrong: str, tmp_path: Path) -> None:
    """Rows of mathematics need a question and an answer; other rows need the fields of the hub's data set."""
    file = write_rows(tmp_path / "x.jsonl", row, {**row, "id": 7})
    task = EvalTask(name, Source(file=str(file), limit=2))
    assert len(task.problems) == 2
    if name == "gpqa_diamond":
        # The seed shuffles the choices, so the letters are read from the prompts.
        prompts = [problem.messages[0]["content"] for problem in task.problems]
        right, other = (f"({prompt[prompt.index(') r') - 1]})" for prompt in prompts)
        wrong = "(A)" if other != "(A)" else "(B)"
    found = task.evaluate([right, wrong], False)
    assert [found[problem.id].score for problem in task.problems] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("aime24", {"ID": "2024-II-4", "Problem": "Q", "Solution": "s", "Answer": 33}),
        ("aime25", {"problem": "Q", "answer": "33", "id": "0"}),
        ("math500", {"problem": "Q", "solution": "s", "answer": "33", "unique_id": "test/a/1"}),
        ("gsm8k", {"question": "Q", "answer": "1 + 32\n#### 33"}),
    ],
)
def test_the_hub_asks_what_a_file_asks(
    name: str, row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the data set's name in the working folder stands for the hub: rows with the fields there give
    the prompts and the grades of a file's rows."""
    source = MATHEMATICS[name]
    folder = tmp_path / source.hub
    folder.mkdir(parents=True)
    split = f"{{split: {source.split}, path: rows.jsonl}}"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {source.config or 'default'}\n  data_files: [{split}]\n---\n"
    )
    write_rows(folder / "rows.jsonl", row)
    file = write_rows(tmp_path / "x.jsonl", {"id": "a", "question": "Q", "answer": "33"})
    monkeypatch.chdir(tmp_path)
    hub = EvalTask(name, Source())
    local = EvalTask(name, Source(file=str(file)))
    assert [p.messages for p in hub.problems] == [p.messages for p in local.problems]
    for task in (hub, local):
        for answer, score in (("\\boxed{33}", 1.0), ("Question: ... $33$", 0.0)):
            assert [one.score for one in task.evaluate([answer], False).values()] == [score]


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (b'{"id": "b", "question": "\xff"}', "not JSON: 'utf-8' codec can't decode byte"),
        (b"[" * 100_000, "not JSON: "),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not JSON: "),
        (b'{"id": "b", "answer": "1"}', "no field 'question'"),
        (b'{"id": "b", "question": 5.5, "answer": "1"}', "field 'question' is no text"),
        (b'{"id": "b", "question": "Q", "answer": [1]}', "field 'answer' is no text"),
        (b'{"id": "b", "question": "Q", "answer": "-1"}', "integers from 0 to 999: '-1'"),
        (b'{"id": "b", "question": "Q", "answer": "1000"}', "integers from 0 to 999: '1000'"),
        (b'{"id": "b", "question": "Q", "answer": "1", "examples": "x"}', "must be a list of"),
        (b'{"question": "Q", "answer": "1", "examples": [{}]}', "no field 'question'"),
    ],
    ids=range(10),
)
def test_broken_lines_are_named(second: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"id": "a", "question": "Q", "answer": "1"}\n' + second + b"\n")
    with pytest.raises(TaskError) as caught:
        EvalTask("aime24", Source(file=str(path)))
    assert f"{path}:2: " in str(caught.value) and fault in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("math500", "", "no rows"),
        ("math500", '{"question": "Q", "answer": "%s"}\n' % ("x" * 1001), "1 to 1000 characters"),
        ("aime24", '{"id": 1, "question": "Q", "answer": 1}\n' * 2, "duplicate id '1'"),
        ("mbpp", "{}", "run no code|cannot be loaded"),
        ("hellaswag", "{}", "only tasks that generate text|cannot be loaded"),
        ("no_such_task", "{}", "lm-eval has no such task"),
    ],
)
def test_what_cannot_be_used_is_told(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(TaskError, match=told):
        EvalTask(name, Source(file=str(tmp_path / "x.jsonl"), model=str(CHECKPOINT)))


def test_needles_go_through_all_lengths_and_depths() -> None:
    problems = EvalTask("needle", Source(seed=3)).problems
    asked = [problem.messages[0]["content"] for problem in problems]
    assert len({problem.group for problem in problems}) == len(problems) == 20
    for text, problem in zip(asked, problems, strict=True):
        length, depth = map(int, problem.group.split("-"))
        assert length <= len(text.split()) < length + 40
        at = text.index("The secret number of ") / text.index("What is the secret number of ")
        assert abs(at - depth / 100) < 0.05
    again = [
        problem.messages[0]["content"] for problem in EvalTask("needle", Source(seed=3)).problems
    ]
    assert again == asked
    short = EvalTask("needle_w60", Source(seed=3, limit=7))
    assert {problem.group.partition("-")[0] for problem in short.problems} == {"60"}
    (answer,) = re.findall(r"is (\d{6})\.", short.problems[0].messages[0]["content"])
    grades = short.evaluate([answer, *["123"] * 6], False)
    assert [grade.score for grade in grades.values()] == [1.0, *[0.0] * 6]
    with pytest.raises(TaskError, match="lm-eval has no such task"):
        EvalTask("needle_w0", Source())


CODE = {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Half."""\n', "entry_point": "f"}
CODE |= {"test": "def check(f):\n    assert f(4) == 2\n", "canonical_solution": "return 2"}


def test_code_runs_in_the_sandbox_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bubblewrap the task is refused before any response is asked for."""
    file = write_rows(tmp_path / "x.jsonl", CODE, {**CODE, "task_id": "HumanEval/1"})
    try:
        sandbox.check()
    except SandboxError:
        pass
    else:
        task = EvalTask("humaneval", Source(file=str(file)))
        assert f"```python\n{CODE['prompt']}```" in task.problems[0].messages[0]["content"]
        right = "<think>?</think>Here:\n```python\ndef f(x):\n    return x // 2\n```\nDone."
        found = task.evaluate([right, "def f(x): return 1"], False)
        assert [grade.score for grade in found.values()] == [1.0, 0.0]
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(TaskError, match="which is not installed"):
            task.evaluate([right, right], False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        TaskError, match="--tasks humaneval: code that a model wrote runs only in b"
    ):
        EvalTask("humaneval", Source(file=str(file)))


def test_half_surrogates_do_not_get_into_a_prompt(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.jsonl", '{"question": "a \\ud800 b", "answer": "1"}')
    (problem,) = EvalTask("aime24", Source(file=str(file))).problems
    assert problem.messages[0]["content"].startswith("a ? b") and not problem.forced
    assert Problem("p", [], {"custom_logit_processor": "..."}).forced


def test_a_grader_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_GRADE_S", 0.2)

    def slow(doc: Any, results: Sequence[str]) -> dict[str, float]:
        while results[0] == "slow":
            time.sleep(0.01)
        return {"acc": 1.0 / len(results[0])}

    bounded = harness._bounded(slow, ["acc"])
    assert [bounded({}, [text])["acc"] for text in ("a", "slow", "")] == [1.0, 0.0, 0.0]


_TURNS = "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + m['content'] }}{%- endfor %}"
_ASKED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
_HYBRID = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"


def test_templates_that_open_the_reasoning(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    r1 = "{% if add_generation_prompt %}{{'<|Assistant|><think>\\n'}}{% endif %}"
    # ``opening`` ends like templates of QwQ-32B and R1 distills, ``others`` like those of Qwen3 and Qwen2.5.
    opening = [_TURNS + _ASKED + "{{- '<think>\\n' }}{%- endif %}", _TURNS + r1]
    others = [_TURNS + _ASKED + _HYBRID + "{%- endif %}", _TURNS + _ASKED + "{%- endif %}"]
    # This template has no generation prompt, and closes the reasoning that it opens.
    others += ["{{- messages[0]['content'] + '<think></think>' }}"]
    others += ["{{ raise_exception('no such role') }}", "{% if %}"]
    for number, template in enumerate([*opening, *others, None]):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(str(tmp_path / str(number)))
        assert opens_thinking(str(tmp_path / str(number))) is (template in opening), template
    assert opens_thinking(str(tmp_path)) is opens_thinking("") is False
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert opens_thinking(str(tmp_path)) is False


def _grade(reference: str, response: str) -> bool:
    """Grades as the harness does: removes the reasoning, extracts the boxed answer, compares."""
    ((answer,),) = grading.boxed([[_after_thinking(response, False)]], [])
    found = grading.equal_mathematics({"target": reference}, [answer])["score"]
    assert found in (0.0, 1.0)
    return found == 1.0


#: Reference -> right and wrong answers. These are few, because math-verify has its own tests.
ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    "204": ([" 204 ", "204.", "n = 204"], ["205", "-204", "204x"]),
    "1002": (["1,002"], []), "\\frac{1}{3}": ([], ["0.33"]), "\\text{Evelyn}": (["Evelyn"], ["Evan"]),
    "5": (["x \\in \\{5\\}"], []), "(1,2)": ([], ["[1,2]"]),
    "3": ([], ["\\frac{1}{", "3, 4", "\\infty", "__import__('os')"]),
}  # fmt: skip


@pytest.mark.parametrize("reference", ANSWERS)
def test_answers(reference: str) -> None:
    right, wrong = ANSWERS[reference]
    for answer in right:
        assert _grade(reference, f"<think>\\boxed{{0}}</think>So \\boxed{{{answer}}}."), answer
    for answer in wrong:
        assert not _grade(reference, f"\\boxed{{{answer}"), answer
        if answer.count("{") == answer.count("}"):
            assert not _grade(reference, f"\\boxed{{{reference}}} or \\boxed{{{answer}}}"), answer


def test_last_box() -> None:
    nothing = ("\\boxed{} \\fbox{2}", "\\boxed{", "", "\\boxed{1}" + "\\boxed{" * 1000)
    for response, found in {
        "\\boxed{1} then \\boxed{2}": "2",
        "\\boxed{\\frac{1}{2}}": "\\frac{1}{2}",
        "\\boxed{\\left\\{1\\right\\}}": "\\left\\{1\\right\\}",
        "\\boxed{\\boxed{7}}": "7",
        "\\fbox{8}": "8",
        "\\boxed {9}": "9",
        "in \\boxed form: \\fbox{2}": "2",
        **dict.fromkeys(("\\boxed{1} \\boxed{2", "\\boxed{1} \\boxed{ } \\boxed{}"), "1"),
        **dict.fromkeys(("\\boxed{1} or \\boxed{\\boxed{}", "\\boxed{1} in an \\fbox{2}"), "1"),
        **dict.fromkeys((*nothing, "\\boxed{" + "1" * 1001 + "}"), ""),
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


HOSTILE = {
    "braces": "{" * 100_000, "boxes": "\\boxed{" * 100_000,
    "thoughts": "}" + "</think>" * 100_000 + "\\boxed{", "depth": "\\sqrt{" * 150 + "2" + "}" * 151,
    "tower": "9^{9^{9^{9}}}}", "lone surrogates": "\ud800\udfff}",
    "code": "__import__('os').system('exit 1')}", "huge": "x" * 20_000_000 + "\\boxed{4}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_wrong_and_in_time(name: str) -> None:
    begin = time.monotonic()
    assert not _grade("3", "\\boxed{" + HOSTILE[name])
    # 30 s are enough for a parse, a comparison and a restart of the grader's process on a busy machine.
    assert time.monotonic() - begin < 30
    assert _grade("3", "\\boxed{\\frac{6}{2}}")


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="\\boxed{}</think> 17^$_", max_size=60))
def test_any_text_gets_a_verdict(text: str) -> None:
    _grade("3", text)
    assert _after_thinking(text, False) in text


def test_a_process_that_takes_too_long_is_replaced() -> None:
    with contextlib.closing(MathGrader()) as grader:
        assert grader.equal("1", "1.0")
        grader.limit_s = 0.3
        assert not grader.equal("3", "9^{9^{9^{9}}}")
        grader.limit_s = 15.0
        assert grader.equal("1", "1.0")


def test_several_samples_of_each_problem() -> None:
    [plain, sampled] = [EvalTask(f"tiny_reasoner{x}", Source(seed=3, limit=6)) for x in ("", "_x4")]
    messages = [problem.messages for problem in sampled.problems]
    assert messages == [plain.problems[0].messages] * 4 + [plain.problems[1].messages] * 2
    assert len({problem.id for problem in sampled.problems}) == 6

# SPDX-License-Identifier: Apache-2.0
"""Loading: good files in several spellings, broken files with the line and the fault, no hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.tasks import rows, sandbox
from eval.tasks.registry import TASKS, find_task
from eval.tasks.task import Problem, Source, TaskError

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT.parent / "shared" / "data" / "benchmarks"

# One row a task, spelled as its hub's columns are; then as our own local files are.
HUB_ROWS: dict[str, dict[str, Any]] = {
    "aime24": {
        "id": 60,
        "problem": "Q",
        "solution": "s",
        "answer": "033",
        "url": "",
        "year": "2024",
    },
    "aime25": {"problem": "Q", "answer": "33", "id": "0"},
    "math500": {"problem": "Q", "answer": "\\frac{1}{2}", "unique_id": "test/a.json", "level": 2},
    "gsm8k": {"question": "Q", "answer": "1 + 1 = 2\n#### 1,002"},
    "gpqa_diamond": {
        "Record ID": "rec1",
        "Question": "Q",
        "Correct Answer": "right",
        "Incorrect Answer 1": "w1",
        "Incorrect Answer 2": "w2",
        "Incorrect Answer 3": "w3",
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def one() -> int:\n    """1"""\n',
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    },
    "hotpotqa": {
        "_id": "h1",
        "input": "Who?",
        "context": "Passage {input} {0}",
        "answers": ["Ada", "Ada Lovelace"],
        "all_classes": None,
        "length": 3,
    },
    "trec": {
        "_id": "t1",
        "input": "Question: How many?\nType:",
        "context": "Question: Who?\nType: Person",
        "answers": ["Number"],
        "all_classes": ["Number", "Person"],
    },
}
OWN_ROWS: dict[str, dict[str, Any]] = {
    "aime24": {"id": "a", "question": "Q", "answer": "33"},
    "aime25": {"id": "a", "question": "Q", "answer": 33},
    "math500": {"id": "a", "question": "Q", "answer": "\\frac{1}{2}"},
    "gsm8k": {"id": "a", "question": "Q", "answer": "1002"},
    "gpqa_diamond": {"id": "rec1", "question": "Q", "answer": "right", "wrong": ["w1", "w2", "w3"]},
    "hotpotqa": {"id": "h1", "question": "Who?", "context": "Passage", "answer": "Ada"},
}


@pytest.fixture(scope="module")
def code_allowed() -> bool:
    try:
        sandbox.check()
    except sandbox.SandboxError:
        return False
    return True


def _write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def _load(name: str, path: Path, **options: Any) -> list[Problem]:
    return find_task(name).load(Source(path=path, allow_code=True, **options))


@pytest.mark.parametrize("name", sorted(HUB_ROWS))
def test_files_exported_from_the_hub_load(name: str, tmp_path: Path, code_allowed: bool) -> None:
    if name == "humaneval" and not code_allowed:
        pytest.skip("no sandbox here")
    (problem,) = _load(name, _write(tmp_path / "x.jsonl", HUB_ROWS[name]))
    assert json.loads(json.dumps(problem.reference)) == problem.reference
    expected = {
        "aime24": ("60", "33"),
        "aime25": ("0", "33"),
        "math500": ("test/a.json", "\\frac{1}{2}"),
        "gsm8k": ("gsm8k-1", "1002"),
        "humaneval": ("HumanEval/0", {k: HUB_ROWS["humaneval"][k] for k in REFERENCE}),
        "hotpotqa": ("h1", {"answers": ["Ada", "Ada Lovelace"], "classes": []}),
        "trec": ("t1", {"answers": ["Number"], "classes": ["Number", "Person"]}),
    }
    if name in expected:
        assert (problem.id, problem.reference) == expected[name]
    else:
        assert problem.id == "rec1"
        assert f"{problem.reference}) right" in problem.prompt


REFERENCE = ("prompt", "test", "entry_point")


@pytest.mark.parametrize("name", sorted(OWN_ROWS))
def test_our_own_rows_give_the_same_problem(name: str, tmp_path: Path) -> None:
    (own,) = _load(name, _write(tmp_path / "own.jsonl", OWN_ROWS[name]))
    (hub,) = _load(name, _write(tmp_path / "hub.jsonl", HUB_ROWS[name]))
    if name == "hotpotqa":
        assert own.prompt == hub.prompt.replace(" {input} {0}", "")
    else:
        assert (own.prompt, own.reference) == (hub.prompt, hub.reference)


def test_prompts(tmp_path: Path) -> None:
    (problem,) = _load("math500", _write(tmp_path / "x.jsonl", HUB_ROWS["math500"]))
    assert problem.prompt == (
        "Q\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    (problem,) = _load("hotpotqa", _write(tmp_path / "x.jsonl", HUB_ROWS["hotpotqa"]))
    assert "passages.\nPassage {input} {0}\n\nAnswer the" in problem.prompt
    assert problem.prompt.endswith("other words.\n\nQuestion: Who?\nAnswer:")
    (problem,) = _load("trec", _write(tmp_path / "x.jsonl", HUB_ROWS["trec"]))
    assert problem.prompt.endswith("Type: Person\nQuestion: How many?\nType:")


@pytest.mark.parametrize(
    ("name", "answers"),
    [("aime24", 30), ("aime25", 30), ("math500", 500)],
)
def test_benchmark_files_load(name: str, answers: int) -> None:
    path = BENCHMARKS / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    problems = _load(name, path)
    assert len(problems) == len({problem.id for problem in problems}) == answers
    assert problems[0].id == f"{name}-0"
    assert len(_load(name, path, limit=7)) == 7
    assert problems == _load(name, path)


@pytest.mark.parametrize(
    ("second", "fault"),
    [
        (b'{"id": "b", "question": "\xff"}', "not UTF-8: invalid start byte at byte 25"),
        (b"{'id': 'b'}", "not JSON: Expecting property name"),
        (b'{"id": "b"', "not JSON: Expecting ',' delimiter"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b'["b"]', "not an object but a list"),
        (b"null", "not an object but null"),
        (b'{"id": "b", "answer": "1"}', "no field 'question' (nor 'problem', 'Problem')"),
        (b'{"id": "b", "question": "Q"}', "no field 'answer'"),
        (b'{"id": "b", "question": null, "answer": "1"}', "no field 'question'"),
        (b'{"id": "b", "question": 5, "answer": "1"}', "field 'question' is no text but a number"),
        (b'{"id": "b", "question": " ", "answer": "1"}', "field 'question' is empty"),
        (b'{"id": "b", "question": "Q", "answer": [1]}', "field 'answer' is no text but a list"),
        (b'{"id": "b", "question": "Q", "answer": true}', "no text but true or false"),
        (b'{"id": "b", "question": "Q", "answer": 1.0}', "field 'answer' is no text but a number"),
        (b'{"id": "b", "question": "Q", "answer": "-1"}', "integers from 0 to 999, not '-1'"),
        (b'{"id": "b", "question": "Q", "answer": "1000"}', "integers from 0 to 999, not '1000'"),
        ('{"id": "b", "question": "Q", "answer": "٣"}'.encode(), "integers from 0 to 999"),
        (b'{"id": ["b"], "question": "Q", "answer": "1"}', "field 'id' is no text but a list"),
        (b'{"id": "a", "question": "Q", "answer": "1"}', "duplicate id 'a', first at "),
    ],
    ids=range(20),
)
def test_broken_lines_are_named(second: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"id": "a", "question": "Q", "answer": "1"}\n' + second + b"\n")
    with pytest.raises(TaskError) as caught:
        _load("aime24", path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert fault in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("gpqa_diamond", {"Incorrect Answer 3": None}, "no field 'Incorrect Answer 3'"),
        ("gpqa_diamond", {"wrong": ["w1"]}, "holds 1 answers, not 3"),
        ("humaneval", {"entry_point": "os.system('x')"}, "no name of a function"),
        ("humaneval", {"test": ""}, "field 'test' is empty"),
        ("hotpotqa", {"answers": []}, "field 'answers' is empty"),
        ("hotpotqa", {"answers": ["a", 1]}, "no list of texts but a list"),
        ("trec", {"all_classes": None}, "no field 'all_classes'"),
        ("trec", {"answers": ["Colour"]}, "'Colour' is not among 'all_classes'"),
        ("gsm8k", {"answer": "12 ####"}, "an answer has 1 to 1000 characters, not 0"),
        ("math500", {"answer": "x" * 1001}, "1 to 1000 characters, not 1001"),
    ],
    ids=range(10),
)
def test_broken_fields_are_named(
    name: str, change: dict[str, Any], fault: str, tmp_path: Path, code_allowed: bool
) -> None:
    if name == "humaneval" and not code_allowed:
        pytest.skip("no sandbox here")
    path = _write(tmp_path / "x.jsonl", {**HUB_ROWS[name], **change})
    with pytest.raises(TaskError, match=r"x\.jsonl:1: ") as caught:
        _load(name, path)
    assert fault in str(caught.value)


def test_lines_and_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"question": "Q", "answer": "1"}
    path = _write(tmp_path / "x.jsonl", row, row, {**row, "pad": "x" * 200})
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 100)
    with pytest.raises(TaskError, match=r"x\.jsonl:3: line longer than 100 bytes"):
        _load("aime24", path)
    monkeypatch.setattr(rows, "MAX_ROWS", 1)
    with pytest.raises(TaskError, match=r"x\.jsonl:2: more than 1 rows"):
        _load("aime24", path)


def test_whole_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.jsonl: No such file"):
        _load("aime24", tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match="Is a directory"):
        _load("aime24", tmp_path)
    with pytest.raises(TaskError, match=r"empty\.jsonl: no rows"):
        _load("aime24", _write(tmp_path / "empty.jsonl", "", "  "))


def test_half_surrogates_do_not_get_into_a_prompt(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.jsonl", '{"question": "a \\ud800 b", "answer": "1"}')
    (problem,) = _load("aime24", path)
    assert problem.prompt.startswith("a ? b")


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=300), name=st.sampled_from(sorted(OWN_ROWS)))
def test_any_bytes_load_or_name_their_line(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes(content)
        with pytest.raises(TaskError, match=r"x\.jsonl"):
            _load(name, path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted({*OWN_ROWS, "trec"})))
def test_any_change_of_a_row_loads_or_names_its_line(data: st.DataObject, name: str) -> None:
    row = dict(HUB_ROWS[name])
    field = data.draw(st.sampled_from(sorted(row)))
    row[field] = data.draw(_JSON)
    with tempfile.TemporaryDirectory() as folder:
        path = _write(Path(folder) / "x.jsonl", row)
        try:
            (problem,) = _load(name, path)
        except TaskError as error:
            assert f"{path}:1: " in str(error)
        else:
            problem.prompt.encode("utf-8")


def test_no_hub_says_how_to_take_a_file(tmp_path: Path) -> None:
    """In a process of its own: the hub's libraries read their settings when imported."""
    program = (
        "from eval.tasks.registry import find_task\n"
        "from eval.tasks.task import Source, TaskError\n"
        "for name in ('aime24', 'gpqa_diamond', 'trec'):\n"
        "    try:\n        find_task(name).load(Source())\n"
        "    except TaskError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    names = ["HuggingFaceH4/aime_2024", "Idavidrein/gpqa", "THUDM/LongBench"]
    assert len(lines) == 3, done.stderr
    for task, dataset, line in zip(("aime24", "gpqa_diamond", "trec"), names, lines, strict=True):
        assert line.startswith(f"--tasks {task}: cannot load data set {dataset!r}")
        assert line.endswith(f"--data {task}=FILE.jsonl takes a local file")


def test_rows_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongBench's zip, read in place; only the download is replaced."""
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/trec.jsonl", json.dumps(HUB_ROWS["trec"]) + "\n")
        archive.writestr("data/hotpotqa.jsonl", " " * 1000 + "{}\n")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    (problem,) = find_task("trec").load(Source())
    assert problem.id == "t1"
    with pytest.raises(TaskError, match=r"LongBench/data\.zip/data/hotpotqa\.jsonl:1: no field"):
        find_task("hotpotqa").load(Source())
    monkeypatch.setattr(rows, "_MAX_ARCHIVE_BYTES", 500)
    with pytest.raises(TaskError, match=r"hotpotqa\.jsonl:1: more than 500 bytes"):
        find_task("hotpotqa").load(Source())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TaskError, match=r"--data trec=FILE\.jsonl takes a local file"):
        find_task("trec").load(Source())


def test_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set library's own tables; only the name is replaced, by a local file."""
    import datasets

    path = _write(tmp_path / "x.jsonl", HUB_ROWS["gsm8k"], HUB_ROWS["gsm8k"])
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, **__: load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        ),
    )
    assert [p.id for p in find_task("gsm8k").load(Source())] == ["gsm8k-1", "gsm8k-2"]
    with pytest.raises(TaskError, match=r"HuggingFaceH4/aime_2024:1: answers of aime24"):
        find_task("aime24").load(Source())


def test_every_task_has_a_row_here() -> None:
    """Nothing in the registry stays untested."""
    generated = {"tiny_reasoner", "tiny_reasoner_long", "aime24_replay", "math500_replay"}
    assert set(TASKS) - generated == set(HUB_ROWS)

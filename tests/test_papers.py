# SPDX-License-Identifier: Apache-2.0
"""Tests docs/papers.md: programs take the commands that it names, and its table of techniques is that of
the error for such a name. Runs the commands that take seconds."""

import importlib
import inspect
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from eval import command
from eval.fidelity import documents
from eval.fidelity.arms import parse_all
from eval.methods import find_method
from eval.runs.options import parse as parse_run
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from sglang_reasoncache import policy_options, registry, techniques
from sglang_reasoncache.config import ConfigError, ReasonCacheConfig, parse_settings
from sglang_reasoncache.policy_options import PolicyError
from sglang_reasoncache.techniques import TECHNIQUES, Here, Technique
from tests.eval.peer import write_rows
from tools import papers_table

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in papers_table.PAGE.read_text(encoding="utf-8").partition("\n## ")[0].splitlines()
    if re.match(r"\| (MemShare|ReasonCache|KeyDiff|SamKV|survey) \|", line)
]
LONGBENCH = Path(lm_eval.__file__).parent / "tasks" / "longbench"
COMMANDS = sorted({
    code
    for row in ROWS
    for code in re.findall(r"`([^`]+)`", row[3])
    if code.startswith(("python ", "make "))
})  # fmt: skip


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """The program and the arguments of each ``python -m eval...`` that a command runs; of ``make`` those in the
    recipe of its target, without what prepares models."""
    words = shlex.split(text)
    if words[0] == "python":
        assert words[1] == "-m"
        return [(words[2], words[3:])]
    told = subprocess.run(
        ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [shlex.split(line) for line in told.stdout.splitlines() if " -m eval." in line]
    found = [(line[2], line[3:]) for line in lines]
    return [
        one
        for one in found
        if one[0]
        not in (
            "eval.models.smollm2",
            "eval.models.qwen",
            "eval.models.minilm",
            "eval.small_reasoner",
        )
    ]


def check(program: str, words: Sequence[str]) -> None:
    """Pass the arguments to the program's parser, and what they name to what reads it."""
    if program == "eval.run":
        options, _ = parse_run(words)
        for method in options.methods:
            find_method(method)
        from eval.tasks.harness import _NEEDLE, HUB, MATHEMATICS

        own = {"tiny_reasoner", "gpqa_diamond", "humaneval", *MATHEMATICS, *HUB}
        for task in options.tasks:
            longbench = LONGBENCH / f"{task.removeprefix('longbench_')}.yaml"
            assert task in own or _NEEDLE.fullmatch(task) or longbench.is_file(), task
        return
    module = importlib.import_module(
        f"{program}.__main__" if program == "eval.fidelity" else program
    )
    given: Any = command.parse(module.Options, words)
    if program == "eval.fidelity" and given.documents:
        assert [documents.parse(arm) for arm in given.arms]
    elif program == "eval.fidelity" and given.arms:
        parse_all(given.arms, given.like)
    elif program == "eval.bench.servers" and given.bench in ("reasoncache", "memshare"):
        assert set(given.only) <= module.BENCHES[given.bench](None).keys()


@pytest.mark.parametrize("text", COMMANDS)
def test_its_program_takes_the_command(text: str) -> None:
    found = commands_of(text)
    assert found
    for program, words in found:
        check(program, words)


def test_rows_say_where_they_run_or_why_not() -> None:
    assert {row[0] for row in ROWS} == {"MemShare", "ReasonCache", "KeyDiff", "SamKV", "survey"}
    assert len(COMMANDS) > 30
    for paper, what, here, how in ROWS:
        if paper == "survey":
            continue
        assert here in ("embedded", "GPU", "missing"), what
        # A row without a command refers to another one, or to a page.
        has = any(code in how for code in COMMANDS)
        assert has or "the same" in how or "command" in how or here == "missing", what
        assert here != "missing" or len(how) > 20, what
        assert here != "GPU" or "cuda" in how or "bench-gpu" in how or not has, what


def test_a_stale_command_is_found() -> None:
    for text in (
        "python -m eval.run --tasks tiny_reasoner --methods dense,memshares",
        "python -m eval.run --tasks tiny_reasoners --methods dense",
        "python -m eval.fidelity M R --arms memshare:aligns=index --like memshare",
        "make bench-memshare BENCH_ARGS='--only blocks'",
        "make bench-memshares",
    ):
        with pytest.raises((ValueError, AssertionError, SystemExit, subprocess.CalledProcessError)):
            for program, words in commands_of(text):
                check(program, words)


QUICK = [
    text
    for text in COMMANDS
    if "eval.redundancy" in text or ("eval.fidelity" in text and "build/models/smollm2" in text)
]


@pytest.mark.parametrize("text", QUICK)
def test_the_quick_ones_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the embedded reasoner as model, and short responses and documents."""
    monkeypatch.chdir(tmp_path)
    texts = [problem.response for problem in generate(seed=5, count=2)]
    write_rows(
        tmp_path / "RESPONSES.jsonl",
        *({"question": "?", "response": 2 * text, "correct": True} for text in texts),
    )
    asked = {"question": "a b", "answer": "c", "documents": [texts[0][:200], texts[1][:200]]}
    write_rows(tmp_path / "DOCUMENTS.jsonl", {"system": "a", **asked})
    [(program, words)] = commands_of(text)
    module = importlib.import_module(
        f"{program}.__main__" if program == "eval.fidelity" else program
    )
    if program.startswith("eval.fidelity"):
        words = [str(CHECKPOINT) if word == "build/models/smollm2" else word for word in words]
        words = [
            word.replace("encoder=build/models/minilm", "encoder=embedding:metric=cosine")
            for word in words
        ]
        words += ["--limit", "1", "--cap", "700", "--shortest", "10", "--out", "found.json"]
        if program == "eval.fidelity.heatmap":
            words[-1] = "found.png"
    command.run(module.Options, module.work, words)
    assert any(path.suffix in (".json", ".md", ".png") for path in tmp_path.iterdir())


def test_the_page_has_the_table_of_techniques() -> None:
    """``python -m tools.papers_table`` writes it."""
    page = papers_table.PAGE.read_text(encoding="utf-8")
    assert papers_table.filled(page) == page
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES) >= 35


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: one.name)
def test_a_technique_is_named_with_what_serves_it_or_the_reason(technique: Technique) -> None:
    policies = {*registry.BUILT_IN, *registry.SELECTING}
    for name in (technique.name.upper(), technique.name.replace(" ", "-").lower()):
        if name in policies:
            continue
        with pytest.raises(PolicyError) as caught:
            policy_options.parse(f"{name}:budget=64")
        assert str(caught.value).endswith(f"({technique.sentence})")
    assert technique.code or technique.text
    assert technique.code == "" or technique.here is not Here.REFUSED
    assert technique.text or technique.here is not Here.REFUSED
    program, _, words = technique.code.partition(" --")
    if program.startswith("python -m"):
        check(program.split()[2], [*program.split()[3:], *shlex.split(f"--{words}")])
    elif technique.code.startswith("--reasoncache-preset "):
        ReasonCacheConfig.from_mapping({"preset": technique.code.split()[1]})
    elif technique.code.startswith("--reasoncache-set "):
        ReasonCacheConfig.from_mapping(parse_settings(technique.code.split()[1]))
    elif technique.code.startswith("--"):
        from sglang.srt.server_args import ServerArgs

        assert technique.code[2:].replace("-", "_") in inspect.signature(ServerArgs).parameters
    elif technique.code:
        separator = "," if ":" in technique.code else ":"
        assert policy_options.parse(f"{technique.code}{separator}budget=64").needs_our_attention


def test_the_servers_flag_says_so() -> None:
    with pytest.raises(
        ConfigError, match=r"--reasoncache-policy must .* \(PyramidKV is refused: a slot"
    ):
        ReasonCacheConfig(policy="pyramidkv:budget=64")
    assert techniques.named("no such thing") is None

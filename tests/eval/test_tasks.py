# SPDX-License-Identifier: Apache-2.0
"""The registry, orders and seeds of problems, sampling settings."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from eval.tasks.registry import TASKS, find_task
from eval.tasks.sampling import Sampling, sampling_for
from eval.tasks.task import Source, TaskError
from eval.tasks.thinking import opens_thinking
from eval.tiny_reasoner.model import build_tokenizer
from eval.tiny_reasoner.task import BOX
from eval.tiny_reasoner.transcript import transcripts


def test_registry_names_itself() -> None:
    assert set(TASKS) >= {
        *("aime24", "aime25", "math500", "gsm8k", "gpqa_diamond", "humaneval"),
        *("hotpotqa", "trec", "tiny_reasoner"),
    }
    for name, task in TASKS.items():
        assert task.name == name and re.fullmatch("[a-z0-9_]+", name)
        assert task.title and task.measure in ("accuracy", "F1", "reproduced")
        assert find_task(name) is task
        assert list(task.server_flags()) == list(task.server_flags())
    assert len({task.title for task in TASKS.values()}) == len(TASKS)


def test_unknown_task_names_the_flag_and_the_known() -> None:
    with pytest.raises(TaskError, match=r"--tasks: no task 'mmlu'; there are .*aime24.*trec"):
        find_task("mmlu")


def test_code_needs_permission() -> None:
    with pytest.raises(TaskError, match=r"--tasks humaneval .* --allow-code-execution"):
        find_task("humaneval").load(Source(path=Path("any.jsonl")))


def _gpqa_file(tmp_path: Path, count: int) -> Path:
    path = tmp_path / "gpqa.jsonl"
    rows = [
        {"id": f"r{i}", "question": "Q {A}", "answer": "right", "wrong": ["w1", "w2", "w3"]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gpqa_choices_are_shuffled_by_seed_and_problem(tmp_path: Path) -> None:
    path = _gpqa_file(tmp_path, 200)
    task = find_task("gpqa_diamond")
    first = task.load(Source(path=path, seed=0))
    assert first == task.load(Source(path=path, seed=0))
    assert first[:50] == task.load(Source(path=path, seed=0, limit=50))
    other = task.load(Source(path=path, seed=1))
    changed = sum(a.prompt != b.prompt for a, b in zip(first, other, strict=True))
    assert 150 < changed < 200
    letters = Counter(problem.reference for problem in first)
    assert set(letters) == set("ABCD") and min(letters.values()) > 25
    for problem in first:
        assert f"\n{problem.reference}) right" in problem.prompt
        assert all(f") {text}" in problem.prompt for text in ("w1", "w2", "w3"))
        assert "Q {A}" in problem.prompt


def test_tiny_reasoner_generates() -> None:
    task = find_task("tiny_reasoner")
    problems = task.load(Source(seed=3, limit=40))
    default = task.load(Source(seed=3))
    assert len(default) == 500 and problems == default[:40]
    assert {p.group for p in problems} == {"error", "clean"}
    assert len({p.id for p in problems}) == 40
    assert all(p.max_tokens == 1500 for p in problems)
    assert {p.prompt for p in problems}.isdisjoint(
        p.prompt for p in task.load(Source(seed=4, limit=40))
    )
    with pytest.raises(TaskError, match="--data tiny_reasoner=x.jsonl"):
        task.load(Source(path=Path("x.jsonl")))
    with pytest.raises(TaskError, match="at most 100000 for tiny_reasoner, not 100001"):
        task.load(Source(limit=100_001))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", (0.6, 0.95, None, None)),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", (0.6, 0.95, None, None)),
        ("/models/qwq_32b", (0.6, 0.95, 40, 0.0)),
        ("/models/Qwen3-8B/", (0.6, 0.95, 20, 0.0)),
        ("/data/QwQ_ckpts/llama", (0.6, 0.95, None, None)),
        ("qwen3-fans/llama", (0.6, 0.95, None, None)),
        ("out/QwQ-tuned/checkpoint-500", (0.6, 0.95, 40, 0.0)),
        ("/hub/models--Qwen--QwQ-32B/snapshots/0123abcd", (0.6, 0.95, 40, 0.0)),
        ("/hub/models--qwq-fans--llama/snapshots/0123abcd", (0.6, 0.95, None, None)),
        ("tiny_reasoner", (0.0, 1.0, None, None)),
        ("Qwen/QwQ-32B", (0.6, 0.95, 40, 0.0)),
        ("Qwen/Qwen3-30B-A3B", (0.6, 0.95, 20, 0.0)),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", (0.7, 0.8, 20, 0.0)),
        ("microsoft/Phi-4-reasoning", (0.8, 0.95, 50, None)),
        ("microsoft/Phi-4-reasoning-plus", (0.8, 0.95, 50, None)),
        ("microsoft/Phi-4-mini-reasoning", (0.8, 0.95, None, None)),
        ("openai/gpt-oss-20b", (1.0, 1.0, None, None)),
        ("eval/tiny_reasoner/checkpoint", (0.0, 1.0, None, None)),
        ("somebody/unheard-of", (0.6, 0.95, None, None)),
        ("", (0.6, 0.95, None, None)),
    ],
)
def test_sampling(model: str, expected: tuple[float, float, int | None, float | None]) -> None:
    found = sampling_for(model)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == expected


def test_sampling_body_is_flat() -> None:
    body = Sampling(0.6, 0.95, 20, 0.0, 100).to_body()
    assert body == {
        **{"temperature": 0.6, "top_p": 0.95, "max_tokens": 100},
        **{"top_k": 20, "min_p": 0.0},
    }
    assert Sampling(0.0, 1.0).to_body() == {"temperature": 0.0, "top_p": 1.0, "max_tokens": 32768}


_TURNS = "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + m['content'] }}{%- endfor %}"
_ASKED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
_HYBRID = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        # How the templates of QwQ-32B, the R1 distills, Qwen3 and Qwen2.5 end.
        (_TURNS + _ASKED + "{{- '<think>\\n' }}{%- endif %}", True),
        (_TURNS + "{% if add_generation_prompt %}{{'<|Assistant|><think>\\n'}}{% endif %}", True),
        (_TURNS + _ASKED + _HYBRID + "{%- endif %}", False),
        (_TURNS + _ASKED + "{%- endif %}", False),
        # Without a generation prompt the user's own words come last.
        ("{{- messages[0]['content'] + '<think></think>' }}", False),
        ("{{ raise_exception('no such role') }}", False),
        ("{% if %}", False),
        (None, False),
    ],
    ids=range(8),
)
def test_templates_that_open_the_reasoning(
    template: str | None, opens: bool, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(tmp_path))
    assert opens_thinking(str(tmp_path)) is opens


def test_a_model_without_tokenizer_opens_nothing(tmp_path: Path) -> None:
    assert opens_thinking(str(tmp_path)) is False
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert opens_thinking(str(tmp_path)) is False
    assert opens_thinking("") is False


def test_long_prompts_are_responses_up_to_their_last_round() -> None:
    """What is left of the reference response finishes what was begun, and is graded right."""
    task = find_task("tiny_reasoner_long")
    problems = task.load(Source(seed=3, limit=40))
    assert problems == task.load(Source(seed=3, limit=40))
    assert problems[:5] == task.load(Source(seed=3, limit=5))
    assert {p.prompt for p in problems}.isdisjoint(
        p.prompt for p in task.load(Source(seed=4, limit=40))
    )
    assert {p.group for p in problems} == {"clean", "error"}
    tokenizer = build_tokenizer()
    for problem, given in zip(problems, transcripts(3, 40), strict=True):
        assert problem.prompt == given.problem.prompt
        user, assistant = problem.extra["messages"]
        assert user == {"role": "user", "content": problem.prompt}
        assert problem.extra["continue_final_message"] is True
        begun, response = assistant["content"], given.problem.response
        assert response.startswith(begun + " ") and begun.endswith("\n\n")
        assert "<|" not in begun and BOX not in begun
        ids = tokenizer(problem.prompt)["input_ids"] + tokenizer(begun)["input_ids"]
        assert tokenizer.pad_token_id not in ids
        assert 450 < len(ids) < 760
        rest = response[len(begun) :].strip()
        assert rest.split(" ")[0] in ("wait", "now", "check")
        assert problem.max_tokens is not None and len(rest.split(" ")) < problem.max_tokens / 2
        assert task.grade(problem, rest).correct
        assert not task.grade(problem, begun).correct
    with pytest.raises(TaskError, match="tiny_reasoner_long=.*are generated"):
        task.load(Source(path=Path("x.jsonl")))

# SPDX-License-Identifier: Apache-2.0
"""Tests replays: a server repeats recorded responses exactly, even if it retracts their requests."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from eval import command
from eval.jsonl import texts_of
from eval.replay.__main__ import Options, work
from eval.replay.forcing import FORCED, forced_request
from eval.replay.model import CONTEXT_LENGTH, VOCABULARY_SIZE
from eval.runs.cells import retractions
from eval.runs.client import Request
from eval.serving import MODEL_NAME, ServerProcess
from eval.tasks.documents import replay
from eval.tasks.harness import EvalTask, Source, TaskError
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_FLAGS
from eval.tiny_reasoner.task import generate
from tests.eval.peer import ask_all, write_rows
from tests.server.specs import beside_ours


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of reference responses to the embedded reasoner's problems. The responses repeat themselves."""
    asked = enumerate(generate(seed=5, count=12))
    rows = [{"id": f"r{i}", "question": p.prompt, "response": p.response} for i, p in asked]
    return write_rows(tmp_path_factory.mktemp("recorded") / "responses.jsonl", *rows)


def load(path: Path, limit: int | None = None) -> EvalTask:
    return EvalTask("x_replay", Source(file=str(path), model=str(CHECKPOINT), limit=limit))


def records(path: Path) -> dict[str, str]:
    return {row["id"]: row["target"] for row in replay(str(path), str(CHECKPOINT))["test"]}


def reproduced(task: EvalTask, texts: dict[str, str]) -> dict[str, bool]:
    found = task.evaluate([texts[problem.id] for problem in task.problems], True)
    return {name: grade.score == 1.0 for name, grade in found.items()}


def test_problems_are_longest_first_and_hold_every_token(recorded: Path) -> None:
    problems = load(recorded).problems
    texts = records(recorded)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    lengths = [problem.max_tokens or 0 for problem in problems]
    assert lengths == sorted(lengths, reverse=True)
    assert len({problem.id for problem in problems}) == 12
    for problem in problems:
        forced = problem.body["custom_params"][FORCED]
        assert len(forced) == problem.max_tokens
        assert tokenizer.decode(forced) == texts[problem.id]


def test_grading(recorded: Path) -> None:
    """A response is right if it equals the record, <think> tags included. Whitespace at the ends is ignored."""
    task = load(recorded, 1)
    (problem,) = task.problems
    record = records(recorded)[problem.id]
    others = ("", record[:-1], record + " .", "x" * 10_000_000)
    for text, same in {record: True, f" {record}\n": True, **dict.fromkeys(others, False)}.items():
        assert reproduced(task, {problem.id: text}) == {problem.id: same}


def build(path: Path, out: Path) -> None:
    command.run(Options, work, [str(path), "--out", str(out)])


def test_no_file_no_tokenizer_no_token(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"question": "q", "answer": "no response here"})
    with pytest.raises(SystemExit, match=f"{path}:1"):
        build(path, tmp_path)
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: no field 'response'"):
        load(path)
    with pytest.raises(TaskError, match="--data x_replay=FILE"):
        EvalTask("x_replay", Source(model=str(CHECKPOINT)))
    with pytest.raises(TaskError, match="the tokenizer of '/no/such/model'"):
        EvalTask("x_replay", Source(file="nothing.jsonl", model="/no/such/model"))
    with pytest.raises(ValueError, match="at least one token"):
        forced_request([])


def test_the_model_spells(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(recorded, tmp_path)
    folder = Path(capsys.readouterr().out.split()[-1])
    weights = folder / "model.safetensors"
    built = weights.stat().st_mtime_ns
    build(recorded, tmp_path)
    assert weights.stat().st_mtime_ns == built
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in [*texts_of([recorded]), " \n\n odd\u00e9\u4e2d\x00 \t", "<|user|>"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert max(ids) < VOCABULARY_SIZE
        assert tokenizer.decode(ids) == text
    # ``eval/replay/model.py`` documents this ratio of the weights' size to the KV size of one token.
    config = AutoConfig.from_pretrained(folder)
    heads = config.num_key_value_heads
    size = config.head_dim
    kv_bytes = 4 * config.num_hidden_layers * heads * size
    assert weights.stat().st_size / kv_bytes == pytest.approx(130_000, rel=0.05)
    assert config.max_position_embeddings == CONTEXT_LENGTH


NGRAMS = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 6 --speculative-ngram-max-bfs-breadth"


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize(
    "drafts", ["", f"{NGRAMS} 1", f"{NGRAMS} 4"], ids=["none", "chains", "trees"]
)
def test_replay_over_retractions(recorded: Path, tmp_path: Path, drafts: str) -> None:
    """A server that drafts verifies against the record: it accepts drafts, and the text stays the same."""
    task = load(recorded)
    flags = [*task.server_flags, "--enable-reasoncache", *EMBEDDED_FLAGS, *drafts.split()]
    flags += ["--max-total-tokens", "2000"]
    requests = [
        Request(p.id, p.messages[0]["content"], {**p.body, "max_tokens": p.max_tokens})
        for p in task.problems
    ]
    env = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64", "PYTHONPATH": beside_ours("speculating")}
    with ServerProcess(CHECKPOINT, flags=flags, env=env, log_path=tmp_path / "log") as server:
        responses = ask_all(server.url, MODEL_NAME, requests)
        totals = server.get("/reasoncache").json()["schedulers"][0]["totals"]
        log = server.log_text()
    assert [row.error for row in responses] == [None] * len(requests)
    assert all(reproduced(task, {row.problem_id: row.text for row in responses}).values())
    assert retractions(log) > 0
    assert totals["final_saving_ratio"] > 0.05
    accepted = [float(length) for length in re.findall(r"accept len: ([0-9.]+)", log)]
    assert max(accepted, default=1.0) > 1.5 if drafts else not accepted

# SPDX-License-Identifier: Apache-2.0
"""Tests two benchmarks. The tests of ``eval.bench.servers`` include a small run on the CPU. Those of attention
cover batches, order of calls and the check of results. The benchmark itself checks the timed kernels."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch

from eval import command
from eval.bench import servers
from eval.bench.attention_batch import RUN, SHARES, Shape, cached_positions, lay_rows
from eval.bench.documents import Tasks
from eval.bench.servers import AIME, BENCHES, LOOPING, MATH, SAMPLES, Options, gpu, work
from eval.bench.turns import take_turns
from eval.command import flags_of
from eval.methods import find_method
from eval.runs.folder import cells
from eval.runs.options import parse
from eval.tasks.documents import replay
from eval.tiny_reasoner.task import generate
from sglang_reasoncache.kernels.plan import plan_rows
from tests.eval.peer import write_rows
from tests.triton_runs import interpreted


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with trace files. Two have six responses, and two that repeat one of the six 20 times; the third
    has two long responses to each question."""
    monkeypatch.chdir(tmp_path)
    texts = [problem.response for problem in generate(seed=5, count=6)]
    texts += [text * 20 for text in texts[:2]]
    for name in (AIME, MATH):
        write_rows(tmp_path / name, *({"question": "?", "response": text} for text in texts))
    samples = [{"question": str(at // 2), "response": text * 20} for at, text in enumerate(texts)]
    write_rows(tmp_path / SAMPLES, *samples)
    return tmp_path


def test_samples_of_a_question_have_one_prompt(traces: Path) -> None:
    options, _ = parse(flags_of(servers.siblings(traces, size=1000, questions=2)["replay"]))
    rows = replay(options.data["aime24_replay"], options.model)["test"]
    assert options.limit == len(rows) == 4
    assert sorted(rows["prompt"]) == ["0", "0", "1", "1"] and set(rows["max_tokens"]) == {1000}
    with pytest.raises(ValueError, match="no question has only responses of over 1000000 tokens"):
        servers.siblings(traces, size=10**6)


def test_answers_of_two_hops_need_two_documents() -> None:
    rows = [*Tasks(words=40, seed=1).rows("two-hop", 8)]
    assert len({row["question"] for row in rows}) > 4
    for row in rows:
        person, code = row["answer"].removeprefix(" ").split(". The access code of ")
        facts = f"{row['lead'].removeprefix('The ')} {person}.", f"he access code of {code}."
        [keeper], [coded] = (
            [i for i, text in enumerate(row["documents"]) if fact in text] for fact in facts
        )
        assert keeper != coded


@pytest.mark.parametrize("bench", BENCHES)
def test_each_method_of_each_run_is_one_that_the_server_takes(bench: str, traces: Path) -> None:
    for words in BENCHES[bench](traces).values():
        options, _ = parse(flags_of(words))
        assert options.methods[0] == "dense" and options.limit and options.kv_budget
        others = [find_method(method) for method in options.methods[1:]]
        assert all(method.shares or method.is_tuned for method in others)


def test_prompts_of_pieces_differ_so_that_no_prefix_is_shared(traces: Path) -> None:
    assert servers.looping_pieces([[7] * (LOOPING + 1), [8] * 50], 4000) == [[7] * 4000] * 4
    options, _ = parse(flags_of(gpu(traces, 400, 1300, 500)["waiting"]))
    for file in options.data.values():
        prompts = replay(file, options.model)["test"]["prompt"]
        assert len({prompt.partition(".")[0] for prompt in prompts}) == len(prompts) > 2


@pytest.mark.server
@pytest.mark.long
def test_all_of_it_on_the_cpu(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = functools.partial(gpu, piece=400, longest=1300, whole=500)
    monkeypatch.setitem(BENCHES, "gpu", small)
    flags = "--limit 5 --kv-budget 1500 --methods dense,newest:when=always"
    command.run(Options, work, ["gpu", f"--traces={traces}", "--only=waiting", "--flags", flags])
    (run,) = traces.glob("build/bench/gpu/*/waiting")
    assert {cell.task for cell in cells(run)} == {"loops_replay", "finished_replay"}
    assert all(row.correct for cell in cells(run) for row in cell.results())
    shared = [one["blocks_shared"] for cell in cells(run) for one in cell.served().totals()]
    assert len(shared) == 2 and max(shared) > 0
    assert "### Against dense" in capsys.readouterr().out


SHAPE = Shape(3, 989, 4, 2, 64)


@pytest.mark.parametrize("percent", [0, 22, 50])
def test_rows_are_shared_by_so_much_and_shifted_by_whole_blocks(percent: int) -> None:
    rows = lay_rows(SHAPE, percent)
    cached_at = cached_positions(SHAPE)
    assert rows.dtype == cached_at.dtype == torch.int32
    assert cached_at.shape == (SHAPE.slots,) and SHAPE.layer_bytes == 3 * 989 * 2 * 2 * 64 * 2
    requests = torch.arange(3)
    lengths = torch.full((3,), SHAPE.tokens)
    plan = plan_rows(rows, requests, lengths, cached_at, num_slots=SHAPE.slots)
    shift = torch.zeros(rows.numel()) if plan.shift is None else plan.shift
    shifted = float((shift != 0).float().mean())
    assert shifted == pytest.approx(percent / 100, abs=RUN / SHAPE.tokens)
    # A position reads its own slot, or the slot of a position of its request a multiple of ``RUN`` earlier.
    assert bool((shift >= 0).all()) and bool((shift % RUN == 0).all())
    assert torch.equal((rows - 1) % SHAPE.requests, torch.arange(3)[:, None].expand(3, 989).int())
    unshared = lay_rows(SHAPE, 0)
    assert len(unshared.unique()) == unshared.numel() == SHAPE.slots - 1
    assert torch.equal(rows[:, :RUN], unshared[:, :RUN])
    assert torch.equal(rows[:, -1], unshared[:, -1])


def test_sides_take_turns_and_the_first_round_warms_up() -> None:
    order: list[str] = []

    def side(name: str) -> list[dict[str, float]]:
        order.append(name)
        return [{"ms": 2.0}]

    sides = {name: functools.partial(side, name) for name in ("a", "b")}
    samples = take_turns(sides, 2, lambda: {"bandwidth": 7.0})
    assert "".join(order) == "abbaab"
    assert samples["round"].tolist() == [1, 1, 2, 2] and set(samples["bandwidth"]) == {7.0}


GPU_BATCH = """
import json, sys

for name in ("sglang", "flashinfer", "pandas", "transformers", "scipy", "matplotlib"):
    sys.modules[name] = None
import torch
from eval.bench.attention_batch import Shape
from eval.bench.attention_cuda import CudaBatch, measured

def once(call):
    call()
    return [1.0]

with torch.inference_mode():
    batch = CudaBatch(Shape(1, 70, 4, 1, 16), "cpu")
    for figures in measured(batch, 10.0, 1, once):
        print(json.dumps(figures))
    batch = CudaBatch(Shape(2, 70, 2, 2, 16), "cpu", torch.float8_e4m3fn)
    batch.share(22, 16)
    try:
        batch.check("ones", torch.ones_like(batch.query), batch.rows)
    except RuntimeError as error:
        print(error)
"""


def test_the_gpu_batch_interpreted() -> None:
    """The GPU benchmark works without SGLang and FlashInfer. Its check detects a wrong result."""
    done = interpreted("-c", GPU_BATCH, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["shared_percent"], row["run"]) for row in rows] == [*SHARES]
    assert {*rows[0]["ms"]} == {"ours", "plan"}
    assert re.fullmatch(r"ones, 2x70-2/2x16: relative error [\d.]+", last)

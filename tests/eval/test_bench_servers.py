# SPDX-License-Identifier: Apache-2.0
"""``eval.bench.servers``: ``eval.run`` accepts all its runs; a small run works on the CPU."""

import functools
from pathlib import Path

import pytest

from eval import command
from eval.bench import servers
from eval.bench.servers import AIME, BENCHES, BUDGETS, LOOPING, MATH, Options, gpu, work
from eval.command import flags_of
from eval.methods import find_method
from eval.runs.folder import cells
from eval.runs.options import parse
from eval.tasks.documents import replay
from eval.tiny_reasoner.task import generate
from tests.eval.peer import write_rows


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Responses of the embedded reasoner's task; two of them repeat themselves endlessly."""
    monkeypatch.chdir(tmp_path)
    texts = [problem.response for problem in generate(seed=5, count=6)]
    texts += [text * 20 for text in texts[:2]]
    for name in (AIME, MATH):
        write_rows(tmp_path / name, *({"question": "?", "response": text} for text in texts))
    return tmp_path


@pytest.mark.parametrize("bench", BENCHES)
def test_each_method_of_each_run_is_one_that_the_server_takes(bench: str, traces: Path) -> None:
    for words in BENCHES[bench](traces).values():
        options, _ = parse(flags_of(words))
        assert options.methods[0] == "dense" and options.limit and options.kv_budget
        assert all(find_method(method).shares for method in options.methods[1:])


def test_a_budget_leaves_out_what_is_aimed_at() -> None:
    lengths = range(45, 580)
    for saving, budget in zip((0.1, 0.2, 0.4, 0.6), BUDGETS, strict=True):
        left_out = sum(max(0, length - budget) for length in lengths)
        assert left_out / sum(lengths) == pytest.approx(saving, abs=0.005)


def test_prompts_of_pieces_differ_so_that_no_prefix_is_shared(traces: Path) -> None:
    assert servers.looping_pieces([[7] * (LOOPING + 1), [8] * 50], 4000) == [[7] * 4000] * 4
    options, _ = parse(flags_of(gpu(traces, 400, 1300, 500)["waiting"]))
    for file in options.data.values():
        prompts = replay(file, options.model)["test"]["prompt"]
        assert len({prompt.partition(".")[0] for prompt in prompts}) == len(prompts) > 2


def test_an_unknown_run_is_refused() -> None:
    with pytest.raises(ValueError, match="--only must be of small_reasoner, got another"):
        work(command.parse(Options, ["answers", "--only", "another"]))


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

# SPDX-License-Identifier: Apache-2.0
"""``eval.bench.servers``: its runs are what ``eval.run`` takes."""

import json
from pathlib import Path

import pytest

from eval import command
from eval.bench import AIME, LOOPING, MATH
from eval.bench.servers import BENCHES, BUDGETS, Options, _pieces, work
from eval.command import flags_of
from eval.methods import find_method
from eval.runs.options import parse
from eval.tokenizers import load_tokenizer
from tests.eval.peer import write_rows


@pytest.mark.parametrize("bench", BENCHES)
def test_each_method_of_each_run_is_one_that_the_server_takes(bench: str) -> None:
    for words in BENCHES[bench](None).values():
        options, _ = parse(flags_of(words))
        assert options.methods[0] == "dense" and options.limit and options.kv_budget
        assert all(find_method(method).shares for method in options.methods[1:])


def test_a_budget_leaves_out_what_is_aimed_at() -> None:
    lengths = range(45, 580)
    for saving, budget in zip((0.1, 0.2, 0.4, 0.6), BUDGETS, strict=True):
        left_out = sum(max(0, length - budget) for length in lengths)
        assert left_out / sum(lengths) == pytest.approx(saving, abs=0.005)


def test_replays_are_pieces_of_looping_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "What?", "response": text * (LOOPING + 1)} for text in ("wait ", "")]
    rows[1]["response"] = "Short."
    for name in (AIME, MATH):
        write_rows(tmp_path / name, *rows)
    options, _ = parse(flags_of(BENCHES["serve"](tmp_path)["aime24_replay"]))
    assert Path(options.data["aime24_replay"]).is_file()
    lines = _pieces(tmp_path / AIME, load_tokenizer(options.model))
    assert len(lines) == 5 and {json.loads(line)["question"] for line in lines} == {"What?"}


def test_an_unknown_run_is_refused() -> None:
    with pytest.raises(ValueError, match="--only must be of small_reasoner, got another"):
        work(command.parse(Options, ["answers", "--only", "another"]))

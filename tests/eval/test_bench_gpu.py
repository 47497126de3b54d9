# SPDX-License-Identifier: Apache-2.0
"""``bench-gpu``: what it plans and how it compares; and all of it on the CPU, with a narrow shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import command
from eval.bench import AIME
from eval.bench.gpu import Options, exact, requests_of, table, work
from eval.measures.figures import speeds_of
from eval.runs.folder import Cell, Moment
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from eval.tokenizers import load_tokenizer
from tests.eval.peer import response, served
from tests.eval.rows import write_rows


def main(words: list[str]) -> None:
    command.run(Options, work, words)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Responses of the embedded reasoner's task; two go round in circles."""
    texts = [problem.response for problem in generate(seed=5, count=6)]
    texts += [text * 20 for text in texts[:2]]
    write_rows(tmp_path / AIME, *({"response": text} for text in texts))
    return tmp_path


SMALL = [
    f"--{name}={size}"
    for name, size in dict(slots=1500, piece=400, looping=1300, whole=500, requests=5).items()
]


def test_it_says_what_would_run(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shape of an 8B model, whose weights are not made."""
    words = [str(traces), "--out", str(tmp_path), *SMALL, "--plan", "--sides", "ours:triton"]
    main(words)
    told = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert told["loops"] == "4 requests, 1,600 tokens"
    assert (
        told["finished"].startswith("5 requests") and told["together"] == "2 requests, 800 tokens"
    )
    assert told["ours:triton"] == f"{told['stock']} --attention-backend triton --enable-reasoncache"
    (config,) = (tmp_path / "gpu").glob("*/config.json")
    assert json.loads(config.read_text())["num_hidden_layers"] == 36
    assert not [*config.parent.glob("*.safetensors")]
    with pytest.raises(SystemExit, match="eval.bench.gpu: error: loops: no response"):
        main([*words, "--looping", "100000"])


KNOWN = "must be one of stock, ours, as-cached, nothing-shared, or NAME:BACKEND, got"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sides", "theirs:triton"], f"--sides: {KNOWN} theirs:triton"),
        (["--sides", "ours:"], f"--sides: {KNOWN} ours:"),
        (["--reference", "stock:"], f"--reference: {KNOWN} stock:"),
    ],
)
def test_what_it_cannot_compare_is_refused(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nowhere", "--plan", *more])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sides"),
    [
        ([], "stock ours stock:flashinfer nothing-shared:flashinfer"),
        (["--reference", "stock:flashinfer"], "stock:flashinfer ours nothing-shared:flashinfer"),
        (["--reference", "stock:triton", "--sides", "stock"], "stock:triton stock"),
    ],
)
def test_others_are_compared_with_the_reference(
    traces: Path, tmp_path: Path, more: list[str], sides: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(traces), "--out", str(tmp_path), *SMALL, "--plan", *more])
    servers = [line for line in capsys.readouterr().out.splitlines() if "--load-format" in line]
    assert [line.split(": ")[0] for line in servers] == sides.split()
    backends = [line.partition("--attention-backend ")[2].split(" ")[0] for line in servers]
    assert backends == [side.partition(":")[2] for side in sides.split()]


def test_prompts_differ_so_that_no_prefix_is_shared() -> None:
    found = Options(Path()).workloads([[7] * 30_000, [8] * 50])
    assert all(len(ids) == 4000 for ids in found["loops"] + found["together"])
    tokenizer = load_tokenizer(str(CHECKPOINT))
    for responses in found.values():
        requests = requests_of(responses, tokenizer)
        assert len({request.prompt.partition(".")[0] for request in requests}) == len(requests) > 2
        assert all(
            one.body["max_tokens"] == len(ids) for one, ids in zip(requests, responses, strict=True)
        )


def test_a_side_is_compared_with_the_reference(tmp_path: Path) -> None:
    cells, tokenizer = {}, load_tokenizer(str(CHECKPOINT))
    texts = [problem.response for problem in generate(seed=5, count=2)]
    responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    requests = requests_of(responses, tokenizer)
    for name, seconds, running in (("stock:triton", 2.0, 10), ("ours", 1.0, 20)):
        cells[name] = cell = Cell(tmp_path, "loops", name, 0)
        timeline = [Moment(i, running, 4, 10, 0, 1000.0) for i in range(5)]
        timeline += [Moment(i, 2, 0, 10, 0, 100.0 / seconds) for i in range(5)]
        rows = [response(str(i), text=text[i:]) for i, text in enumerate(texts)]
        cell.write(rows, timeline, served(seconds=seconds))
    found = speeds_of([cells["ours"]], [cells["stock:triton"]])
    found["exact"] = exact([cells["ours"]], requests, tokenizer)
    lines = table([{"side": "ours", "workload": "loops", **found}], "stock:triton").splitlines()
    assert "| tokens/s of stock:triton's" in lines[0]
    shown = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert shown == ["ours", "loops", "2", "11 (6)", "20 (40)", "1 of 2"]


@pytest.mark.server
@pytest.mark.long
def test_all_of_it_on_the_cpu(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(traces), "--out", str(tmp_path), "--device", "cpu", "--sides", "as-cached", *SMALL])
    rows: list[dict[str, Any]] = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["workload"] for row in rows] == ["loops", "finished", "together"]
    for row in rows:
        right, asked = row["exact"].split(" of ")
        assert right == asked
    # The side that shares at once, whether or not slots are short.
    assert rows[0]["blocks_shared"] > 0
    assert capsys.readouterr().out.count("| as-cached ") == 3

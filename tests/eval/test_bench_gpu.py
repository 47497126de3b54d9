# SPDX-License-Identifier: Apache-2.0
"""``bench-gpu``: what it plans and how it compares; and all of it on the CPU, with a narrow shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import command
from eval.bench import AIME
from eval.bench.gpu import Options, requests_of, work
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from eval.tokenizers import load_tokenizer
from tests.eval.peer import write_rows


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

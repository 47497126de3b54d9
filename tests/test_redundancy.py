# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.redundancy`` on responses made here, some of them not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.redundancy.__main__ import main

STEP = "so we take the first of the numbers and add the second one to it"
OTHER = "nothing here looks like that"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows),
        encoding="utf-8",
    )
    return path


def run(tmp_path: Path, rows: list[Any], *options: str) -> dict[str, Any]:
    out = tmp_path / "out"
    traces = write(tmp_path / "traces.jsonl", rows)
    assert main([str(traces), "--out", str(out), *options]) == 0
    assert (out / "redundancy.png").stat().st_size > 10_000
    assert "| responses of " in (out / "redundancy.md").read_text()
    return json.loads((out / "redundancy.json").read_text())


def test_counts_by_hand(tmp_path: Path) -> None:
    """Five steps: new, new, copy of the first, half as long again, copy of the second."""
    response = "\n\n".join([STEP, OTHER, STEP, f"{STEP} {STEP}", OTHER])
    found = run(tmp_path, [{"dataset": "made", "response": response}])["groups"]["made"]
    assert (found["responses"], found["steps"], found["later_steps"]) == (1, 5, 4)
    # Twice the same words have cosine 1 and half the length.
    assert found["similar_steps"]["with_length_factor"] == {"0.8": 0.5, "0.9": 0.5}
    assert found["similar_steps"]["plain_cosine"] == {"0.8": 0.75, "0.9": 0.75}
    assert found["steps_with_candidate"] == 0.5
    # With the two newlines behind it the first copy has 17 tokens; the second one has 5.
    shareable = found["shareable_tokens"]["candidate"]
    assert shareable["4"]["at_the_end"] == pytest.approx((4 * 4 + 4) / found["tokens"])
    assert shareable["8"]["at_the_end"] == pytest.approx(2 * 8 / found["tokens"])
    assert shareable["16"]["at_the_end"] == pytest.approx(16 / found["tokens"])
    assert 0 < shareable["4"]["over_decode_steps"] < shareable["4"]["at_the_end"]


def test_structure_decides_on_formal_steps(tmp_path: Path) -> None:
    """The same words with another number are no candidate."""
    steps = [f"{STEP} which makes it {n} in the end" for n in (7, 8)]
    found = run(tmp_path, [{"response": "\n\n".join(steps)}])["groups"]["traces"]
    assert found["shareable_tokens"]["candidate"]["4"]["at_the_end"] > 0
    assert found["shareable_tokens"]["structure"]["4"]["at_the_end"] == 0


def test_groups(tmp_path: Path) -> None:
    rows = [
        {"dataset": "a|b $x$", "correct": True, "response": STEP},
        {"dataset": "a|b $x$", "correct": False, "response": STEP},
        {"dataset": "c", "response": STEP},
    ]
    groups = run(tmp_path, rows)["groups"]
    assert list(groups) == ["all of them", "a|b $x$", "a|b $x$, correct", "a|b $x$, wrong", "c"]
    assert groups["all of them"]["responses"] == 3


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"response": ' + "9" * 10_000 + "}", "not JSON"),
        ("[1]", "not an object but a list"),
        ("{}", "no field 'response'"),
        ('{"response": 3}', "no text but a number"),
        ('{"response": null}', "no text but null"),
        ('{"response": " \\n "}', "is empty"),
        ('{"response": "' + "x" * 5000 + '"}', "longer than 4000 bytes"),
    ],
)
def test_a_bad_line_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, fault: str
) -> None:
    limit = "200000" if len(line) > 90_000 or "9999" in line else "4000"
    rows = [line, {"response": STEP, "dataset": ["odd"]}]
    content = run(tmp_path, rows, "--max-line-bytes", limit)
    assert content["lines_left_out"] == 1
    message = capsys.readouterr().err
    assert "traces.jsonl:1: left out: " in message and fault in message
    assert content["groups"]["traces"]["responses"] == 1


def test_hostile_text_is_only_counted(tmp_path: Path) -> None:
    rows = [
        {"response": "\\frac{" * 5000 + "\n\n" + "(" * 5000},
        {"response": "9**9**9\n\n9**9**9\n\n```\nwhile True: pass"},
        {"response": "\ud800 half \u0000 \n\n\u202e\n\n"},
    ]
    assert run(tmp_path, rows)["groups"]["traces"]["responses"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["absent.jsonl"], "absent.jsonl"),
        (["EMPTY"], "no responses in"),
        (
            ["GOOD", "--tokenizer", "absent"],
            "--tokenizer must be 'words' or a folder, got 'absent'",
        ),
        (["GOOD", "--field", "text"], "no responses in"),
    ],
)
def test_nothing_to_measure_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    places = {
        "EMPTY": str(write(tmp_path / "empty.jsonl", [])),
        "GOOD": str(write(tmp_path / "good.jsonl", [{"response": STEP}])),
    }
    arguments = [places.get(option, option) for option in options]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_real_tokenizer(tmp_path: Path, model_path: Path) -> None:
    """The embedded reasoner's, whose blank line is one token."""
    step = "so we know which line gives us the value of it"
    rows = [{"response": f"{step} .\n\n{step} .\n\n"}]
    found = run(tmp_path, rows, "--tokenizer", str(model_path))["groups"]["traces"]
    assert found["steps"] == 2 and found["steps_with_candidate"] == 1.0

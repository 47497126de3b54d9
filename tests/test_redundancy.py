# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.redundancy`` on responses made here, some of them not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import command
from eval.redundancy import Options, work
from tests.eval.peer import write_rows

STEP = "so we take the first of the numbers and add the second one to it"
OTHER = "nothing here looks like that"


def run(tmp_path: Path, *rows: Any, options: tuple[str, ...] = ()) -> dict[str, Any]:
    out, traces = tmp_path / "out", write_rows(tmp_path / "traces.jsonl", *rows)
    # As some programs leave the last line.
    traces.write_text(traces.read_text(encoding="utf-8").removesuffix("\n"), encoding="utf-8")
    command.run(Options, work, [str(traces), "--out", str(out), *options])
    assert "| responses of " in (out / "redundancy.md").read_text()
    return json.loads((out / "redundancy.json").read_text())


def test_counts_by_hand(tmp_path: Path) -> None:
    """Five steps: new, new, copy of the first, half as long again, copy of the second."""
    response = "\n\n".join([STEP, OTHER, STEP, f"{STEP} {STEP}", OTHER])
    found = run(tmp_path, {"dataset": "made", "response": response})["groups"]["made"]
    assert (found["responses"], found["steps"], found["later_steps"]) == (1, 5, 4)
    # Twice the same words have cosine 1 and half the length.
    assert found["similar_steps"] == found["steps_with_candidate"] == 0.5
    # With the two newlines behind it the first copy has 17 tokens; the second one has 5.
    shareable, tokens = found["shareable_tokens"], found["tokens"]
    for rule, shared in {"d=4": 4 * 4 + 4, "d=8": 2 * 8, "d=16": 16}.items():
        assert shareable[rule]["at_the_end"] == pytest.approx(shared / tokens)
    assert 0 < shareable["d=4"]["over_decode_steps"] < shareable["d=4"]["at_the_end"]
    # No block is old enough.
    assert shareable["default"] == {"at_the_end": 0, "over_decode_steps": 0}


def test_the_default_rule_shares_what_is_old(tmp_path: Path) -> None:
    response = "\n\n".join([STEP] * 30)
    found = run(tmp_path, {"dataset": "made", "response": response})["groups"]["made"]
    assert found["shareable_tokens"]["default"]["at_the_end"] > 0.3


def test_groups(tmp_path: Path) -> None:
    rows = [{"dataset": "a|b $x$", "correct": right, "response": STEP} for right in (True, False)]
    groups = run(tmp_path, *rows, {"dataset": "c", "response": STEP})["groups"]
    assert list(groups) == ["all of them", "a|b $x$", "a|b $x$, correct", "a|b $x$, wrong", "c"]
    assert groups["all of them"]["responses"] == 3


def test_bad_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {
        "{": "not JSON",
        "[" * 100_000: "not JSON",
        '{"response": ' + "9" * 10_000 + "}": "not JSON",
        "{}": "no field 'response'",
        '{"response": 3}': "is no text",
        '{"response": " \\n "}': "is no text, or empty",
    }
    content = run(tmp_path, *faults, {"response": STEP, "dataset": ["odd"]})
    assert content["lines_left_out"] == len(faults)
    told = capsys.readouterr().err
    for number, fault in enumerate(faults.values(), 1):
        (line,) = [line for line in told.splitlines() if f"traces.jsonl:{number}: " in line]
        assert "left out: " in line and fault in line
    assert content["groups"]["traces"]["responses"] == 1


def test_nothing_to_measure_is_one_line(tmp_path: Path) -> None:
    empty = str(write_rows(tmp_path / "empty.jsonl"))
    good = str(write_rows(tmp_path / "good.jsonl", {"response": STEP}))
    for options, message in (
        (["absent.jsonl"], "absent.jsonl"),
        ([empty], "no responses in"),
        ([good, "--tokenizer", "absent"], "--tokenizer must be 'words' or a folder, got 'absent'"),
        ([good, "--field", "text"], "no responses in"),
    ):
        with pytest.raises(SystemExit, match=message):
            command.run(Options, work, [*options, "--out", str(tmp_path / "out")])


def test_a_real_tokenizer(tmp_path: Path, model_path: Path) -> None:
    """The embedded reasoner's, whose blank line is one token."""
    step = "so we know which line gives us the value of it"
    row, options = {"response": f"{step} .\n\n{step} .\n\n"}, ("--tokenizer", str(model_path))
    found = run(tmp_path, row, options=options)["groups"]["traces"]
    assert found["steps"] == 2 and found["steps_with_candidate"] == 1.0

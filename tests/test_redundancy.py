# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.redundancy`` on responses made here, some of them not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import command
from eval.redundancy.__main__ import Options, work
from tests.eval.rows import write_rows

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
    # The same words with another number are no candidate.
    other = "\n\n".join(f"{STEP} which makes it {n} in the end" for n in (7, 8))
    rows = [{"dataset": "made", "response": response}, {"dataset": "numbers", "response": other}]
    groups = run(tmp_path, *rows)["groups"]
    found, structure = groups["made"], groups["numbers"]["shareable_tokens"]
    assert (found["responses"], found["steps"], found["later_steps"]) == (1, 5, 4)
    # Twice the same words have cosine 1 and half the length.
    assert found["similar_steps"]["with_length_factor"] == {"0.8": 0.5, "0.9": 0.5}
    assert found["similar_steps"]["plain_cosine"] == {"0.8": 0.75, "0.9": 0.75}
    assert found["steps_with_candidate"] == 0.5
    # With the two newlines behind it the first copy has 17 tokens; the second one has 5.
    shareable, tokens = found["shareable_tokens"]["candidate"], found["tokens"]
    for block, shared in {"4": 4 * 4 + 4, "8": 2 * 8, "16": 16}.items():
        assert shareable[block]["at_the_end"] == pytest.approx(shared / tokens)
    assert 0 < shareable["4"]["over_decode_steps"] < shareable["4"]["at_the_end"]
    assert structure["candidate"]["4"]["at_the_end"] > 0
    assert structure["structure"]["4"]["at_the_end"] == 0


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
        '{"response": 3}': "no text but a number",
        '{"response": " \\n "}': "is empty",
        '{"response": "' + "x" * 200_000 + '"}': "longer than 200000 bytes",
    }
    row, bound = {"response": STEP, "dataset": ["odd"]}, ("--max-line-bytes", "200000")
    content = run(tmp_path, *faults, row, options=bound)
    assert content["lines_left_out"] == len(faults)
    told = capsys.readouterr().err
    for number, fault in enumerate(faults.values(), 1):
        (line,) = [line for line in told.splitlines() if f"traces.jsonl:{number}: " in line]
        assert "left out: " in line and fault in line
    assert content["groups"]["traces"]["responses"] == 1


def test_hostile_text_is_only_counted(tmp_path: Path) -> None:
    texts = ["\\frac{" * 5000 + "\n\n" + "(" * 5000, "\ud800 half \u0000 \n\n\u202e\n\n"]
    texts += ["9**9**9\n\n9**9**9\n\n```\nwhile True: pass"]
    found = run(tmp_path, *({"response": text} for text in texts))["groups"]
    assert found["traces"]["responses"] == 3


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

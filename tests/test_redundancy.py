# SPDX-License-Identifier: Apache-2.0
"""Runs ``python -m eval.redundancy`` on made-up responses, some of them broken."""

from pathlib import Path
from typing import Any

import pytest

from eval import command
from eval.redundancy import Options, work
from tests.eval.peer import write_rows

STEP = "so we take the first of the numbers and add the second one to it"
OTHER = "nothing here looks like that"


def run(tmp_path: Path, *rows: Any, options: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Runs the program; returns its table, as a dict from the first cell of each row to the other cells."""
    out = tmp_path / "out"
    traces = write_rows(tmp_path / "traces.jsonl", *rows)
    # The last line has no newline, as in files that some programs write.
    traces.write_text(traces.read_text(encoding="utf-8").removesuffix("\n"), encoding="utf-8")
    command.run(Options, work, [str(traces), "--out", str(out), *options])
    lines = (out / "redundancy.md").read_text().splitlines()
    cells = [line[1:-1].replace("\\|", "¦").split("|") for line in lines if line.startswith("|")]
    return {cell[0].strip().replace("¦", "|"): [x.strip() for x in cell[1:]] for cell in cells}


def test_counts_by_hand(tmp_path: Path) -> None:
    """Five steps, separated by blank lines: STEP, OTHER, STEP, one step that has STEP twice, and OTHER."""
    response = "\n\n".join([STEP, OTHER, STEP, f"{STEP} {STEP}", OTHER])
    found = run(tmp_path, {"dataset": "made", "response": response})["made"]
    # 78 tokens. Steps 3 and 5 are copies of earlier steps. Step 4 is similar to no step: it is twice as long.
    assert found[:3] == ["1", "15.6", "50.0%"]
    # The default rule finds no block that is old enough, at any page size. The other three rules cut the
    # copies into blocks of 4, 8 or 16 tokens. Step 3 has 17 tokens, including its newlines, and step 5 has 5.
    ends = [f"{shared / 78:.1%}" for shared in (0, 0, 0, 0, 4 * 4 + 4, 2 * 8, 16)]
    assert [cell.partition(" / ")[0] for cell in found[3:10]] == ends
    # By the cosine alone, step 4 is similar to step 1.
    assert found[10:] == ["75.0%", "75.0%"]
    assert 0 < float(found[7].partition(" / ")[2][:-1]) < 100 * 20 / 78


def test_bad_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {
        "{": "not JSON", "[" * 100_000: "not JSON",
        '{"response": ' + "9" * 10_000 + "}": "not JSON", "{}": "no field 'response'",
        '{"response": 3}': "is no text", '{"response": " \\n "}': "is no text, or empty",
    }  # fmt: skip
    found = run(tmp_path, *faults, {"response": STEP, "dataset": ["odd"]})
    told = capsys.readouterr().err
    for number, fault in enumerate(faults.values(), 1):
        (line,) = [line for line in told.splitlines() if f"traces.jsonl:{number}: " in line]
        assert "left out: " in line and fault in line
    assert found["traces"][0] == "1"


def test_nothing_to_measure_is_one_line(tmp_path: Path) -> None:
    empty = str(write_rows(tmp_path / "empty.jsonl"))
    good = str(write_rows(tmp_path / "good.jsonl", {"response": STEP}))
    for options, message in (
        (["absent.jsonl"], "absent.jsonl"),
        ([empty], "no responses in"),
        ([good, "--tokenizer", "absent"], "--tokenizer must be 'words' or a folder, got 'absent'"),
    ):
        with pytest.raises(SystemExit, match=message):
            command.run(Options, work, [*options, "--out", str(tmp_path / "out")])

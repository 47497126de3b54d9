# SPDX-License-Identifier: Apache-2.0
"""Tests prompts that show a file, for responses that quote it."""

import ast
import json
import sys

import pytest

from eval import quotes
from eval.quotes import edits, is_edited
from eval.tiny_reasoner import CHECKPOINT


def test_prompts_show_whole_files() -> None:
    made = list(edits(8))
    assert len({name for name, _, _ in made}) == 8
    for name, text, question in made:
        assert ast.parse(text).body and text in question and question.startswith(f"This is {name}:")


@pytest.mark.parametrize(
    ("response", "edited"),
    [
        (
            "Here:\n```python\ndef g(): pass\n```\nNow:\n```python\nimport a\ndef g(): pass\n```",
            True,
        ),
        ("```python\ndef g(): pass\n```", False),
        ("```python\ndef g(:\n```", False),
        ("no code", False),
        ("```python\n\0\n```", False),
    ],
)
def test_whether_a_file_was_written_again(response: str, edited: bool) -> None:
    assert is_edited("import a\ndef f(): pass\n", response) == edited


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("one.py", "def f(): pass\n", "Solve it.")
    monkeypatch.setattr(quotes, "edits", lambda count: [short] * count)
    monkeypatch.setattr(sys, "argv", ["quotes", str(CHECKPOINT), "--count", "2", "--most", "5"])
    quotes.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == ["one.py"] * 2
    assert rows[0]["response"] and rows[0]["correct"] is False

# SPDX-License-Identifier: Apache-2.0
"""Rules of style that ruff does not have."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sglang_reasoncache", "eval", "tests", "tools", "examples")


def crowded(source: str) -> Iterator[int]:
    """Lines of ``a, b = x, y`` where no value needs ``a`` or ``b``: two assignments read better."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)):
            continue
        targets = node.targets[0].elts
        value = node.value
        if not isinstance(value, ast.Tuple) or len(value.elts) != len(targets):
            continue
        parts = [part for side in (targets, value.elts) for part in side]
        if any(isinstance(part, ast.Starred | ast.Tuple) for part in parts):
            continue
        assigned = {ast.unparse(target) for target in targets}
        needed = {ast.unparse(part) for one in value.elts for part in ast.walk(one)}
        if not assigned & needed:
            yield node.lineno


def test_what_is_crowded() -> None:
    assert list(crowded("a, b = 1, f(2)\nself.x, y = x, y0")) == [1, 2]
    assert not list(crowded("a, b = b, a\n(a, b), c = d, e\na, *b = c, d\na, b = found\na = b, c"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_assignment_a_line(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in crowded(path.read_text(encoding="utf-8"))
    ]
    assert not found

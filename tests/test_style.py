# SPDX-License-Identifier: Apache-2.0
"""Rules of style that ruff does not have."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sglang_reasoncache", "eval", "tests", "tools", "examples")

#: Names that do not say what they hold, and the folders that have none of them.
SILENT = {"found", "told", "own", "one", "asked"}
NAMED = ("sglang_reasoncache", "eval", "tools", "examples")


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
        needed = {ast.unparse(part) for element in value.elts for part in ast.walk(element)}
        if not assigned & needed:
            yield node.lineno


def test_what_is_crowded() -> None:
    assert list(crowded("a, b = 1, f(2)\nself.x, y = x, y0")) == [1, 2]
    assert not list(crowded("a, b = b, a\n(a, b), c = d, e\na, *b = c, d\na, b = found\na = b, c"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_assignment_a_line(folder: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in crowded(path.read_text(encoding="utf-8"))
    ]
    assert not lines


def silent(source: str) -> Iterator[int]:
    """Lines that give a variable, a parameter or a function a name of :data:`SILENT`, also behind underscores:
    ``match``, ``message`` or ``request`` says what it is."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                pass
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                pass
            case _:
                continue
        if name.strip("_") in SILENT:
            yield node.lineno


def test_what_is_silent() -> None:
    bound = "found = 1\ntold: int = 1\nself.own = 1\nfor one, _ in x: pass\n{y for asked in x}"
    others = "if asked := f(): pass\nwith x as found: pass\nimport x as told"
    functions = "def found(): pass\nasync def _told(): pass\nlambda own: 1\ndef f(*, one=1): pass"
    for line in f"{bound}\n{others}\n{functions}".splitlines():
        assert list(silent(line)) == [1], line
    assert not list(silent("match = found\nx.y(told=own.asked)\nown_rows = one_line('found')"))


@pytest.mark.parametrize("folder", NAMED)
def test_names_say_what_they_hold(folder: str) -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in silent(path.read_text(encoding="utf-8"))
    ]
    assert not lines

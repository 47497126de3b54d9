# SPDX-License-Identifier: Apache-2.0
"""A room (a folder or module of the package) imports only from its own or a lower layer, never in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_reasoncache

#: The rooms of each layer, lowest layer first.
LAYERS = (
    ("arguments", "errors", "techniques"), ("compat",), ("custom_params",), ("device",),
    ("kernels", "native", "filter", "cache"), ("eviction", "selection"), ("attention",),
    ("cpu", "registry"), ("policy_options",), ("config",), ("sharing",), ("plugin",),
)  # fmt: skip
ROOT = Path(sglang_reasoncache.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(file: Path) -> set[str]:
    ours = (name for name in imports(file) if name.startswith("sglang_reasoncache."))
    return {name.split(".")[1] for name in ours} - {"__version__"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_import_runs_upward(file: Path) -> None:
    room = room_of(file)
    if room != "__init__":
        above = {other for other in rooms_imported(file) if LAYER[other] > LAYER[room]}
        assert not above, f"{room} imports {', '.join(sorted(above))}"


def test_rooms_import_in_no_circle() -> None:
    """Repeatedly removes the rooms that import no other remaining room. Rooms in a circle would be left."""
    needs: dict[str, set[str]] = {room: set() for room in LAYER}
    for file in FILES:
        room = room_of(file)
        if room in needs:
            needs[room] |= rooms_imported(file) - {room}
    while free := {room for room in needs if not needs[room] & needs.keys()}:
        needs = {room: others for room, others in needs.items() if room not in free}
    assert not needs, f"{', '.join(sorted(needs))} import one another"


def chains_through_the_port(tree: ast.AST) -> Iterator[str]:
    """The expressions that reach through an owner to what lies behind it, such as ``owner.pipeline.ledger``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            of = node.value.value
            name = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
            if name.lstrip("_") == "owner":
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "file", [file for file in FILES if room_of(file) == "cache"], ids=lambda file: file.name
)
def test_nobody_reaches_through_the_port(file: Path) -> None:
    """What lies below the controller asks it only through the methods of ``SlotOwner`` (``cache/owner.py``). It
    calls nothing behind them, and knows it by no other name."""
    tree = ast.parse(file.read_text())
    assert not list(chains_through_the_port(tree))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"controller", "pipeline", "tracker", "containment", "report", "forecast"}


def test_a_chain_through_the_port_is_found() -> None:
    source = "self.owner.pipeline.request_waits()\nowner.ranks.alone\nself._owner.reclaim(1)"
    assert set(chains_through_the_port(ast.parse(source))) == {
        "self.owner.pipeline.request_waits",
        "owner.ranks.alone",
    }


def test_attributes_on_sglangs_objects_are_named_in_one_place() -> None:
    """No file but ``compat/carriers.py`` spells an attribute that we put on SGLang's objects."""
    spelled = {
        str(file.relative_to(ROOT))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("_reasoncache")
        )
        or (isinstance(node, ast.Attribute) and node.attr.startswith("_reasoncache"))
    }
    assert spelled == {"compat/carriers.py"}

# SPDX-License-Identifier: Apache-2.0
"""What ``make docs`` cannot check: links outside of docs/, paths of source files, pictures' commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
#: Read on their own; links into docs/ are relative.
READMES = [ROOT / "README.md", ROOT / "csrc" / "README.md", ROOT / "eval/tiny_reasoner/README.md"]
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
#: `sharing/state.py`, `config.py: ReasonCacheConfig`, `filter/structure/`
_SOURCE = re.compile(r"`((?:[a-z_]+/)*(?:[a-z_0-9]+\.(?:py|cpp|sh))|(?:[a-z_]+/)+)(?:: (\w+))?`")
_PLACES = [ROOT, ROOT / "sglang_reasoncache", ROOT / "sglang_reasoncache" / "kernels"]
#: What commands make, not in a checkout.
_MADE = ("build/", "out/", "docs/")


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Of headings, as MkDocs and GitHub make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", READMES, ids=_ids)
def test_links_of_readmes(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=_ids)
def test_source_paths_exist(page: Path) -> None:
    for path, name in _SOURCE.findall(page.read_text()):
        if path.startswith(_MADE):
            continue
        existing = [place / path for place in (*_PLACES, page.parent) if (place / path).exists()]
        assert existing, path
        assert not name or re.search(rf"\b{name}\b", existing[0].read_text()), f"{path}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_every_picture_names_its_command(page: Path) -> None:
    text = page.read_text()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)\n", text):
        after = text.partition(f"({picture})\n")[2].lstrip().partition("\n\n")[0]
        assert re.match(r"\(`(python -m eval\.|make )", after), picture
        for module in re.findall(r"python -m (eval[\w.]*)", after):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def _rooms_imported(path: Path) -> set[str]:
    """Dotted names of this package's modules that ``path`` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    package = "sglang_reasoncache."
    return {name.removeprefix(package) for name in found if name.startswith(package)}


def test_rooms_import_those_above_them_in_the_table() -> None:
    text = (
        (ROOT / "docs/architecture.md").read_text().partition("\n| room |")[2].partition("\n\n")[0]
    )
    rooms = [name.replace("/", ".") for name in re.findall(r"^\| `([\w/]+)/`", text, re.MULTILINE)]
    assert len(rooms) > 8

    def room_of(module: str) -> str | None:
        # The longest one: eviction.policies is a room of its own.
        of = [room for room in rooms if f"{module}.".startswith(f"{room}.")]
        return max(of, key=len) if of else None

    for path in sorted((ROOT / "sglang_reasoncache").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "sglang_reasoncache").with_suffix("").parts)
        room = room_of(name)
        if room is None:
            continue
        used = {other for each in _rooms_imported(path) if (other := room_of(each))}
        above = {other for other in used if rooms.index(other) > rooms.index(room)}
        assert not above, f"{name} imports {', '.join(above)}"

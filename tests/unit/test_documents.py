# SPDX-License-Identifier: Apache-2.0
"""What ``make docs`` cannot check: links outside of docs/, paths of source files, pictures' commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_reasoncache.plugin import report
from sglang_reasoncache.plugin.refusals import CONFLICTS, CORRECTED_CONFLICTS
from sglang_reasoncache.sharing.stats import SharingStats
from tests.contract.test_layers import LAYER

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


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=_ids)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    # "That commit's" command is gone since.
    pattern = r"(?<!that commit's\s`)python -m\s((?:eval|sglang_reasoncache)[\w.]*\w)"
    for module in re.findall(pattern, text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not set(re.findall(r"`make ([\w-]+)", text)) - set(targets)


def test_rooms_stand_in_the_order_of_layers() -> None:
    text = (
        (ROOT / "docs/architecture.md").read_text().partition("\n| room |")[2].partition("\n\n")[0]
    )
    rooms = re.findall(r"^\| `(\w+)/", text, re.MULTILINE)
    assert [LAYER[room] for room in rooms] == sorted(LAYER[room] for room in rooms)
    package = ROOT / "sglang_reasoncache"
    assert set(rooms) == {path.parent.name for path in package.glob("*/__init__.py")}


def test_refused_flags_and_series_are_in_their_pages() -> None:
    index, architecture, evaluation = (
        (ROOT / f"docs/{name}.md").read_text() for name in ("index", "architecture", "evaluation")
    )
    for page, fields in ((index, CONFLICTS), (architecture, CORRECTED_CONFLICTS)):
        missing = [flag for field in fields if (flag := _flag(field)) not in page]
        assert not missing
    selected = (f"selection_{field}" for field in report._SELECTION)
    series = [*(field.removesuffix("_total") for field in report._COUNTERS), *selected]
    assert not [name for name in series if f"`{name}`" not in index]
    totals = set(re.findall(r"`(\w+)`", _table(evaluation, "total")))
    assert totals == SharingStats().to_dict().keys()


def _flag(field: str) -> str:
    return "`--" + field.replace("_", "-") + "`"


def _table(text: str, heading: str) -> str:
    """First column of the table that begins with ``heading``."""
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return "\n".join(re.findall(r"^\| (.*?) \|", rows, re.MULTILINE))

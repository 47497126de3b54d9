# SPDX-License-Identifier: Apache-2.0
"""The policy that docs/eviction.md builds does what it says, and the tables have every option."""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

from sglang_reasoncache import registry
from sglang_reasoncache.eviction.row_state import EvictionRefusal
from sglang_reasoncache.selection.page_selection import SelectionRefusal
from sglang_reasoncache.sharing.decision import Refusal
from tests.eviction.views import positions, view

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"
EVICTION, SELECTION, ARCHITECTURE = (
    (DOCUMENTS / f"{name}.md").read_text() for name in ("eviction", "selection", "architecture")
)


@pytest.fixture
def example(tmp_path: Path) -> Iterator[ModuleType]:
    """The document's module, as another package would have it."""
    [source] = re.findall(r"```python\n(.*?)```", EVICTION, flags=re.DOTALL)
    path = tmp_path / "thinning_of_the_document.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Type hints of a class are looked up in its module.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def test_the_example(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {**registry.BUILT_IN, "thinning": f"{example.__name__}:Thinning"}
    monkeypatch.setattr(registry, "BUILT_IN", registered)
    try:
        [(_, policy)] = registry.parse("thinning:budget=10:keep=4:recent=2").evictors
        with pytest.raises(registry.PolicyError, match="keep of thinning between 2 and 1000"):
            registry.parse("thinning:budget=10:keep=1")
    finally:
        registry.parse.cache_clear()
    assert positions(policy.evict(view(20, owned=3), 8)) == [3, 5, 6, 7, 9, 10, 11, 13]
    assert positions(policy.evict(view(30, page=2), 5)) == [2, 3, 4, 5, 6, 7]


def test_every_policy_and_option_is_in_the_tables() -> None:
    text = EVICTION + SELECTION
    for name, target in registry.BUILT_IN.items():
        [row] = re.findall(rf"^\| `{name}` \|.*$", text, flags=re.MULTILINE)
        for field in dataclasses.fields(pkgutil.resolve_name(target)):
            common = re.search(rf"^\| `{field.name}\b|`{field.name}=F`", text, flags=re.MULTILINE)
            assert f"`{field.name}={field.default}" in row or common, field.name


@pytest.mark.parametrize(
    ("text", "heading", "refusals"),
    [
        (EVICTION, "refusal", EvictionRefusal),
        (SELECTION, "refusal", SelectionRefusal),
        (ARCHITECTURE, "reason", Refusal),
    ],
)
def test_every_refusal_is_in_its_table(text: str, heading: str, refusals: type[Enum]) -> None:
    rows = text.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == [each.value for each in refusals]

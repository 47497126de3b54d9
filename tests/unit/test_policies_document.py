# SPDX-License-Identifier: Apache-2.0
"""The policy that docs/policies.md builds from scratch does what it says."""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_reasoncache import registry
from sglang_reasoncache.eviction.apply import EvictionRefusal
from sglang_reasoncache.selection.checked_selector import SelectionRefusal
from tests.eviction.test_evictors import positions, view

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@pytest.fixture
def example(tmp_path: Path) -> Iterator[ModuleType]:
    """The document's module, as another package would have it."""
    [source] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
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
    text = DOCUMENT.read_text()
    for name, target in registry.BUILT_IN.items():
        [row] = re.findall(rf"^\| `{name}` \|.*$", text, flags=re.MULTILINE)
        for field in dataclasses.fields(pkgutil.resolve_name(target)):
            common = re.search(rf"^\| `{field.name}\b|`{field.name}=F`", text, flags=re.MULTILINE)
            assert f"`{field.name}={field.default}" in row or common, field.name


def test_every_refusal_is_in_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:is|begins|ends|holds|leaves|was)", DOCUMENT.read_text(), re.MULTILINE
    )
    assert rows == [refusal.value for refusal in (*SelectionRefusal, *EvictionRefusal)]

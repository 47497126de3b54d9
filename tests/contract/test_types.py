# SPDX-License-Identifier: Apache-2.0
"""SGLang's classes have the attributes that our protocols name."""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest

from sglang_reasoncache.compat import types

CASES = [
    (protocol, attribute)
    for protocol in types.CLASSES
    for attribute in types.attributes_of(protocol)
]


def test_every_protocol_has_a_class() -> None:
    """A new protocol is checked as well."""
    protocols = {
        value
        for value in vars(types).values()
        if getattr(value, "_is_protocol", False) and value.__module__ == types.__name__
    }
    assert protocols == set(types.CLASSES)


@pytest.mark.parametrize(
    ("protocol", "attribute"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_attribute_exists(protocol: type, attribute: str) -> None:
    """Set by the class, by one it inherits from, or declared there."""
    found = pkgutil.resolve_name(types.CLASSES[protocol])
    sources = [base for base in found.__mro__ if base.__module__.startswith("sglang")]
    declared = {name for base in sources for name in getattr(base, "__annotations__", ())}
    assigned = re.compile(rf"\bself\.{attribute}\b[^=\n]*(:[^=\n]+)?=[^=]")
    assert (
        hasattr(found, attribute)
        or attribute in declared
        or any(assigned.search(inspect.getsource(base)) for base in sources)
    ), f"{found.__name__} has no {attribute}"

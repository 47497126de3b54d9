# SPDX-License-Identifier: Apache-2.0
"""Tests ``make sglang-diff``, which says what changed of the SGLang functions that we use."""

from tools import sglang_diff

OLD = {
    "version": "1",
    "uses": {"a.same": ["hook"], "a.other": ["hook", "super"], "a.gone": ["import"]},
    "sources": {"a.same": "x", "a.other": "def f():\n    return 1\n", "a.gone": "y"},
    "fields": ["kept", "left"],
}
NEW = {
    "version": "2",
    "uses": OLD["uses"],
    "sources": {"a.same": "x", "a.other": "def f():\n    return 2\n", "a.gone": None},
    "fields": ["came", "kept"],
}


def test_what_changed_is_told() -> None:
    brief = [*sglang_diff.compare(OLD, NEW, full=False)]
    assert brief == [
        "not in 2  a.gone  (import)",
        "changed +1 -1  a.other  (hook, super)",
        "unchanged: 1 of 3",
        "new fields of ServerArgs: came",
        "gone fields of ServerArgs: left",
    ]
    full = [*sglang_diff.compare(OLD, NEW, full=True)]
    assert [line for line in full if line not in brief][1:] == [
        "     def f():",
        "    -    return 1",
        "    +    return 2",
    ]


def test_hooks_and_methods_of_ours_are_used() -> None:
    tree = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    assert {*sglang_diff._uses()} >= {
        ("hook", "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"),
        *(("import", tree), ("override", f"{tree}.insert"), ("super", f"{tree}.insert")),
    }
    found = sglang_diff._source(f"{tree}.insert", [tree])
    assert found and "def insert(" in found
    assert sglang_diff._source(tree, [tree]) == ""
    assert sglang_diff._source(f"{tree}.no_such_method", []) is None

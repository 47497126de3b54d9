# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""The C++ structure reader says exactly what the Python one says, on any text."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.structure import Limits, SignatureKind, signature
from sglang_reasoncache.filter.structure.scan import leaves_fence_open
from sglang_reasoncache.filter.structure.tree import serialise
from sglang_reasoncache.native.build import sanitized
from sglang_reasoncache.native.structure import native_leaves_fence_open, native_signature
from tests.filter import test_structure, test_structure_hostile
from tests.native import hostile

_DEFAULT = Limits()
_SMALL = Limits(max_chars=400, max_depth=12, max_nodes=60)
_WIDE = Limits(max_chars=1 << 20, max_depth=128, max_nodes=1 << 16)

# CPU time of one read at the default bounds; some hundred times what it takes,
# and a thousandth of what anything but linear work would.
_MAX_SECONDS = 0.05

_ROOT = Path(__file__).resolve().parents[2]
_TRACES = Path(os.environ.get("REASONCACHE_TRACES", _ROOT.parent / "shared/data/traces"))
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")

Read = tuple[SignatureKind, bytes, str]


def python_signature(text: str, limits: Limits, in_code: bool) -> Read:
    found = signature(text, limits, in_code=in_code, keep_trees=True)
    return found.kind, serialise(found.trees), found.bound


def check(library: ctypes.CDLL, text: str, limits: Limits = _DEFAULT) -> SignatureKind:
    """Compare both readers, inside a fence and outside. Returns the kind outside."""
    for in_code in (True, False):
        expected = python_signature(text, limits, in_code)
        assert native_signature(library, text, limits, in_code) == expected, (in_code, text[:2000])
        assert native_leaves_fence_open(library, text, in_code) == leaves_fence_open(text, in_code)
    return expected[0]


def parametrised_texts(module: ModuleType) -> Iterator[str]:
    """Every text in the ``parametrize`` marks of a test module."""
    for function in vars(module).values():
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                yield from _strings(mark.args[1])


def _strings(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _strings(value)


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def test_the_cases_of_the_python_reader(library: ctypes.CDLL) -> None:
    texts = [
        text
        for module in (test_structure, test_structure_hostile)
        for text in parametrised_texts(module)
        if not has_surrogate(text)
    ]
    assert len(texts) > 200
    for text in texts:
        for limits in (_DEFAULT, _SMALL, _WIDE):
            check(library, text, limits)


_FRAGMENTS = st.sampled_from(
    [
        "x", "a", "A", "I", "n", "the", "value", "of", "is", "so", "sin", "max", "mod", "ABC", "ABCDEFG",
        "Aǅ", "don't", "1", "23", "1,000", "3.14", ".5", "٣", "½", "²", "⁻¹", "ₙ₊₁", "x′", "+", "-", "−",
        "–", "*", "**", "/", "//", "=", "==", "<=", "≤", ":=", ":", "->", "⇒", "~", "√", "±", "∂", "!",
        "|", "%", "°", "∑", "^", "_", "__", "(", ")", "[", "]", "{", "}", "⌊", "⌋", ",", ".", ";", "?",
        "&", "&=", "'", "’", '"', "#", "\\", "\\\\", " ", "  ", "\n", "\n    ", "\n\t", "\r", "\x1c",
        "\u00a0", "\u3000", "\x00", "\ufffd", "数", "é", "e\u0301", "𝟏", "👩‍👩‍👧", "`", "``", "```",
        "```python\n", "$", "$$", r"\(", r"\)", r"\[", r"\]", r"\frac", r"\frac{1}{2}", r"\frac12",
        r"\sqrt", r"\sqrt[3]", r"\text{ cm }", r"\text*{", r"\begin{aligned}", r"\end{aligned}",
        r"\left(", r"\right)", r"\cdot", r"\le", r"\mid", r"\alpha", r"\ldots", r"\{", r"\}", r"\,",
        r"\lfloor", r"\rfloor", r"\sin", r"\log_2", r"\foo", r"\~", r"\bmod", r"\neg", "def f(x):",
        "x += 1", "<<=", "&&", "||", "::", "++", "--", "=>", '"a\\"b"', "'a\\\n'", "0x1F", "1e-3",
    ]
)  # fmt: skip
_JOINED = st.tuples(st.sampled_from(["", " "]), st.lists(_FRAGMENTS, max_size=40)).map(
    lambda parts: parts[0].join(parts[1])
)
_WRAPPED = st.tuples(
    st.sampled_from([("", ""), ("$", "$"), (r"\(", r"\)"), ("`", "`"), ("```\n", "\n```")]), _JOINED
).map(lambda parts: parts[0][0] + parts[1] + parts[0][1])
_TEXTS = st.one_of(_WRAPPED, st.lists(_WRAPPED, max_size=3).map(" so ".join), st.text(max_size=120))
_LIMITS = st.one_of(
    st.sampled_from([_DEFAULT, _SMALL]),
    st.builds(
        Limits, max_chars=st.integers(1, 300), max_depth=st.integers(1, 9),
        max_nodes=st.integers(1, 60),
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=1500)
@given(_TEXTS, _LIMITS)
def test_any_text(library: ctypes.CDLL, text: str, limits: Limits) -> None:
    check(library, text, limits)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), st.sampled_from(hostile.INVALID_UTF8)), _JOINED)
def test_any_bytes(library: ctypes.CDLL, data: bytes, text: str) -> None:
    """Invalid UTF-8 is read as what Python's decoder makes of it."""
    joined = data + text.encode() + data
    expected = python_signature(joined.decode("utf-8", "replace"), _DEFAULT, False)
    assert native_signature(library, joined, _DEFAULT) == expected


def _trace_steps() -> list[str]:
    """Distinct steps of all recorded responses, in order."""
    found: dict[str, None] = {}
    for path in sorted(_TRACES.glob("*.jsonl")):
        with path.open(encoding="utf-8") as rows:
            for row in rows:
                found |= dict.fromkeys(_BLANK_LINE.split(json.loads(row)["response"]))
    return list(found)


def test_every_step_of_recorded_responses(library: ctypes.CDLL) -> None:
    steps = _trace_steps()
    if not steps:
        pytest.skip(f"no *.jsonl with recorded responses in {_TRACES} (REASONCACHE_TRACES)")
    kinds = [check(library, step) for step in steps]
    assert {SignatureKind.FORMAL, SignatureKind.PROSE} <= set(kinds)


# Every way from a text to running it that the standard library offers by name.
_EVALUATORS = (
    (builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (builtins, "open"),
    (builtins, "__import__"), (os, "system"), (os, "popen"), (subprocess, "Popen"),
)  # fmt: skip


@contextlib.contextmanager
def nothing_may_be_evaluated() -> Iterator[None]:
    """Inside, whatever evaluates text raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("hostile text was evaluated")

    # Not pytest's patches: they import, which is one of the things refused.
    saved = [getattr(module, name) for module, name in _EVALUATORS]
    for module, name in _EVALUATORS:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for (module, name), value in zip(_EVALUATORS, saved, strict=True):
            setattr(module, name, value)


def test_hostile_steps(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Read alike by both, in bounded time, and never evaluated."""
    canary = tmp_path / "canary"
    steps = hostile.corpus(canary)
    assert len(steps) >= 20_000
    cases = [
        (step, limits, in_code)
        for i, step in enumerate(steps)
        for limits, in_code in ((_DEFAULT, False), ((_DEFAULT, _SMALL)[i % 2], i % 4 < 2))
    ]
    with nothing_may_be_evaluated():
        expected = [python_signature(*case) for case in cases]
        found = [native_signature(library, *case) for case in cases]
    assert not canary.exists()
    assert hostile.CANARY_NAME not in os.environ
    for case, by_python, by_library in zip(cases, expected, found, strict=True):
        assert by_library == by_python, case
    for step in steps:
        assert seconds_to_read(library, step) < _MAX_SECONDS, step[:200]


def seconds_to_read(library: ctypes.CDLL, text: str) -> float:
    """CPU time of one read, the best of up to three."""
    best = _MAX_SECONDS
    for _ in range(3):
        start = time.thread_time()
        native_signature(library, text, _DEFAULT)
        best = min(best, time.thread_time() - start)
        if best < _MAX_SECONDS / 10:
            break
    return best


def test_steps_of_the_largest_size(library: ctypes.CDLL) -> None:
    """Each hostile shape repeated up to the bound on characters."""
    shapes = dict.fromkeys(text[:24] for text in hostile.fixed_steps() if text)
    for shape in list(shapes)[::8]:
        text = (shape * (_DEFAULT.max_chars // len(shape) + 1))[: _DEFAULT.max_chars]
        check(library, text)
        assert seconds_to_read(library, text) < _MAX_SECONDS


def test_lines_of_a_megabyte(library: ctypes.CDLL) -> None:
    """Refused by the default bounds; read alike where the bounds allow it."""
    for line in hostile.long_lines():
        assert check(library, line) is SignatureKind.OVER_BOUND
        check(library, line[:100_000], _WIDE)


def test_deepest_nesting_fits_a_small_stack(library: ctypes.CDLL) -> None:
    """The reader runs on a thread of its own, whose stack may be small."""
    texts = [
        start + opened * depth + "x" + closed * depth + end
        for opened, closed in hostile.NESTS
        for depth in (126, 500)
        for start, end in (("", ""), ("$", "$"), ("`", "`"))
    ]
    expected = [python_signature(text, _WIDE, False) for text in texts]
    found: list[Read] = []
    # The frames of a build with sanitizers are several times larger.
    previous = threading.stack_size((8 << 20) if sanitized() else (256 << 10))
    try:
        thread = threading.Thread(
            target=lambda: found.extend(native_signature(library, text, _WIDE) for text in texts)
        )
        thread.start()
        thread.join()
    finally:
        threading.stack_size(previous)
    assert found == expected


def test_threads_do_not_disturb_each_other(library: ctypes.CDLL) -> None:
    """ctypes lets go of the interpreter lock: these reads do overlap."""
    texts = list(hostile.fixed_steps())[::16]
    expected = [native_signature(library, text, _DEFAULT) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        runs = pool.map(
            lambda _: [native_signature(library, text, _DEFAULT) for text in texts], range(8)
        )
        assert all(run == expected for run in runs)


def test_the_library_can_start_nothing(library: ctypes.CDLL) -> None:
    """No function that runs a program or loads code is even linked."""
    content = Path(library._name).read_bytes()
    for name in (b"system", b"popen", b"execve", b"execvp", b"posix_spawn", b"fork", b"dlopen"):
        assert b"\0" + name + b"\0" not in content

# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""Hostile text: every read is bounded, nothing raises, nothing is evaluated."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_reasoncache.filter
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.structure.signature import regions, same_structure, signature
from sglang_reasoncache.filter.structure.tree import Limits
from sglang_reasoncache.filter.vocabulary import Vocabulary
from tests.filter import hostile

_SMALL = Limits(max_chars=400, max_depth=12, max_nodes=60)
# CPU time of one step.
_MAX_SECONDS = 0.05
_WIDE = Limits(max_chars=1 << 20, max_depth=64, max_nodes=1 << 16)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("x" * 1_000_000, "max_chars"), ("1 + " * 10_000, "max_chars"), ("(1" * 4000, "max_nodes"),
        ("(1" * 100 + ")" * 100, "max_depth"), ("[1" * 100 + "}" * 100, "max_depth"),
        ("$" + "{" * 100 + "x" + "}" * 100 + "$", "max_depth"),
        ("$" + r"\frac" * 100 + "$", "max_depth"), ("$" + r"\sqrt[" * 100 + "$", "max_depth"),
        ("$" + "x^{" * 100 + "$", "max_depth"), ("$" + r"\sin " * 100 + "$", "max_depth"),
        ("sin " * 100, "max_depth"), ("$1 " + "- " * 100 + "1$", "max_depth"),
        ("2^-" * 100 + "2", "max_depth"), ("2" + "^-√" * 40, ""),
        ("`" + "(" * 100 + "`", "max_depth"),
        ("```\n" + "".join(" " * i + "x\n" for i in range(80)) + "```", "max_depth"),
        ("1," * 2000, "max_nodes"), ("$x$" * 1500, "max_nodes"), ("`x`" * 1500, "max_nodes"),
        ("$" + "abc" * 1000 + "$", "max_nodes"), ("⁻" * 2000, "max_nodes"),
        ("$" + "₁₊" * 1000 + "$", "max_nodes"),
    ],
)  # fmt: skip
def test_every_bound_holds(text: str, bound: str | None) -> None:
    found = signature(text)
    assert (found.bound, bool(found.digest)) == (bound, not bound)
    assert same_structure(found, found) == (not bound)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 8000, "9**9**9**9**9**9", "9^" * 400 + "9", "10^(10^(10^(10^10)))", r"\(" * 4000,
        "`" * 8001, "```" * 2001, "$" * 8001, "$$$" * 2000, "'" * 900, '`"' + '\\"' * 3000,
        "f" + "'" * 8000, "a'" * 4000, r"\text{" * 40, r"\text{" + "x" * 8000, "\\" * 900,
        ")" * 900 + "(" * 60, "**a" * 300, ",000" * 250, "1,000" + ",000" * 1500, "." * 900,
        "\x00\ud800\udfff\u202e\ufeff" * 100, "é" * 8000, "x\u0301" * 400, "²" * 900, "x₋" * 300,
        "١٢٣ + ४", '__import__("os").system("true")', "```\nimport os; os.abort()\n```",
        "`[[[[[[[[[[" * 3, "\n" * 8000, "&" * 900,
    ],
)  # fmt: skip
def test_odd_text_is_read(text: str) -> None:
    """Read twice to the same result: the reading is a function of the text."""
    first = signature(text, _WIDE, keep_trees=True)
    assert first == signature(text, _WIDE, keep_trees=True)
    assert not first.bound


_SHARDS = st.sampled_from([*hostile.SHARDS, "√-", "\ud800"])


@settings(deadline=None)
@given(st.lists(_SHARDS, max_size=60).map("".join).filter(lambda text: "```" not in text))
def test_regions_lose_nothing_but_delimiters(text: str) -> None:
    no_delimiters = str.maketrans("", "", "`$\\()[]")
    parts = [part for _, part in regions(text)]
    assert all(parts)
    assert "".join(parts).translate(no_delimiters) == text.translate(no_delimiters)


def test_recursion_stays_far_below_the_interpreter_limit() -> None:
    """The deepest allowed nesting is read with few frames to spare."""
    deepest = Limits(max_chars=1 << 20, max_depth=128, max_nodes=1 << 16)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 800)
    try:
        assert signature("(1 = 1 + 2 * -" * 60 + "x" + ")" * 60, deepest).digest
        assert signature("(1 = 1 + 2 * -" * 500, deepest).bound
    finally:
        sys.setrecursionlimit(limit)


# Every way from a text to running it that the standard library offers by name.
_EVALUATORS = (
    (builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (builtins, "open"),
    (builtins, "__import__"), (os, "system"), (os, "popen"), (subprocess, "Popen"),
)  # fmt: skip


@contextlib.contextmanager
def nothing_may_be_evaluated() -> Iterator[None]:
    """Inside, whatever evaluates text raises."""
    # Not pytest's patches: they import, which is one of the things refused.
    refuse = mock.Mock(side_effect=AssertionError("hostile text was evaluated"))
    with contextlib.ExitStack() as refused:
        for module, name in _EVALUATORS:
            refused.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, refuse)
        yield


def seconds_to_read(text: str) -> float:
    """CPU time of one read, the best of up to three."""
    best = _MAX_SECONDS
    for _ in range(3):
        start = time.thread_time()
        signature(text)
        best = min(best, time.thread_time() - start)
        if best < _MAX_SECONDS / 10:
            break
    return best


def test_hostile_steps_are_read_in_bounded_time_and_never_evaluated(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    steps = hostile.corpus(canary)
    assert len(steps) >= 20_000
    with nothing_may_be_evaluated():
        for i, step in enumerate(steps):
            found = signature(step, _SMALL, in_code=i % 2 == 0, keep_trees=True)
            assert bool(found.trees) == bool(found.digest)
            assert not (found.bound and found.digest)
        slowest = max(map(seconds_to_read, steps))
    assert slowest < _MAX_SECONDS
    assert not canary.exists()
    assert hostile.CANARY_NAME not in os.environ


def test_steps_of_the_largest_size_and_beyond() -> None:
    """Each hostile shape repeated up to the bound on characters, and lines of a megabyte."""
    shapes = dict.fromkeys(text[:24] for text in hostile.fixed_steps() if text)
    max_chars = Limits().max_chars
    for shape in list(shapes)[::8]:
        text = (shape * (max_chars // len(shape) + 1))[:max_chars]
        assert seconds_to_read(text) < _MAX_SECONDS
    for line in hostile.long_lines():
        assert signature(line).bound
        signature(line[:100_000], _WIDE)
    # Linear work: quadratic reading of these would not end.
    assert signature("prose " * 33_333, _WIDE) == signature("")
    assert signature("(" * (1 << 19), _WIDE).bound
    for text in ('`"' + '\\"' * 400_000, "a'" * 400_000, r"\(" * 60_000, "$" * 60_000):
        signature(text, _WIDE)


_OPERATORS = ("−", "+", "·", "=", "<", "≤", "∈", "~", "->", "±")


def test_a_step_like_many_that_were_never_read_is_compared_in_bounded_time() -> None:
    """Whoever lets 64 long steps become candidates at once has not all of them read."""
    pieces = [b"\n\n", b"```", *(f"$x{sign}".encode() for sign in _OPERATORS), b"1$ "]
    vocabulary = Vocabulary(pieces)
    classes = TokenClasses(vocabulary)
    best = 1.0
    for _ in range(3):
        request = RequestFilter(FilterConfig(fixed_tau=0.0), classes, vocabulary, 0)
        # Straight into the history: none of them was ever a candidate.
        for i in range(64):
            (step,) = request.steps([2 + i % 10, 12] * (150 + i) + [0])
            request._history.add(step)
        (step,) = request.steps([*range(2, 12), 12] * 80 + [0])
        start = time.thread_time()
        counters = request.propose(step).counters
        best = min(best, time.thread_time() - start)
        assert counters.candidates == 64 and 40 < counters.dropped_excess < 64
    assert best < _MAX_SECONDS


_SOURCES = sorted(Path(sglang_reasoncache.filter.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: path.name)
def test_the_filter_names_nothing_that_evaluates(path: Path) -> None:
    """No evaluation, no SGLang, no torch, no pickle anywhere in it."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "globals"}
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    # The latter three on first use, where an operator asked for them or the child is not started.
    allowed = {"numpy", "sglang_reasoncache", "zss", "sentence_transformers", "xgrammar"}
    allowed |= set(sys.stdlib_module_names)
    assert {module.partition(".")[0] for module in modules} <= allowed - {"pickle", "marshal"}

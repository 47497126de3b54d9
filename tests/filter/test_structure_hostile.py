# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905, E501 - signs look alike on purpose; lists of texts stay short
"""Hostile text: every read is bounded, nothing raises, nothing is evaluated."""

import builtins
import contextlib
import inspect
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.steps import StepMatcher
from sglang_reasoncache.filter.structure import Limits, same_structure, signature
from sglang_reasoncache.filter.structure.tokens import _WRITTEN
from sglang_reasoncache.filter.vocabulary import Vocabulary

_WRAPPERS = (
    ("", ""), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("`", "`"),
    ("```\n", "\n```"), ("so x = ", " holds"),
)  # fmt: skip
_NESTS = (
    *("() {} [] [) ⌊⌋ ⟨⟩ x⁽⁾ ₍₎ '' \"\" `` $$ **".split()), r"\{ \}", r"\left( \right)", r"\frac{ }{2}",
    r"\frac{1}{ }", r"\frac ", r"\sqrt{ }", r"\sqrt[ ]{x}", "x^{ }", "x_{ }", "x^ ", "x_ ", "2^- ",
    "2** ", "^ ", "- ", "√ ", "-√ ", r"\sin ", "sin( )", "log_2 ", r"\text{ }", r"\begin{a} \end{a}",
    r"\binom{ }{k}", "f( )", "f(x,1 )", "(1=1+2*-x^ )", r"\( \)", r"\[ \]", "``` ```", "1, ",
)  # fmt: skip
_DEPTHS = (1, 2, 11, 12, 13, 31, 32, 33, 64, 300, 1500)

_NUMBERS = (
    "9**9**9", "9**9**9**9**9**9**9", "10^(10^(10^(10^10)))", "9^" * 200 + "9", "1e999999999",
    "1" + "0" * 4000, "0." + "0" * 4000 + "1", "1,000" + ",000" * 300, "1,0000,000", "1.2.3.4", "..5",
    ",000" * 90, "factorial(10**9)", "99999999999999!!!!!!", "0x" + "f" * 500, "1_000_000", "1/0",
    "-" * 65 + "1", "(10**10**10) % 7", "√√√√√9", "9" * 40 + "^" * 40, r"$10^{10^{10^{10}}}$",
    r"\(9^{9^{9}}!\)", r"\[\frac{9^{9^9}}{0}\]", "x²³¹⁴⁵" * 60, "⁺⁻" * 80,
)  # fmt: skip

_UNTERMINATED = (
    "```", "```python\n", "``", "`x\n`", "$", "$$x", "$ x$", "$x $", "$5 and $6", "$x$1", "$x$١", r"\(",
    r"\[", r"\(x\]", r"\[x\)", "\\", "x\\", r"\text{", r"\text*{", r"\frac{1", r"\frac", r"\sqrt[", "'",
    '`"\\"', "`'''`", "**", "_", "*x", "(", "[", ")", "}", "&", "f'", "a’b’", "``` \t\r\nx```", "```\r",
    "````", "`$`$`", "$`$`", r"`\(`\)`",
)  # fmt: skip

_MACROS = (
    "".join(rf"\newcommand{{\x{a}}}{{" + rf"\x{b}" * 10 + "}" for a, b in itertools.pairwise("abcdefgh")),
    r"\def\a{\a\a}\a", r"\input{/etc/passwd}", r"\write18{touch owned}", r"\expandafter" * 120,
    '<!DOCTYPE l [<!ENTITY a "&b;&b;"><!ENTITY b "&a;&a;">]><l>&a;</l>', r"\begin{aligned}" * 90,
)  # fmt: skip
_LONG = (
    "9" * 8000, r"\(" * 4000, "`" * 8001, "$$$" * 2000, '`"' + '\\"' * 3000, "a'" * 4000, "x₋" * 300,
    r"\text{" * 40, "\\" * 900, ")" * 900 + "(" * 60, "**a" * 300, "1,000" + ",000" * 1500, "&" * 900,
    "\x00\ud800\udfff\u202e\ufeff" * 100, "x\u0301" * 400, "```" + "\r" * 8000,
)  # fmt: skip

# Bait: evaluating one of these texts creates a file.
_BAITS = (
    "open('{0}', 'w').close()", "__import__('os').system('touch {0}')", "eval(\"open('{0}', 'w')\")",
    "(lambda: open('{0}', 'w'))()", "f'{{open(\"{0}\", \"w\")}}'", "$(touch {0})", "; touch {0} #",
    "sympify(\"open('{0}', 'w')\")", "!!python/object/apply:os.system ['touch {0}']",
    "cos\nsystem\n(S'touch {0}'\ntR.", "\\directlua{{os.execute('touch {0}')}}",
)  # fmt: skip


_WHITE = "".join(chr(c) for c in range(0x3001) if chr(c).isspace())
_DIGITS = "".join(
    chr(zero + i) for zero in (0x660, 0x966, 0xFF10, 0x1D7CE, 0x1E950) for i in range(10)
)
_ZALGO = "".join(map(chr, range(0x300, 0x370)))
_UNICODE = (
    "x\x00y = \x00", "\ufeffx = 1", "\u202ex = 1\u202c", "שלום x = 1", "مرحبا ١٢٣ + ٤", "x\u0301 = y\u0308",
    "".join(f"{c}{_ZALGO}" for c in "x=1+2"), "x\ufffd = \ufffd1", "\U0010ffff x", "\uffff\ufffe = 1",
    "x\u00a0=\u00a01", "\u2028x\u2029=\u0085 1\x1c2", "１２３＋４＝１２７", "𝟏𝟐𝟑 + 𝟜", "ⅷ = 8", "½ + ¼", "①②③",
    "٣٫١٤", "1,٢٣٤", "ǅA", "AΒС = 1", "ⅮⅭ is", "ẞ is", "İI ı", "ﬁ", "AªB is", "👩‍👩‍👧 = 1", "数学 = 1", "x′′ = 1",
    "don’t", "f′(x)", "°C", "x⁰¹²³⁴⁵⁶⁷⁸⁹", "x₀₁₂₃₄₅₆₇₈₉", "xⁿ⁺¹", "x⁽ⁿ⁾", "xₙ₋₁", "⁻", "$⁾⁽$", "x²₁³", "ªx²", "x__2",
    "−1 – 2 ‐ 3", "∑∏∫∞°%∠△∅|!", "a!b ! c !", "|x| = |y|", "".join(_WRITTEN), " ".join(_WRITTEN),
    *(f"x {sign} y $x{sign}y$ word{sign}word ${sign}{{a}}{{b}}$ {sign}" for sign in _WRITTEN),
    " + ".join(_DIGITS), f"`{_DIGITS}`", f"x{_WHITE}1", f"${_WHITE}x$", "x".join(_WHITE), f"`x{_WHITE}y`",
    *(f"a {name} 2, A {name} I" for name in ("is", "or", "equals", "of", "mod", "minus", "day")),
)  # fmt: skip

# Pieces to insert into mutants.
_SHARDS = (
    *"$`\\{}()[]^_+-=<>*/!|&,.:;'\"?~#%@\n\t\r \x00²₁√′’·×÷≤≠∈∑⌊⌋⟨é数٣½ǅΩ",
    *r"$$ ``` \( \) \[ \] \frac \sqrt \text{ \left \right \cdot \le \\ ** __ -> => <=> := &= 23 1,000".split(),
    *"3.14 x a A I ABC word sin mod is ⁻¹ ₙ".split(), "\n\n", "\n    ", "\u0301", "\u202e", "\ufffd",
)  # fmt: skip


def hostile(bait: Path) -> list[str]:
    """Nested, unterminated, huge, recursive and foreign texts, each as mathematics, code and prose."""
    texts = [*_NUMBERS, *_MACROS, *_UNICODE, *_LONG, *(one.format(bait) for one in _BAITS)]
    for nest, depth in itertools.product(_NESTS, _DEPTHS):
        opened, _, closed = nest.partition(" ") if " " in nest else (nest[:-1], "", nest[-1])
        texts.append(opened * depth + "x" * (depth % 2) + closed * depth * (depth % 3 > 0))
    for piece, repeat, gap in itertools.product(_UNTERMINATED, (1, 2, 7, 200), ("", " ", "x")):
        texts.append((piece + gap) * repeat)
    return [start + text + end for text in texts for start, end in _WRAPPERS]


def mutants(seeds: list[str], count: int, rng: random.Random) -> Iterator[str]:
    """Parts of some seeds and random pieces, in random order."""
    for _ in range(count):
        starts = [(seed, rng.randrange(len(seed) + 1)) for seed in rng.choices(seeds, k=5)]
        parts = [seed[at : at + rng.randrange(120)] for seed, at in starts]
        yield "".join(rng.sample([*parts, *rng.choices(_SHARDS, k=10)], 12))


_SMALL = Limits(max_chars=400, max_depth=12, max_nodes=60)
# CPU time of one step.
_MAX_SECONDS = 0.05


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("x" * 1_000_000, "max_chars"), ("1 + " * 10_000, "max_chars"), ("(1" * 4000, "max_nodes"),
        ("(1" * 100 + ")" * 100, "max_depth"), ("[1" * 100 + "}" * 100, "max_depth"),
        ("$" + "{" * 100 + "x" + "}" * 100 + "$", "max_depth"), ("$" + "-" * 40 + "1$", "max_depth"),
        ("$" + r"\frac" * 100 + "$", "max_depth"), ("√[" * 40 + "x" + "]" * 40, "max_depth"),
        ("$" + "x^{" * 100 + "y" + "}" * 100 + "$", "max_depth"), ("2^-" * 100 + "2", ""),
        ("$1 " + "- " * 100 + "1$", "max_depth"), ("`" + "(" * 100 + "`", ""), ("(" * 900, ""),
        ("```\n" + "".join(" " * i + "x\n" for i in range(80)) + "```", ""), ("9^" * 200 + "9", ""),
        ("1," * 2000, "max_nodes"), ("$x$" * 1500, "max_nodes"), ("`x`" * 1500, "max_nodes"),
        ("$" + "a b " * 1000 + "$", "max_nodes"), ("⁻" * 2000, "max_nodes"), ("word " * 1600, ""),
        ("$" + "₁₊" * 1000 + "$", "max_nodes"), ("9" * 8000, ""),
    ],
)  # fmt: skip
def test_every_bound_holds(text: str, bound: str) -> None:
    found = signature(text)
    assert found.bound == bound
    assert same_structure(found, found) == (not bound)


def test_recursion_stays_far_below_the_interpreter_limit() -> None:
    """The deepest nesting allowed is read, hashed and compared within 700 stack frames."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 700)
    try:
        for opened, closed, depth in (
            ("(1 = 1 + 2 * -x^", ")", 10), ("[1, 1 + ", "]", 30), ("f(x)^2/(-[", "])", 9),
        ):  # fmt: skip
            first, same, other = (
                signature(opened * depth + core + closed * depth) for core in ("x", " x", "y")
            )
            assert first.content is not None and same_structure(first, same)
            assert not same_structure(first, other, tolerance=2)
            assert signature(opened * 40 + closed * 40).bound == "max_depth"
    finally:
        sys.setrecursionlimit(limit)


# Functions of the standard library that can run a text, or open a file.
_EVALUATORS = (
    (builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (builtins, "open"),
    (os, "system"), (os, "popen"), (subprocess, "Popen"),
)  # fmt: skip


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


@pytest.mark.slow
def test_hostile_steps_are_read_in_bounded_time_and_never_evaluated(tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    seeds = hostile(bait)
    steps = [*seeds, *mutants(seeds, 6000, random.Random(20_240_607))]
    signature(steps[0])  # imports SymPy
    refuse = mock.Mock(side_effect=AssertionError("hostile text was evaluated"))
    with contextlib.ExitStack() as refused:
        for module, name in _EVALUATORS:
            refused.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, refuse)
        for i, step in enumerate(steps):
            found = signature(step, _SMALL, in_code=i % 2 == 0)
            assert found == signature(step, _SMALL, in_code=i % 2 == 0)
        slowest = max(map(seconds_to_read, steps))
    assert slowest < _MAX_SECONDS
    assert not bait.exists()


_OPERATORS = ("−", "+", "·", "=", "<", "≤", "∈", "~", "->", "±")


def test_a_step_like_many_that_were_never_read_is_compared_in_bounded_time() -> None:
    """If 64 long steps become candidates at once, only some of them are read."""
    pieces = [b"\n\n", b"```", *(f"$x{sign}".encode() for sign in _OPERATORS), b"1$ "]
    vocabulary = Vocabulary(pieces)
    classes = TokenClasses(vocabulary)
    best = 1.0
    for _ in range(3):
        request = RequestFilter(FilterConfig(fixed_tau=0.0), classes, vocabulary, 0)
        # Put directly into the history, so that none of them was a candidate before.
        for i in range(64):
            (step,) = request.steps([2 + i % 10, 12] * (150 + i) + [0])
            assert isinstance(request._matcher, StepMatcher)
            history = request._matcher._history
            history.add(step)
        (step,) = request.steps([*range(2, 12), 12] * 80 + [0])
        start = time.thread_time()
        counters = request.propose(step).counters
        best = min(best, time.thread_time() - start)
        assert counters.candidates == 64
        assert 40 < sum(history[i].signature is None for i in range(64)) < 64
    assert best < _MAX_SECONDS

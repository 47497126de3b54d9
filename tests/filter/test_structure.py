# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905, E501 - signs look alike on purpose; long lines keep the lists of texts short
"""Tests which steps have equal structure signatures. A signature holds the formulas and code of a step; that of
prose is empty. Hostile text is parsed in bounded time, causes no exception and is never evaluated."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Add, Basic, Eq, Lt, Mul, Pow, S, Symbol

from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.steps import StepMatcher
from sglang_reasoncache.filter.structure import Limits, Signature, same_structure, signature
from sglang_reasoncache.filter.structure.expression import written
from sglang_reasoncache.filter.structure.tokens import _WRITTEN
from sglang_reasoncache.filter.vocabulary import Vocabulary
from tests.filter.work import count_calls


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x+1=2", "x + 1 = 2"), ("so 2x+5=10 .", "Thus 2 x + 5 = 10"), ("2x", "2*x"),
        ("2x", "2·x"), (r"$\frac{1}{2}$", r"\(\frac12\)"), (r"$\frac{1}{2}$", "1/2"),
        (r"\[\dfrac{a+b}{c}\]", r"$$\frac{a + b}{c}$$"),
        (r"$\left( x + 1 \right)^2$", "$(x+1)^2$"), (r"$x_1^2$", "$x^2_1$"), ("$x^{10}$", "x^10"),
        ("x + 1 = y - z", "1 + x = -z + y"),
        ("x²", "$x^2$"), ("x⁻¹", "x^(-1)"), (r"$a \le b$", "a <= b"), (r"$a \leq b$", "a ≤ b"),
        (r"$2 \cdot 3 \times 4$", "2 * 3 × 4"), (r"$\alpha + \pi$", "α + π"),
        (r"$\sqrt{x}$", "√x"), (r"$\sin x$", "sin(x)"), (r"$x \neq 3$", "x != 3"),
        ("**Therefore** x = 3", "Therefore x = 3"), ("- x = 3", "x = 3"),
        ("`f(x, 1)`", "`f( x,1 )`"),
        ("```python\nif x:\n  y = 1\n```", "```\nif  x :\n  y=1\n```"),
    ],
)  # fmt: skip
def test_equal(a: str, b: str) -> None:
    assert signature(a).content is not None
    assert same_structure(signature(a), signature(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("2x+5=10", "2x-5=10"), ("so c is 7", "so c is 8"), ("so c is 7", "so d is 7"),
        ("here a 4 .", "here a 5 ."), ("here a 4 .", "here b 4 ."), ("x^2", "x_2"),
        ("$x^{10}$", "$x^10$"), (r"$\frac{1}{2}$", r"$\frac{2}{1}$"), ("a/(b+c)", "a/b+c"),
        ("x < 3", "x <= 3"), ("triangle ABC is right", "triangle ABD is right"),
        ("f'(x) is odd", "f(x) is odd"), ("the 2nd row", "the 3rd row"),
        ("Area² is known", "Area³ is known"), ("the limit h_1 is", "the limit h_2 is"),
        ("word1 is", "word2 is"), ("Case A: x = 1", "Case B: x = 1"), ("so a = 3", "so A = 3"),
        ("the value of a.", "the value of b."), ("`x += 1`", "`x -= 1`"),
        ("`f(x)[0]`", "`f(x[0])`"), ("`'a b'`", "`'ab'`"),
        ("```\nif x:\n    y\nz\n```", "```\nif x:\n    y\n    z\n```"),
        ("(x + y) * 2", "[x + y] * 2"), (r"$\max(a, b)$", r"$\max(b, a)$"),
        ("10,000 chips", "10,001 chips"), ("3.14", "31.4"), ("5! = 120", "5 = 120"),
        ("- 3 and -4", "- 3 and 4"), ("2 * 3", "3 * 2"), ("here 2 3", "here 3 2"), ("x = 3", "3 = x"),
        ("x - y", "y - x"), ("(1, 2)", "(2, 1)"), ("007", "7"), ("sin x", "cos x"),
    ],
)  # fmt: skip
def test_different(a: str, b: str) -> None:
    first = signature(a)
    second = signature(b)
    assert first.content and second.content and not same_structure(first, second)


@pytest.mark.parametrize(
    "text",
    [
        "", "But this seems too vague.",
        "Wait, I think a different approach is needed - a time-consuming one.",
        "I'm not sure. I don't know; I'd say that's a well-known fact.",
        "A circle is a set of points (as before).", "**Setting up the system of equations**:",
        "_Maybe_ there's a better way...", "No way!", "return total", "- first\n- second", "让我想想。",
    ],
)  # fmt: skip
def test_prose(text: str) -> None:
    assert signature(text) == Signature()


x, y, a, b, c, two, five, ten = map(Symbol, ["x", "y", "a", "b", "c", "2", "5", "10"])


def product(*factors: Basic) -> Basic:
    return Mul(*factors, evaluate=False)


def power(base: Basic, exponent: Basic) -> Basic:
    return Pow(base, exponent, evaluate=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # ``a``, ``A``, ``I`` are symbols beside numbers, operators or letters, or if they cannot be words.
        ("a circle", []), ("I think", []), ("a 2", [product(a, two)]), ("value of a", [a]),
        ("a is 2", [a, two]), ("A, B", [Symbol("A"), Symbol("B")]), ("x a", [product(x, a)]),
        ("2 a day", [product(two, a)]), ("(which is 2)", [two]),
        ("2x+5=10", [Eq(Add(five, product(two, x), evaluate=False), ten, evaluate=False)]),
        ("a + b - c", [Add(a, b, product(S.NegativeOne, c), evaluate=False)]),
        ("-x^2", [product(S.NegativeOne, power(x, two))]), ("x/2", [product(x, power(two, -S.One))]),
        ("x = = 2", [written("= =", x, Symbol(""), two)]),
        ("x < = 2", [written("< =", x, Symbol(""), two)]), ("x < 2", [Lt(x, two, evaluate=False)]),
        ("f(x, 2)", [product(Symbol("f"), written("()", x, two))]),
        ("[5, 2)", [written("[)", five, two)]), ("$ab$2", [two]), ("x_2", [written("_", x, two)]),
        ("$x$ costs $5 and $2", [x, five, two]), (r"\(\sqrt{x}", [power(x, S.Half)]),
        (r"\(\text{cm} \foo\)", [product(Symbol("text{cm}"), Symbol("foo"))]), (r"\(x", [x]),
        ("x \\", [x]), ("`x 2` `", [written("code", x, two)]), ("```\nx\n", [written("code", x)]),
    ],
)  # fmt: skip
def test_expressions(text: str, expected: list[Basic]) -> None:
    found = signature(text)
    assert (list(found.content or ()), found.bound) == (expected, "")


def test_step_inside_an_open_fence_is_code() -> None:
    """A blank line inside code ends a step. The next step has no opening fence, so ``in_code`` replaces it."""
    inside = signature("return x\n```\nso it works", in_code=True)
    assert list(inside.content or ()) == [written("code", Symbol("return"), x)]


_LETTERS = "abcdefghijklmnopqrst"
_TEMPLATES = (
    "line {v} = {p} {o} {q} . here {u} {w} . {x} {o} {y} = {r} , so {v} {r} , now next .",
    "next we get {v} = {p} {o} {q} ; we know {u} {w} which makes {x} {o} {y} = {r} : {v} {r} ,",
    "to find {v} take {p} {o} {q} with {u} {w} ; this gives {x} {o} {y} = {r} then {v} {r} ,",
    "look at {v} : put {p} {o} {q} using {u} {w} , see {x} {o} {y} = {r} result {v} {r} ,",
)


@settings(deadline=None)
@given(st.sampled_from(_TEMPLATES), st.integers(0, 2**32))
def test_any_differing_digit_letter_or_operator_changes_the_signature(
    template: str, seed: int
) -> None:
    """Takes prose with equations, and replaces one digit, letter or operator at a time."""
    rng = random.Random(seed)
    symbols = {key: rng.choice(_LETTERS) for key in "vpu"}
    symbols |= {key: str(rng.randrange(10)) for key in "qwxyr"}
    words = template.format(o=rng.choice("+-"), **symbols).split()
    reference = signature(" ".join(words))
    for i, word in enumerate(words):
        if len(word) > 1 or word in ".,;:":
            continue
        group = next(group for group in (_LETTERS, "0123456789", "+-=") if word in group)
        changed = [*words[:i], rng.choice(group.replace(word, "")), *words[i + 1 :]]
        assert not same_structure(reference, signature(" ".join(changed)))


_LEAVES = st.sampled_from(["1", "2", "13", "x", "y", "z"])


def expressions(operators: str) -> st.SearchStrategy[str]:
    """Random expressions whose brackets leave no doubt about the order of operations."""
    return st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(operators), inner).map(
                "({0[0]} {0[1]} {0[2]})".format
            ),
            st.tuples(inner, _LEAVES).map("({0[0]})^({0[1]})".format),
        ),
        max_leaves=12,
    )


@settings(deadline=None)
@given(expressions("+-*/=<"))
def test_spaces_and_latex_do_not_matter(expression: str) -> None:
    plain = signature(expression)
    assert same_structure(plain, signature(expression.replace(" ", "")))
    as_latex = expression.replace("(", "{(").replace(")", ")}")
    assert same_structure(plain, signature(rf"\({as_latex}\)"))
    assert same_structure(plain, signature(rf"\[{as_latex.replace('*', chr(92) + 'cdot ')}\]"))


@settings(deadline=None)
@given(expressions("*/=<"), expressions("*/=<"))
def test_bracketed_expressions_are_equal_only_if_written_alike(a: str, b: str) -> None:
    assert same_structure(signature(a), signature(b)) == (a == b)


def test_prose_passes_and_over_bound_never_matches() -> None:
    formal = signature("x = 1")
    prose = signature("no formula here")
    over = signature("x = 1", Limits(max_chars=3))
    assert over == Signature(bound="max_chars")
    assert same_structure(formal, prose)
    assert same_structure(prose, prose)
    for other in (formal, prose, over):
        assert not same_structure(over, other)
        assert not same_structure(other, over, tolerance=1000)


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("x = 1", "x = 2", 1), ("x = 1", "x = 1 and y", 1), ("x = 1", "x = 12 and y", 2),
        ("2x+5=10", "2x-5=10", 2), ("x = 1", "x < 1", 1), ("(x + 1)^2", "x + 1", 2),
        ("[1, 2]", "[1, 2)", 1),
    ],
)  # fmt: skip
def test_tolerance(first: str, second: str, distance: int) -> None:
    """``distance``: number of tree edits between the two texts, counted by hand. They match if ``tolerance`` is
    this number, but not if it is one less."""
    steps = signature(first), signature(second)
    assert same_structure(*steps, tolerance=distance)
    assert not same_structure(*steps, tolerance=distance - 1)


def test_trees_over_the_edit_bound_match_only_if_equal() -> None:
    text = "x = " + " + ".join(str(i) for i in range(40))
    first = signature(text)
    other = signature(text.replace("x", "y"))
    # The tree of each text has 44 nodes: the 40 terms, their sum, the left side, the relation and the root.
    for bound, is_near in ((44, True), (43, False)):
        assert same_structure(first, other, 1, Limits(max_edit_nodes=bound)) is is_near
        assert same_structure(first, signature(text), 1, Limits(max_edit_nodes=bound))


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

# Baits: each of these texts creates the file ``{0}`` if it is evaluated.
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

# Pieces that :func:`mutants` inserts.
_SHARDS = (
    *"$`\\{}()[]^_+-=<>*/!|&,.:;'\"?~#%@\n\t\r \x00²₁√′’·×÷≤≠∈∑⌊⌋⟨é数٣½ǅΩ",
    *r"$$ ``` \( \) \[ \] \frac \sqrt \text{ \left \right \cdot \le \\ ** __ -> => <=> := &= 23 1,000".split(),
    *"3.14 x a A I ABC word sin mod is ⁻¹ ₙ".split(), "\n\n", "\n    ", "\u0301", "\u202e", "\ufffd",
)  # fmt: skip


def hostile(bait: Path) -> list[str]:
    """Baits, and nested, unterminated, huge or strange texts, each as prose, as mathematics and as code."""
    texts = [*_NUMBERS, *_MACROS, *_UNICODE, *_LONG, *(one.format(bait) for one in _BAITS)]
    for nest, depth in itertools.product(_NESTS, _DEPTHS):
        opened, _, closed = nest.partition(" ") if " " in nest else (nest[:-1], "", nest[-1])
        texts.append(opened * depth + "x" * (depth % 2) + closed * depth * (depth % 3 > 0))
    for piece, repeat, gap in itertools.product(_UNTERMINATED, (1, 2, 7, 200), ("", " ", "x")):
        texts.append((piece + gap) * repeat)
    return [start + text + end for text in texts for start, end in _WRAPPERS]


def mutants(seeds: list[str], count: int, rng: random.Random) -> Iterator[str]:
    """Texts that join random parts of ``seeds`` and random ``_SHARDS`` in random order."""
    for _ in range(count):
        starts = [(seed, rng.randrange(len(seed) + 1)) for seed in rng.choices(seeds, k=5)]
        parts = [seed[at : at + rng.randrange(120)] for seed, at in starts]
        yield "".join(rng.sample([*parts, *rng.choices(_SHARDS, k=10)], 12))


_SMALL = Limits(max_chars=400, max_depth=12, max_nodes=60)


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
    """Steps nested nearly as deeply as allowed are parsed, hashed and compared within 700 stack frames."""
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


# The most calls that reading or comparing one step may take. The most that was counted is half of it.
_MAX_CALLS = 160_000

# Functions that can run text as code, start a program or open a file.
_EVALUATORS = (
    (builtins, "eval"), (builtins, "exec"), (builtins, "compile"), (builtins, "open"),
    (os, "system"), (os, "popen"), (subprocess, "Popen"),
)  # fmt: skip


def work_to_read(text: str) -> tuple[int, float]:
    """The calls that parsing ``text`` makes, and its CPU time while they are counted."""
    start = time.thread_time()
    calls = count_calls(lambda: signature(text))
    return calls, time.thread_time() - start


@pytest.mark.slow
def test_hostile_steps_are_read_with_bounded_work_and_never_evaluated(tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    seeds = hostile(bait)
    steps = [*seeds, *mutants(seeds, 1000, random.Random(20_240_607))]
    signature(steps[0])  # imports SymPy before ``open`` and ``exec`` are replaced below
    refuse = mock.Mock(side_effect=AssertionError("hostile text was evaluated"))
    with contextlib.ExitStack() as refused:
        for module, name in _EVALUATORS:
            refused.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, refuse)
        for i, step in enumerate(steps):
            found = signature(step, _SMALL, in_code=i % 2 == 0)
            assert found == signature(step, _SMALL, in_code=i % 2 == 0)
        calls, seconds = zip(*map(work_to_read, steps), strict=True)
    assert max(calls) < _MAX_CALLS
    # A regular expression that backtracks takes long in a single call. No machine is slow enough to reach this.
    assert max(seconds) < 2
    assert not bait.exists()


_OPERATORS = ("−", "+", "·", "=", "<", "≤", "∈", "~", "->", "±")


def test_a_step_like_many_that_were_never_read_is_compared_with_bounded_work() -> None:
    """If a step is similar to 64 long steps that were never parsed, only some of these are parsed."""
    pieces = [b"\n\n", b"```", *(f"$x{sign}".encode() for sign in _OPERATORS), b"1$ "]
    vocabulary = Vocabulary(pieces)
    classes = TokenClasses(vocabulary)
    request = RequestFilter(FilterConfig(fixed_tau=0.0), classes, vocabulary, 0)
    # Adds earlier steps to the history without comparing them, so that none of them is parsed yet.
    for i in range(64):
        (step,) = request.steps([2 + i % 10, 12] * (150 + i) + [0])
        assert isinstance(request._matcher, StepMatcher)
        history = request._matcher._history
        history.add(step)
    (step,) = request.steps([*range(2, 12), 12] * 80 + [0])
    assert count_calls(lambda: request.propose(step)) < _MAX_CALLS
    assert request._matcher.counters.candidates == 64
    assert 40 < sum(history[i].signature is None for i in range(64)) < 64

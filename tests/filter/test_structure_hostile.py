# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""Hostile text: every read is bounded, nothing raises, nothing is evaluated."""

import ast
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

import sglang_reasoncache.filter
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.steps import StepMatcher
from sglang_reasoncache.filter.structure import signs
from sglang_reasoncache.filter.structure.signature import regions, same_structure, signature
from sglang_reasoncache.filter.structure.tree import Limits
from sglang_reasoncache.filter.vocabulary import Vocabulary

NUM_MUTANTS = 17_000
_SEED = 20_240_607
# Most mutants stay small: the Python reference takes about 1 us for a character.
_MAX_MUTANT_CHARS = 600

_WRAPPERS = (
    ("", ""), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("`", "`"),
    ("```\n", "\n```"), ("so x = ", " holds"),
)  # fmt: skip
NESTS = (
    ("{", "}"), ("(", ")"), ("[", "]"), ("[", ")"), ("⌊", "⌋"), ("⟨", "⟩"),
    (r"\{", r"\}"), (r"\left(", r"\right)"), (r"\lfloor ", r"\rfloor "),
    (r"\frac{", "}{2}"), (r"\frac{1}{", "}"), (r"\frac", ""), (r"\sqrt{", "}"),
    (r"\sqrt[", "]{x}"), (r"\sqrt[3]{", "}"), ("x^{", "}"), ("x_{", "}"), ("x^", ""),
    ("x_", ""), ("2^-", ""), ("2**", ""), ("^", ""), ("_", ""), ("- ", ""), ("√", ""),
    ("-√", ""), (r"\sin ", ""), ("sin(", ")"), ("log_2 ", ""), (r"\text{", "}"),
    (r"\begin{a}", r"\end{a}"), (r"\overline{", "}"), (r"\binom{", "}{k}"),
    (r"\underset{x}{", "}"), (r"\boxed{", "}"), ("f(", ")"), ("f(x, ", ")"),
    ("(1 = 1 + 2 * -", ")"), ("x⁽", "⁾"), ("₍", "₎"), ("'", "'"), ('"', '"'), ("`", "`"),
    ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("```", "```"), ("**", "**"), ("1,", ""),
    ("if x:\n\t", "\n"), ("\n (", ")"),
)  # fmt: skip
_DEPTHS = (1, 2, 11, 12, 13, 31, 63, 64, 65, 127, 128, 129, 300, 1500)

_NUMBERS = (
    "9**9**9", "9**9**9**9**9**9**9", "10^(10^10)", "10^(10^(10^(10^10)))", "2^2^2^2^2^2^2^2",
    "9^" * 200 + "9", "1e999999999", "1" + "0" * 4000, "9" * 8000, "0." + "0" * 4000 + "1",
    "1,000" + ",000" * 300, "1,0000,000", "1,00,000", "1.2.3.4", "..5", ".5.", "1.", ",000" * 90,
    "factorial(10**9)", "99999999999999!!!!!!", "2**(10**10)", "0x" + "f" * 500, "1_000_000",
    "-" * 64 + "1", "-" * 65 + "1", "1/0", "0/0", "(10**10**10) % 7", "√√√√√9", "9" * 40 + "^" * 40,
    r"$10^{10^{10^{10}}}$", r"\(9^{9^{9}}!\)", r"\[\frac{9^{9^9}}{0}\]", "x²³¹⁴⁵" * 60, "⁺⁻" * 80,
)  # fmt: skip

_UNTERMINATED = (
    "```", "```python", "```python\n", "``", "`x", "`x\n`", "$", "$$", "$$x", "$x", "$ x$", "$x $",
    "$5 and $6", "$x$1", "$x$١", r"\(", r"\[", r"\(x\]", r"\[x\)", "\\", "x\\", r"\text{", r"\text",
    r"\text*{", "\\text \t {x", r"\begin{", r"\frac{1", r"\frac", r"\sqrt[", "'", '"', '`"', "`'\\",
    '`"\\', '`"\\\n"`', '`"\\"', "`'''`", '`"a\nb"`', "**", "__", "*x", "(", "[", "{", ")", "]",
    "}", "&", "x &", "'''", "f'", "’", "a’b’", "…", "```\n```", "``````", "```a b\nx```",
    "``` \t\r\nx```", "``` a \t\nx```", "```a\n", "````", "`````", "`$`$`", "$`$`", r"`\(`\)`",
)  # fmt: skip
_REPEATS = (1, 2, 7, 200)

_MACROS = (
    r"\newcommand{\a}{\b\b}\newcommand{\b}{\c\c}\newcommand{\c}{lol}\a",
    "".join(rf"\newcommand{{\x{a}}}{{" + rf"\x{b}" * 10 + "}" for a, b in zip("abcdefgh", "bcdefghi",
                                                                             strict=True)) + r"$\xa$",
    r"\def\a{\a\a}\a", r"\let\frac\sqrt $\frac{1}{2}$", r"\loop\iftrue\repeat", r"\csname end\endcsname",
    r"\input{/etc/passwd}", r"\write18{touch owned}", r"\immediate\write18{id}", r"\catcode`\$=13 $",
    r"\expandafter" * 120, r"\renewcommand{\text}[1]{#1#1}\text{\text{\text{x}}}", r"\verb|$x$|",
    '<!DOCTYPE l [<!ENTITY a "&b;&b;"><!ENTITY b "&a;&a;">]><l>&a;</l>', r"\tag*{1}" * 90,
    r"\begin{aligned}" * 90, r"\begin{aligned} a &= b \\ &&&<&> c \\ \end{aligned}",
)  # fmt: skip

# Bait: whoever evaluates one of these leaves a mark.
CANARY_NAME = "REASONCACHE_CANARY_WAS_HERE"


def injections(canary: Path) -> list[str]:
    path = str(canary)
    touch = f"open({path!r}, 'w').close()"
    mark = f"__import__('os').environ.__setitem__({CANARY_NAME!r}, '1')"
    system = f"__import__('os').system('touch {path}')"
    payloads = [
        touch, mark, system, f"eval({touch!r})", f"exec({mark!r})", f"(lambda: {touch})()",
        f"[{touch} for _ in [1]]", f"f'{{{system}}}'", f"sympify({system!r})", f"{touch} + 1 = 2",
        f"import os; os.system('touch {path}')", f"$(touch {path})", f"`touch {path}`",
        f"; touch {path} #", f"| touch {path}", f"%s%n%p {touch}", "${jndi:ldap://localhost/a}",
        f"{{% import os %}}{{{{ {system} }}}}", f"!!python/object/apply:os.system ['touch {path}']",
        f"cos\nsystem\n(S'touch {path}'\ntR.", f"\\directlua{{os.execute('touch {path}')}}",
    ]  # fmt: skip
    return [
        start + payload + end
        for payload in payloads
        for start, end in (*_WRAPPERS, ("```python\n", ""), (r"\text{", "}"), ("x^", ""))
    ]


_WHITE = "".join(chr(c) for c in range(0x3001) if chr(c).isspace())
_HOMOGLYPH_DIGITS = "".join(
    chr(zero + i)
    for zero in (0x30, 0x660, 0x966, 0xE50, 0xFF10, 0x1D7CE, 0x1D7D8, 0x1D7F6, 0x1E950)
    for i in range(10)
)
_ZALGO = "".join(map(chr, range(0x300, 0x370)))
_UNICODE = (
    "\x00", "x\x00y = \x00", "\x00" * 300, "\ufeffx = 1", "\u202ex = 1\u202c", "\u2066x\u2069 = 2",
    "שלום x = 1", "مرحبا ١٢٣ + ٤", "x\u0301 = y\u0308", "e\u0301" * 200, "x" + _ZALGO * 8,
    "".join(f"{c}{_ZALGO}" for c in "x=1+2"), "\ufffd" * 60, "x\ufffd = \ufffd1", "\U0010ffff x",
    "\uffff\ufffe = 1", "\ue000x", "x\u200b = 1", "x\u00a0=\u00a01", "\u2028x\u2029=\u0085 1\x1c2",
    "１２３＋４＝１２７", "ｘ＝１", "𝟏𝟐𝟑 + 𝟜", "𝑥 = 𝟙", "ⅷ = 8", "½ + ¼", "①②③", "㊿", "٣٫١٤", "१,२३४", "1,٢٣٤",
    "ǅ", "ǅA", "Aǅ is", "AΒС = 1", "ΑΒΓ is", "ⅮⅭ is", "ßß", "ẞ is", "İI ı", "ﬁ", "AªB is", "ªº is",
    "👩‍👩‍👧 = 1", "🇩🇪", "数学 = 1", "かな x", "한글 2", "x′′ = 1", "x’s = 1", "don’t", "f′(x)", "°C", "50%",
    "x⁰¹²³⁴⁵⁶⁷⁸⁹", "x₀₁₂₃₄₅₆₇₈₉", "xⁿ⁺¹", "x⁽ⁿ⁾", "xₙ₋₁", "ᵢ", "⁻", "₊", "$x⁻¹$", "$⁾⁽$", "x²₁³",
    "²", "ªx²", "_x_", "__x__", "x__2", "−1 – 2 ‐ 3", "∑∏∫∞°%∠△∅|!", "a!b ! c !", "|x| = |y|",
    *(f"x {sign} y" for sign in (*signs.LONG_OPERATORS, *signs.SHORT_OPERATORS)),
    *(f"$x{sign}y$ word{sign}word" for sign in (*signs.LONG_OPERATORS, *signs.SHORT_OPERATORS)),
    signs.SHORT_OPERATORS, " ".join(signs.SHORT_OPERATORS), " ".join(signs.LONG_OPERATORS * 3),
    f"${signs.SHORT_OPERATORS}$", f"`{signs.SHORT_OPERATORS}`", _HOMOGLYPH_DIGITS,
    " + ".join(_HOMOGLYPH_DIGITS), f"`{_HOMOGLYPH_DIGITS}`", _WHITE, f"x{_WHITE}1", f"${_WHITE}x$",
    "x".join(_WHITE), f"`x{_WHITE}y`", "```\n" + "y\n".join(_WHITE), "$x" + _WHITE[-1] + "$",
    f"$x{_WHITE[8]}$", f"\\text{{{_WHITE}cm{_WHITE}}}", "`a\rb\tc`", "```\na\n\t \tb\n  \r\tc\n```",
    *(
        text
        for name in sorted(signs.LATEX)
        for text in (rf"$\{name} x$", rf"$\{name}{{a}}{{b}}$ \{name}", rf"$a \{name} b$")
    ),
    *(rf"\({name} 2\)" for name in signs.WRITTEN),
    *(f"a {name} 2, A {name} I" for name in ("is", "or", "equals", "of", "mod", "minus", "day")),
)  # fmt: skip

# Pieces to insert into mutants.
SHARDS = (
    *"$`\\{}()[]^_+-=<>*/!|&,.:;'\"?~#%@\n\t\r \x00²₁√′’·×÷≤≠∈∑⌊⌋⟨é数٣½ǅΩ",
    "$$", "```", r"\(", r"\)", r"\[", r"\]", r"\frac", r"\sqrt", r"\text{", r"\begin{a}", r"\left",
    r"\right", r"\cdot", r"\le", r"\\", r"\ ", r"\~", "**", "__", "//", "->", "=>", "<=>", ":=", "<<=",
    "&=", "1", "23", "1,000", "3.14", "x", "a", "A", "I", "ABC", "word", "sin", "mod", "is", " ", "  ",
    "\n\n", "\n    ", "\u0301", "\u202e", "\ufffd", "\U0001d7d9", "⁻¹", "ₙ",
)  # fmt: skip


def fixed_steps() -> Iterator[str]:
    for (opened, closed), (start, end), depth in itertools.product(NESTS, _WRAPPERS, _DEPTHS):
        if depth > 129 and (start, end) not in _WRAPPERS[:2]:
            continue  # over the bounds in every wrapper alike
        core = "x" if depth % 2 else ""
        yield start + opened * depth + core + (closed * depth if depth % 3 else "") + end
    for number, (start, end) in itertools.product(_NUMBERS, _WRAPPERS):
        yield start + number + end
    for piece, repeat, gap in itertools.product(_UNTERMINATED, _REPEATS, ("", " ", "x")):
        yield (piece + gap) * repeat
    for macro, (start, end) in itertools.product(_MACROS, _WRAPPERS):
        yield start + macro + end
    for text in _UNICODE:
        yield text
        yield f"${text}$ and {text} is 1"
        yield f"`{text}`\n{text}"


def mutants(seeds: list[str], count: int, rng: random.Random) -> Iterator[str]:
    """Random changes of random seeds: parts left out, repeated, swapped, inserted and spliced."""
    for _ in range(count):
        text = rng.choice(seeds)
        start = rng.randrange(max(1, len(text) - _MAX_MUTANT_CHARS // 2))
        text = text[start : start + rng.randrange(1, _MAX_MUTANT_CHARS)]
        for _ in range(rng.randrange(1, 6)):
            i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
            other, shards = rng.choice(seeds), rng.choices(SHARDS, k=rng.randrange(1, 30))
            at = rng.randrange(len(other) + 1)
            parts = (text[:i], text[i:j], text[j:], other[at : at + 60], "".join(shards))
            text = "".join(rng.choices(parts, k=rng.randrange(1, 6)))[:_MAX_MUTANT_CHARS]
        yield text


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


_PIECES = st.sampled_from([*SHARDS, "√-", "\ud800"])


@settings(deadline=None)
@given(st.lists(_PIECES, max_size=60).map("".join).filter(lambda text: "```" not in text))
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
    seeds = [*fixed_steps(), *injections(canary)]
    steps = [*seeds, *mutants(seeds, NUM_MUTANTS, random.Random(_SEED))]
    assert len(steps) >= 20_000
    # Not pytest's patches: they import, which is one of the things refused.
    refuse = mock.Mock(side_effect=AssertionError("hostile text was evaluated"))
    with contextlib.ExitStack() as refused:
        for module, name in _EVALUATORS:
            refused.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, refuse)
        for i, step in enumerate(steps):
            found = signature(step, _SMALL, in_code=i % 2 == 0, keep_trees=True)
            assert bool(found.trees) == bool(found.digest)
            assert not (found.bound and found.digest)
        slowest = max(map(seconds_to_read, steps))
    assert slowest < _MAX_SECONDS
    assert not canary.exists() and CANARY_NAME not in os.environ


def test_steps_of_the_largest_size_and_beyond() -> None:
    """Each hostile shape repeated up to the bound on characters, and lines of a megabyte."""
    shapes = dict.fromkeys(text[:24] for text in fixed_steps() if text)
    max_chars = Limits().max_chars
    for shape in list(shapes)[::8]:
        text = (shape * (max_chars // len(shape) + 1))[:max_chars]
        assert seconds_to_read(text) < _MAX_SECONDS
    for unit in ("x", "(", "1 + ", "prose ", "\\frac{", "$", "`", "'", "\\", "９", "x́", "²"):
        line = unit * (1_000_000 // len(unit))
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


_SOURCES = sorted(Path(sglang_reasoncache.filter.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: path.name)
def test_the_filter_names_nothing_that_evaluates(path: Path) -> None:
    """No evaluation, no SGLang, no torch anywhere in it; pickle only where its two processes talk."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "globals"}
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    # The latter two on first use, where an operator asked for them or the child is not started.
    allowed = {"numpy", "sglang_reasoncache", "zss", "xgrammar"}
    allowed |= set(sys.stdlib_module_names) - {"marshal"}
    if path.name not in ("process.py", "worker.py"):
        allowed -= {"pickle"}
    assert {module.partition(".")[0] for module in modules} <= allowed

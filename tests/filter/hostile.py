# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""Hostile reasoning steps, the same ones in every run.

What a model can be made to write in order to crash, stall or fool a reader of
mathematics and code: deep nesting, huge numbers, delimiters that never close,
macro bombs, odd Unicode, bait for evaluators, and random mutations of it all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from sglang_reasoncache.filter.structure import signs

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

# Bait: whoever evaluates one of these leaves a mark; see ``Canary`` in the test.
CANARY_NAME = "REASONCACHE_CANARY_WAS_HERE"


def injections(canary: Path) -> list[str]:
    """Texts that create the file ``canary`` or set :data:`CANARY_NAME` if evaluated."""
    path = str(canary)
    touch = f"open({path!r}, 'w').close()"
    mark = f"__import__('os').environ.__setitem__({CANARY_NAME!r}, '1')"
    system = f"__import__('os').system('touch {path}')"
    payloads = [
        touch, mark, system, f"eval({touch!r})", f"exec({mark!r})", f"(lambda: {touch})()",
        f"[{touch} for _ in [1]]", f"f'{{{system}}}'", f"f\"{{{mark}}}\"", f"{{{{{touch}}}}}",
        f"sympify({system!r})", f"parse_expr({touch!r})", f"S({mark!r})", f"latex2sympy({touch!r})",
        f"sympy.sympify('{mark}', evaluate=True)", f"x = {touch}", f"{touch} + 1 = 2",
        f"().__class__.__bases__[0].__subclasses__()[0]; {touch}", f"import os; os.system('touch {path}')",
        f"$(touch {path})", f"`touch {path}`", f"; touch {path} #", f"| touch {path}", f"&& touch {path}",
        f"%s%n%p {touch}", "${jndi:ldap://localhost/a}", f"{{% import os %}}{{{{ {system} }}}}",
        f"!!python/object/apply:os.system ['touch {path}']", f"cos\nsystem\n(S'touch {path}'\ntR.",
        f"#{{`touch {path}`}}", f"<script>{touch}</script>", f"'; DROP TABLE steps; -- {touch}",
        f"Float('1e400').__init__; {mark}", f"lambdify(x, {touch!r})(1)", f"N({system!r})",
        f"\\pythontex{{{touch}}}", f"\\directlua{{os.execute('touch {path}')}}",
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


def long_lines() -> list[str]:
    """Lines of about a megabyte, far over the bound on characters."""
    units = ["x", "(", "1 + ", "prose ", "\\frac{", "$", "`", "'", "\\", "９", "x́", "²"]
    return [unit * (1_000_000 // len(unit)) for unit in units]


def fixed_steps() -> Iterator[str]:
    """Every shape without randomness, long lines and injections left out."""
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
    """Random changes of random seeds: cut, repeat, swap, insert, splice."""
    for _ in range(count):
        text = rng.choice(seeds)
        start = rng.randrange(max(1, len(text) - _MAX_MUTANT_CHARS // 2))
        text = text[start : start + rng.randrange(1, _MAX_MUTANT_CHARS)]
        for _ in range(rng.randrange(1, 6)):
            text = _mutated(text, seeds, rng)[:_MAX_MUTANT_CHARS]
        yield text


def _mutated(text: str, seeds: list[str], rng: random.Random) -> str:
    i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    other = rng.choice(seeds)
    at = rng.randrange(len(other) + 1)
    return rng.choice(
        (
            text[:i] + text[j:],
            text[:j] + text[i:j] * rng.randrange(1, 4) + text[j:],
            text[j:] + text[i:j] + text[:i],
            text[:i] + other[at : at + 60] + text[i:],
            text[:i] + "".join(rng.choices(SHARDS, k=rng.randrange(1, 12))) + text[i:],
            "".join(rng.choices(SHARDS, k=rng.randrange(1, 60))),
        )
    )


def corpus(canary: Path) -> list[str]:
    """All hostile steps but the long lines: at least 20,000."""
    seeds = [*fixed_steps(), *injections(canary)]
    return [*seeds, *mutants(seeds, NUM_MUTANTS, random.Random(_SEED))]

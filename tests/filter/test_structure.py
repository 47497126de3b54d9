# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""Structure signatures: which formal steps are equal, which differ, and which steps are prose."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Add, Basic, Eq, Lt, Mul, Pow, S, Symbol

from sglang_reasoncache.filter.structure import Limits, Signature, same_structure, signature
from sglang_reasoncache.filter.structure.expression import written


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
    first, second = signature(a), signature(b)
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
        # ``a``, ``A`` and ``I`` count only where they cannot be English words.
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
    """Code with blank lines is cut into steps; the later ones have no fence."""
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
    """Replaces every formal word in turn, in prose with embedded equations."""
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
    """Expressions in which every operation has brackets."""
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
    formal, prose = signature("x = 1"), signature("no formula here")
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
    """``distance``: operations counted by hand; the pair is equal at this tolerance and not at one less."""
    steps = signature(first), signature(second)
    assert same_structure(*steps, tolerance=distance)
    assert not same_structure(*steps, tolerance=distance - 1)


def test_trees_over_the_edit_bound_match_only_if_equal() -> None:
    text = "x = " + " + ".join(str(i) for i in range(40))
    first, other = signature(text), signature(text.replace("x", "y"))
    # 40 terms, the sum, the left side, the relation, the root.
    for bound, is_near in ((44, True), (43, False)):
        assert same_structure(first, other, 1, Limits(max_edit_nodes=bound)) is is_near
        assert same_structure(first, signature(text), 1, Limits(max_edit_nodes=bound))

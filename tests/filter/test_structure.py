# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""Structure signatures: which formal steps are equal, which differ, what is prose."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.structure.signature import Signature, same_structure, signature
from sglang_reasoncache.filter.structure.tree import (
    Limits,
    Tree,
    digest,
    edit_distance,
    label_distance,
    leaf,
    preorder,
    serialise,
)


def tree(label: str, *children: Tree | str) -> Tree:
    return label, tuple(tree(child) if isinstance(child, str) else child for child in children)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x+1=2", "x + 1 = 2"), ("so 2x+5=10 .", "Thus 2 x + 5 = 10"), ("2x", "2*x"),
        ("2x", "2·x"), (r"$\frac{1}{2}$", r"\(\frac12\)"), (r"$\frac{1}{2}$", "1/2"),
        (r"\[\dfrac{a+b}{c}\]", r"$$\frac{a + b}{c}$$"),
        (r"$\left( x + 1 \right)^2$", "$(x+1)^2$"), (r"$x_1^2$", "$x^2_1$"), ("$x^{10}$", "x^10"),
        ("x²", "$x^2$"), ("x⁻¹", "x^(-1)"), (r"$a \le b$", "a <= b"), (r"$a \leq b$", "a ≤ b"),
        (r"$2 \cdot 3 \times 4$", "2 * 3 × 4"), (r"$\alpha + \pi$", "α + π"),
        (r"$\sqrt{x}$", "√x"), (r"$\sin x$", "sin(x)"), (r"$x \neq 3$", "x != 3"),
        ("**Therefore** x = 3", "Therefore x = 3"), ("- x = 3", "x = 3"),
        ("`f(x, 1)`", "`f( x,1 )`"),
        ("```python\nif x:\n  y = 1\n```", "```\nif x:\n    y = 1\n```"),
        ("```\nf(a,\n  b)\n```", "```\nf(a, b)\n```"),
        (r"$\begin{aligned} a &= b \\ c &= d \end{aligned}$",
         r"$\begin{aligned} a = b \\ c = d \end{aligned}$"),
    ],
)  # fmt: skip
def test_equal(a: str, b: str) -> None:
    assert signature(a).digest == signature(b).digest != b""
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
        ("- 3 and -4", "- 3 and 4"),
    ],
)  # fmt: skip
def test_different(a: str, b: str) -> None:
    first, second = signature(a), signature(b)
    assert first.digest and second.digest and not same_structure(first, second)


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # ``a``, ``A`` and ``I`` count only where they cannot be English words.
        ("a circle", []), ("I think", []), ("a 4", [tree("*", "a", "4")]),
        ("value of a", [tree("a")]), ("a is 7", [tree("a"), tree("7")]),
        ("A, B and C", [tree("A"), tree("B"), tree("C")]), ("I + 1", [tree("+", "I", "1")]),
        ("x a", [tree("*", "x", "a")]), ("2 a day", [tree("*", "2", "a")]),
        ("2x+5=10", [tree("=", tree("+", tree("*", "2", "x"), "5"), "10")]),
        ("a + b - c", [tree("+ -", "a", "b", "c")]),
        ("-x^2", [tree("unary -", tree("^", "x", "2"))]),
        ("x = = 3", [tree("= =", "x", "", "3")]),
        ("= 3", [tree("=", "", "3")]),
        ("speed = distance / time", [tree("=", "speed", tree("/", "distance", "time"))]),
        ("f(x, 2)", [tree("*", "f", tree("()", "x", "2"))]),
        ("[0, 1)", [tree("[)", "0", "1")]),
        ("f() is", [tree("*", "f", tree("()"))]),
        ("$ab$3", [tree("3")]),
        ("(which is 7)", [tree("7")]),
        ("$x$ costs $5 and $6", [tree("x"), tree("5"), tree("6")]),
        (r"\(\sqrt[3]{x}\)", [tree("sqrt", tree("[]", "3"), "x")]),
        (r"\(\log_2 8\)", [tree("apply", tree("_", "log", "2"), "8")]),
        (r"\(\text{cm} \foo\)", [tree("*", "text:cm", "\\foo")]),
        (r"\(x", [tree("x")]),
        ("x \\", [tree("x"), ]),
        ("`f(1`", [tree("code", tree("line", "f", tree("(", "1")))]),
        ("`a` `", [tree("code", tree("line", "a"))]),
        ("```\nf\n", [tree("code", tree("line", "f"))]),
    ],
)  # fmt: skip
def test_trees(text: str, expected: list[Tree]) -> None:
    found = signature(text, keep_trees=True)
    assert (list(found.trees), found.bound) == (expected, "")


def test_step_inside_an_open_fence_is_code() -> None:
    """Code with blank lines is cut into steps; the later ones have no fence."""
    inside = signature("return total\n```\nso it works", in_code=True, keep_trees=True)
    assert inside.trees == (tree("code", tree("line", "return", "total")),)


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
    """On prose with embedded equations; every formal word is replaced in turn."""
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
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "=", "<"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        st.tuples(inner, _LEAVES).map(lambda parts: f"({parts[0]})^({parts[1]})"),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_EXPRESSIONS)
def test_spaces_and_latex_do_not_matter(expression: str) -> None:
    plain = signature(expression, keep_trees=True)
    assert same_structure(plain, signature(expression.replace(" ", "")))
    as_latex = expression.replace("(", "{(").replace(")", ")}")
    assert same_structure(plain, signature(rf"\({as_latex}\)"))
    assert same_structure(plain, signature(rf"\[{as_latex.replace('*', chr(92) + 'cdot ')}\]"))


@settings(deadline=None)
@given(_EXPRESSIONS, _EXPRESSIONS)
def test_bracketed_expressions_are_equal_only_if_written_alike(a: str, b: str) -> None:
    """These expressions bracket everything, so text equality is tree equality."""
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


_LABELS = st.sampled_from(["a", "b", "", "1,1:a", "0,", "é"])
_ANY_TREES = st.recursive(
    _LABELS.map(leaf),
    lambda inner: st.tuples(_LABELS, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)
_FORESTS = st.lists(_ANY_TREES, max_size=3).map(tuple)


@settings(deadline=None)
@given(_FORESTS, _FORESTS)
def test_digests_are_equal_only_for_equal_trees(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> None:
    """Labels that imitate the serialisation do not confuse it."""
    assert (digest(a) == digest(b)) == (serialise(a) == serialise(b)) == (a == b)


def test_the_format_of_a_serialisation_is_fixed() -> None:
    assert serialise((("=", (leaf("é"), leaf(""))), leaf("10"))) == "2,1:=0,1:é0,0:0,2:10".encode()


def slow_labels(forest: tuple[Tree, ...]) -> list[str]:
    return [name for label, children in forest for name in (label, *slow_labels(children))]


@cache
def slow_distance(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> int:
    """Forest edit distance by its recursive definition, on the rightmost roots."""
    if not a or not b:
        return len(slow_labels(a)) + len(slow_labels(b))
    (label_a, children_a), (label_b, children_b) = a[-1], b[-1]
    return min(
        slow_distance((*a[:-1], *children_a), b) + 1,
        slow_distance(a, (*b[:-1], *children_b)) + 1,
        slow_distance(a[:-1], b[:-1])
        + slow_distance(children_a, children_b)
        + (label_a != label_b),
    )


@settings(deadline=None)
@given(_FORESTS, _FORESTS)
def test_edit_distance(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> None:
    assert [label for label, _ in preorder(a)] == slow_labels(a)
    assert label_distance(a, b) <= edit_distance(a, b) == slow_distance(a, b)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("2x+5=10", "2x-5=10", 1), ("x = 1", "x = 1 and y", 1), ("x = 1", "x = 12 and y", 2),
        ("x + 1", "y - 2", 3), ("(x + 1)^2", "x + 1", 2),
    ],
)  # fmt: skip
def test_tolerance(a: str, b: str, distance: int) -> None:
    """Hand-counted operations: allowed at that tolerance, not one below."""
    first, second = signature(a, keep_trees=True), signature(b, keep_trees=True)
    assert same_structure(first, second, tolerance=distance)
    assert not same_structure(first, second, tolerance=distance - 1)


def test_trees_over_the_edit_bound_match_only_if_equal() -> None:
    text = "x = " + " + ".join(str(i) for i in range(40))
    for bound, is_equal in ((43, True), (42, False)):
        limits = Limits(max_edit_nodes=bound)
        first, other = (
            signature(each, limits, keep_trees=True) for each in (text, text.replace("x", "y"))
        )
        assert same_structure(first, other, 1, limits) is is_equal
        assert same_structure(first, signature(text, limits, keep_trees=True), 1, limits)
    with pytest.raises(ValueError, match="keep_trees"):
        same_structure(signature("x = 1"), signature("x = 2"), tolerance=1)

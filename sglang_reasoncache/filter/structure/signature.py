# SPDX-License-Identifier: Apache-2.0
"""The structure signature of a step, of its text, LaTeX and code, and the comparison of two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sglang_reasoncache.filter.structure import tree
from sglang_reasoncache.filter.structure.expression import Parser
from sglang_reasoncache.filter.structure.tokens import parser_tokens
from sglang_reasoncache.filter.structure.tree import Limits, OverBound, Tree, leaf

Region = tuple[Literal["plain", "latex", "code"], str]

_DEFAULT_LIMITS = Limits()
_FENCE = "```"
_OPENER = re.compile(r"```|`|\\\[|\\\(|\$\$|\$")
_CLOSERS = {"\\[": "\\]", "\\(": "\\)"}


class Signature(NamedTuple):
    """Formal content of one step: a canonical hash, empty for prose and over a bound; the trees,
    kept only where edit distances are wanted; the field of :class:`Limits` exceeded."""

    digest: bytes = b""
    trees: tuple[Tree, ...] = ()
    bound: str = ""


def signature(
    text: str, limits: Limits = _DEFAULT_LIMITS, *, in_code: bool = False, keep_trees: bool = False
) -> Signature:
    """Read the formal content of a decoded step: any text, nothing in it can raise or be run.

    ``in_code``: it begins inside a code fence. ``keep_trees``: for a tolerance later on.
    """
    try:
        trees = _trees(text, limits, in_code)
    except OverBound as over:
        return Signature(bound=over.args[0])
    return (
        Signature(tree.digest(trees), tuple(trees) if keep_trees else ()) if trees else Signature()
    )


def _trees(text: str, limits: Limits, in_code: bool) -> list[Tree]:
    if len(text) > limits.max_chars:
        raise OverBound("max_chars")
    found: list[Tree] = []
    num_nodes = 0
    for kind, part in regions(text, in_code):
        if kind == "code":
            code = code_tree(part, limits)
            if code[1]:
                found.append(code)
                num_nodes += _size((code,))
        else:
            tokens = parser_tokens(part, limits, kind == "latex")
            num_nodes += len(tokens)
            found += Parser(tokens, limits.max_depth, kind == "latex").parse()
        # Each part is below the bound on its own; so must be the whole.
        if num_nodes > limits.max_nodes:
            raise OverBound("max_nodes")
    return found


def _size(trees: tuple[Tree, ...]) -> int:
    return sum(1 for _ in tree.preorder(trees))


def same_structure(
    a: Signature, b: Signature, tolerance: int = 0, limits: Limits = _DEFAULT_LIMITS
) -> bool:
    """Whether two steps pass the structure check (ReasonCache, stage 1, item 4).

    Prose passes with all but a step over a bound, which passes with nothing.

    Args:
        tolerance: largest tree edit distance allowed, in unit operations. At 0 the hashes
            decide; above, trees with more than ``limits.max_edit_nodes`` nodes match only if
            they are equal.

    Raises:
        ValueError: a tolerance above 0 with signatures made without trees.
        RuntimeError: a tolerance above 0 without the package ``zss``.
    """
    if a.bound or b.bound:
        return False
    if not a.digest or not b.digest or a.digest == b.digest:
        return True
    if tolerance <= 0:
        return False
    if not a.trees or not b.trees:
        raise ValueError("a structure tolerance above 0 needs signatures with keep_trees=True")
    if max(_size(a.trees), _size(b.trees)) > limits.max_edit_nodes:
        return False
    is_near = tree.label_distance(a.trees, b.trees) <= tolerance
    return is_near and tree.edit_distance(a.trees, b.trees) <= tolerance


def leaves_fence_open(text: str, in_code: bool) -> bool:
    """Whether a code fence is open after ``text``, given its state before."""
    return in_code ^ bool(text.count(_FENCE) % 2)


def regions(text: str, in_code: bool = False) -> Iterator[Region]:
    """Split a step in plain text, LaTeX and code, in order; no region is empty.

    Delimiters are left out. An unterminated fence reaches to the end; any other unterminated
    delimiter is plain text. A generator, so that a reader at a bound saves the rest.
    """
    if in_code:
        text = f"{_FENCE}\n{text}"
    plain_start = pos = 0
    # Closers known to be missing from here on: searching again for every
    # opener would make hostile text quadratic.
    missing: set[str] = set()
    while (match := _OPENER.search(text, pos)) is not None:
        opener = match[0]
        closer = _CLOSERS.get(opener, opener)
        pos = match.end()
        stop = -1 if opener in missing else text.find(closer, pos)
        if stop < 0:
            missing.add(opener)
            if opener != _FENCE:
                continue
            stop = len(text)
        inside = text[pos:stop]
        if opener in "`$" and not _is_span(inside, opener, text[stop + 1 : stop + 2]):
            continue
        if plain_start < match.start():
            yield "plain", text[plain_start : match.start()]
        if opener == _FENCE:
            first, newline, rest = inside.partition("\n")
            # The info string ("python") is not part of the code.
            if newline and " " not in first.strip(" \t\r"):
                inside = rest
        if inside:
            yield "code" if "`" in opener else "latex", inside
        plain_start = pos = stop + len(closer)
    if plain_start < len(text):
        yield "plain", text[plain_start:]


def _is_span(inside: str, opener: str, behind: str) -> bool:
    """Tell inline code and ``$x$`` from stray back-ticks and amounts of money."""
    if not inside or "\n" in inside:
        return False
    # Pandoc's rule: no space inside the dollars, no digit after the second.
    return opener == "`" or (inside == inside.strip() and not behind.isdigit())


# A string that is not closed ends with its line: a pattern that could fail
# here would be tried again at each later quote.
_CODE = re.compile(
    r"(?P<line>\n[ \t\r\n]*)"
    r"|(?P<leaf>[^\W\d]\w*|\d[\w.]*"
    r"|\"(?:[^\"\\\n]|\\[^\n])*\"?|'(?:[^'\\\n]|\\[^\n])*'?"
    r"|[<>]{2}=?|[-+*/%&|^=!<>:]=|\*\*|//|->|=>|&&|\|\||::|\+\+|--)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<other>\S)"
)
_TAB_COLUMNS = 8

# Indentation in columns, tokens with nested brackets.
_Line = tuple[int, list[Tree]]


def code_tree(text: str, limits: Limits) -> Tree:
    """Tree of a piece of code, Python or C-like, labelled ``code``: lines, blocks and brackets, whose
    leaves are names, numbers, strings and operators in their order, comments included. Spaces inside
    a line and line breaks inside brackets do not matter. OverBound: too many tokens or levels."""
    lines = _lines("\n" + text, limits)
    # One frame for each open block: its indentation and its finished lines.
    frames: list[_Line] = [(lines[0][0] if lines else 0, [])]
    for indent, children in [*lines, (-1, [])]:
        while len(frames) > 1 and indent < frames[-1][0]:
            block = frames.pop()[1]
            frames[-1][1].append(("block", tuple(block)))
        if indent > frames[-1][0]:
            if len(frames) > limits.max_depth:
                raise OverBound("max_depth")
            frames.append((indent, []))
        if children:
            frames[-1][1].append(("line", tuple(children)))
    return "code", tuple(frames[0][1])


def _lines(text: str, limits: Limits) -> list[_Line]:
    """Logical lines that are not empty."""
    found: list[_Line] = [(0, [])]
    # Open brackets with what each holds, under the line itself.
    stack: list[tuple[str, list[Tree]]] = [("", found[0][1])]
    for num_tokens, match in enumerate(_CODE.finditer(text)):
        if num_tokens > limits.max_nodes:
            raise OverBound("max_nodes")
        kind, value = match.lastgroup, match[0]
        if kind == "line":
            if len(stack) == 1:
                indent = len(value.rpartition("\n")[2].expandtabs(_TAB_COLUMNS))
                found.append((indent, []))
                stack = [("", found[-1][1])]
        elif kind == "open":
            if len(stack) > limits.max_depth:
                raise OverBound("max_depth")
            stack.append((value, []))
        elif kind == "close" and len(stack) > 1:
            opened, inside = stack.pop()
            stack[-1][1].append((opened + value, tuple(inside)))
        else:
            stack[-1][1].append(leaf(value))
    while len(stack) > 1:
        opened, inside = stack.pop()
        stack[-1][1].append((opened, tuple(inside)))
    return [line for line in found if line[1]]

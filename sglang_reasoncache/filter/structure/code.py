# SPDX-License-Identifier: Apache-2.0
"""Code, Python or C-like, as a tree of lines, blocks and brackets.

Names, numbers, strings and operators become leaves in their order, comments included. Spaces
inside a line and line breaks inside brackets do not matter."""

from __future__ import annotations

import re

from sglang_reasoncache.filter.structure.tree import Limits, OverBound, Tree, leaf

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
    """Tree of a piece of code, labelled ``code``; OverBound for too many tokens or levels."""
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

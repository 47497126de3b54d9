# SPDX-License-Identifier: Apache-2.0
"""Where in a response its answer stands. Every function is linear in the text."""

from __future__ import annotations

import re
from collections import deque

THINK, THINK_END = "<think>", "</think>"
_BOXES = (re.compile(r"\\boxed ?\{"), re.compile(r"\\fbox ?\{"))
_MAX_BOXES = 100


def after_thinking(response: str) -> str:
    """What follows the last ``</think>``; all of a response that never thinks.

    Of a response that was cut off within its reasoning nothing is left.
    """
    _, ended, answer = response.rpartition(THINK_END)
    return "" if not ended and response.lstrip().startswith(THINK) else answer


def with_opened_thinking(response: str) -> str:
    """A response to a prompt that ended in ``<think>``, so that its reasoning can be told.

    One with ``</think>`` needs nothing; without, all of it is reasoning.
    """
    if THINK_END in response or response.lstrip().startswith(THINK):
        return response
    return THINK + response


def last_boxed(text: str, max_chars: int) -> str | None:
    r"""Content of the last ``\boxed{}`` that closes and is not empty, without spaces around it.

    ``\fbox{}`` counts only in a text without ``\boxed{}``. At most 100 boxes are tried.

    Returns:
        None if none of them closes within ``max_chars`` characters, "" if those that do are empty.
    """
    found = None
    for box in _BOXES:
        starts = deque((match.end() for match in box.finditer(text)), maxlen=_MAX_BOXES)
        for start in reversed(starts):
            content = _braced(text[start : start + max_chars + 1])
            if content:
                return content
            found = content if found is None else found
        if starts:
            break
    return found


def _braced(text: str) -> str | None:
    """What stands before the brace that closes one before ``text``."""
    depth, escaped = 1, False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[:i].strip()
    return None


def shorten(text: str, max_chars: int = 200) -> str:
    """A piece of hostile text that fits a result."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"

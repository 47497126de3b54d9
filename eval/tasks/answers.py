# SPDX-License-Identifier: Apache-2.0
"""Where in a response its answer stands. Every function is linear in the text."""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"
_BOXES = ("\\boxed", "\\fbox")


def after_thinking(response: str) -> str:
    """What follows the last ``</think>``; all of a response that never thinks.

    Of a response that was cut off within its reasoning nothing is left.
    """
    _, ended, answer = response.rpartition(THINK_END)
    return "" if not ended and response.lstrip().startswith(THINK) else answer


def last_boxed(text: str, max_chars: int) -> str | None:
    r"""Content of the last ``\boxed{}``, without the spaces around it.

    Returns:
        None if there is none that closes within ``max_chars`` characters.
    """
    start = max(text.rfind(box + "{") for box in _BOXES)
    spaced = max(text.rfind(box + " {") for box in _BOXES)
    start = max(start, spaced)
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth, escaped = 1, False
    for i, char in enumerate(text[start : start + max_chars + 1]):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[start : start + i].strip()
    return None


def shorten(text: str, max_chars: int = 200) -> str:
    """A piece of hostile text that fits a result."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"

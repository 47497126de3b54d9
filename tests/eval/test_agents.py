# SPDX-License-Identifier: Apache-2.0
"""Tests the conversations of ``eval.bench.agents``."""

import random

from eval.bench.agents import ToolLoop


def messages(seed: int, count: int) -> list[str]:
    loop = ToolLoop(random.Random(seed))
    return [loop.turn()[0] for _ in range(count)]


def test_all_conversations_begin_with_the_same_tools() -> None:
    first, second = (messages(seed, 1)[0] for seed in (1, 2))
    assert first.split()[:200] == second.split()[:200]
    assert first != second
    assert messages(1, 3) == messages(1, 3)


def test_parts_of_results_return() -> None:
    first, second = messages(3, 2)
    sentences = first.split("Result of the tool:")[1].split(". ")
    returned = [text for text in sentences if len(text) > 40 and text in second]
    assert len(returned) >= 2

# SPDX-License-Identifier: Apache-2.0
"""Tests that several ranks find the same, also when one of them fails."""

import functools
from pathlib import Path
from typing import Any

import pytest

from sglang_reasoncache.device.ranks import RankFailed, Ranks
from sglang_reasoncache.plugin.containment import Containment
from tests.two_ranks import on_ranks

_VALUES = ((5, 3, 9), (-7, 2**40, 0), (4, 4, 4))


def _least(rank: int, group: Any) -> list[int]:
    ranks = Ranks(group)
    found = [ranks.least(values[rank]) for values in _VALUES]
    ranks.agree()
    return found


def _contained(rank: int, group: Any) -> list[Any]:
    """The second of three works fails on rank 1. No rank reduces anything after that."""
    reasons = list[str]()
    ranks = Ranks(group)
    containment = Containment(ranks, reasons.append)

    def work(number: int) -> int:
        if number == rank == 1:
            raise MemoryError("none left")
        return 10 * number + rank + 1

    found: list[Any] = [containment.least(functools.partial(work, number)) for number in range(3)]
    with pytest.raises(RankFailed):
        ranks.least(1)
    return [*found, *reasons]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_find_the_smallest(count: int, tmp_path: Path) -> None:
    expected = [min(values[:count]) for values in _VALUES]
    assert on_ranks(count, _least, tmp_path, 60) == [expected] * count


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_fails_ends_it_for_all(count: int, tmp_path: Path) -> None:
    found = on_ranks(count, _contained, tmp_path, 60)
    assert [values[:3] for values in found] == [[1, 0, 0]] * count
    other = "another tensor-parallel rank failed"
    reasons = ["MemoryError: none left" if rank == 1 else other for rank in range(count)]
    assert [values[3:] for values in found] == [[reason] for reason in reasons]

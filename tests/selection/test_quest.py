# SPDX-License-Identifier: Apache-2.0
"""Quest's choice among pages, on random shares and by hand; the shares: tests/unit/test_selection.py."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_reasoncache import registry
from sglang_reasoncache.policy_options import OptionError
from sglang_reasoncache.selection.quest import Quest

ROWS, PAGES, PAGE = 3, 7, 4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 4, 5, 12, 28, 500])
def test_the_newest_page_and_the_best_are_read(seed: int, budget: int) -> None:
    shares = torch.rand(ROWS, PAGES, generator=torch.Generator().manual_seed(seed))
    held = torch.ones(ROWS, PAGES, dtype=torch.bool)
    held[0, 3] = held[1, 5:] = False
    newest = torch.tensor([6, 4, 6])
    keep = Quest(budget=budget).keep(shares, held, newest, PAGE)
    assert keep.dtype == torch.bool
    for row, last in enumerate(newest.tolist()):
        others = [page for page in held[row].nonzero()[:, 0].tolist() if page != last]
        others.sort(key=lambda page: -float(shares[row, page]))
        expected = {last, *others[: math.ceil(budget / PAGE) - 1]}
        assert set(keep[row].nonzero()[:, 0].tolist()) == expected


def test_by_hand() -> None:
    shares = torch.tensor([[0.9, 0.7, 1.1, 0.1]])
    held, newest = torch.ones(1, 4, dtype=torch.bool), torch.tensor([3])
    keep = Quest(budget=40).keep(shares, held, newest, 16)
    assert keep.tolist() == [[True, False, True, True]]


def test_options() -> None:
    choice = registry.parse("reasoncache+quest:budget=64:whole_layers=0+keydiff:budget=9")
    assert choice.selector == ("quest", Quest(budget=64, whole_layers=0))
    assert choice.shares and [name for name, _ in choice.evictors] == ["keydiff"]
    for options, key in (({"budget": 0}, "budget"), ({"whole_layers": -1}, "whole_layers")):
        with pytest.raises(OptionError) as error:
            Quest(**options)
        assert error.value.key == key
    with pytest.raises(registry.PolicyError, match="budget of quest between"):
        registry.parse("quest:budget=0")

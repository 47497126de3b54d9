# SPDX-License-Identifier: Apache-2.0
"""Quest's rule against its formula written out, on random keys and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_reasoncache.policies import registry
from sglang_reasoncache.policies.contract import OptionError
from sglang_reasoncache.policies.quest import Quest

ROWS, PAGES, PAGE, HEADS, KV_HEADS, DIM = 3, 7, 4, 6, 2, 5


def keys_and_query(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(ROWS, PAGES, PAGE, KV_HEADS, DIM, generator=generator)
    return keys, torch.randn(ROWS, HEADS, DIM, generator=generator)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_are_the_papers(seed: int) -> None:
    keys, query = keys_and_query(seed)
    low, high = keys.amin(dim=2), keys.amax(dim=2)
    found = Quest().bounds(query, low, high)
    assert found.shape == (ROWS, PAGES, HEADS)
    for row in range(ROWS):
        for page in range(PAGES):
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                q = query[row, head].tolist()
                ends = zip(
                    low[row, page, group].tolist(), high[row, page, group].tolist(), strict=True
                )
                by_hand = sum(max(x * a, x * b) for x, (a, b) in zip(q, ends, strict=True))
                assert float(found[row, page, head]) == pytest.approx(by_hand, abs=1e-5)
                logits = keys[row, page, :, group] @ query[row, head]
                assert float(found[row, page, head]) >= float(logits.max()) - 1e-5


def best_by_hand(bounds: torch.Tensor, held: list[int], newest: int, count: int) -> set[int]:
    shares = dict.fromkeys(held, 0.0)
    for head in range(bounds.shape[1]):
        powers = {page: math.exp(bounds[page, head]) for page in held}
        for page in held:
            shares[page] += powers[page] / sum(powers.values())
    order = sorted((page for page in held if page != newest), key=lambda page: -shares[page])
    return {newest, *order[: count - 1]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 4, 5, 12, 28, 500])
def test_the_newest_page_and_the_best_are_read(seed: int, budget: int) -> None:
    keys, query = keys_and_query(seed)
    bounds = Quest().bounds(query, keys.amin(dim=2), keys.amax(dim=2))
    held = torch.ones(ROWS, PAGES, dtype=torch.bool)
    held[0, 3] = held[1, 5:] = False
    newest = torch.tensor([6, 4, 6])
    keep = Quest(budget=budget).keep(bounds, held, newest, PAGE)
    assert keep.dtype == torch.bool
    for row in range(ROWS):
        pages = held[row].nonzero()[:, 0].tolist()
        count = min(math.ceil(budget / PAGE), len(pages))
        expected = best_by_hand(bounds[row], pages, int(newest[row]), count)
        assert set(keep[row].nonzero()[:, 0].tolist()) == expected


def test_every_head_has_a_say() -> None:
    """A page that one head wants alone is read before one that no head wants much."""
    bounds = torch.tensor([[[9.0, 0.0], [8.0, 0.0], [0.0, 5.0], [0.0, 0.0]]])
    held = torch.ones(1, 4, dtype=torch.bool)
    # By sums of bounds page 1 would come before page 2.
    keep = Quest(budget=3).keep(bounds, held, torch.tensor([3]), 1)
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

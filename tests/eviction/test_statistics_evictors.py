# SPDX-License-Identifier: Apache-2.0
"""R-KV, H2O and SnapKV against their formulas written out, on random caches and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sglang_reasoncache.eviction.policies import rkv
from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    NoAttention,
    RequestView,
    StatisticsNeeds,
)
from sglang_reasoncache.eviction.policies.evictor import Evictor, pooled
from sglang_reasoncache.eviction.policies.h2o import H2O
from sglang_reasoncache.eviction.policies.rkv import RKV, redundancy
from sglang_reasoncache.eviction.policies.snapkv import SnapKV
from sglang_reasoncache.policy_options import OptionError
from tests.eviction.test_evictors import cosine, highest, positions, random_keys
from tests.eviction.test_evictors import view as plain_view


class GivenWeights:
    """Weights of held positions by query, ``[queries, held]``, the newest query last."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights

    def latest(self, queries: int) -> np.ndarray:
        found: np.ndarray = self._weights[-queries:].mean(axis=0)
        return found

    def total(self) -> np.ndarray:
        found: np.ndarray = self._weights.sum(axis=0)
        return found


def view(
    written: int,
    weights: np.ndarray,
    *,
    prompt: int = 0,
    owned: int = 0,
    page: int = 1,
    gone: Iterable[int] = (),
    keys: torch.Tensor | None = None,
    shared: Iterable[tuple[int, int, int]] = (),
) -> RequestView:
    found = plain_view(written, owned=owned, page=page, gone=gone, keys=keys, shared=shared)
    assert weights.shape[1] == len(found.held)
    return dataclasses.replace(found, prompt=prompt, attention=GivenWeights(weights))


def lowest(scores: Iterable[float], among: Iterable[int], count: int) -> list[int]:
    return highest([-score for score in scores], among, count)


def random_weights(held: int, seed: int, queries: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(held, 0.3), queries)


# -- R-KV ----------------------------------------------------------------------


def redundancy_by_hand(
    keys: torch.Tensor, threshold: float, reach: int = 10**9
) -> list[list[float]]:
    """Pair by pair, ``[heads][held]``."""
    held, heads, _ = keys.shape
    found = []
    for head in range(heads):
        own = keys[:, head].double()
        sums = [0.0] * held
        for i in range(held):
            similar = [j for j in range(held) if j != i and cosine(own[i], own[j]) > threshold]
            spared = max((j for j in similar if j >= held - reach), default=None)
            for j in range(held):
                if j != i and j != spared:
                    sums[j] += cosine(own[i], own[j])
        powers = [math.exp(total / held) for total in sums]
        found.append([power / sum(powers) for power in powers])
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("elements", [1, 50, 1 << 22])
def test_redundancy_is_the_papers(
    monkeypatch: pytest.MonkeyPatch, seed: int, threshold: float, elements: int
) -> None:
    monkeypatch.setattr(rkv, "_ELEMENTS", elements)
    keys = random_keys(23, seed)[1]
    expected = torch.tensor(redundancy_by_hand(keys, threshold)).T
    torch.testing.assert_close(
        redundancy(keys, threshold, 23).double(), expected.double(), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("reach", [1, 6, 22])
@pytest.mark.parametrize("elements", [1, 50, 1 << 22])
def test_one_that_is_alike_is_sought_among_the_newest(
    monkeypatch: pytest.MonkeyPatch, reach: int, elements: int
) -> None:
    monkeypatch.setattr(rkv, "_ELEMENTS", elements)
    keys = random_keys(23, 4)[0]
    by_hand = [torch.tensor(redundancy_by_hand(keys, 0.5, r)).T for r in (reach, 23)]
    assert not torch.allclose(by_hand[0], by_hand[1], rtol=1e-3) or reach == 22
    torch.testing.assert_close(
        redundancy(keys, 0.5, reach), by_hand[0].float(), rtol=1e-4, atol=1e-7
    )


def test_redundancy_takes_time_by_what_is_held_and_not_by_its_square() -> None:
    def products(held: int) -> int:
        with FlopCounterMode(display=False) as counter:
            redundancy(torch.ones(held, 2, 8), 0.5, RKV(budget=1).reach)
        return counter.get_total_flops()

    assert products(1024) > 0
    assert products(4096) == 4 * products(1024)


def test_of_equal_keys_the_newest_is_spared() -> None:
    """Three equal keys and one across: each of the three spares the newest other one."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])[:, None]
    # 0 and 1 spare 3, and 3 spares 1: 0 is left with a cosine of 1 to two others, 1 to one.
    power = [math.exp(2 / 4), math.exp(1 / 4), 1.0, 1.0]
    expected = [p / sum(power) for p in power]
    assert redundancy(keys, 0.5, 4)[:, 0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mix", [0.0, 0.1, 0.9, 1.0])
def test_rkv_is_the_papers(seed: int, mix: float) -> None:
    keys, weights = random_keys(30, seed), random_weights(30, seed)
    policy = RKV(budget=10, mix=mix, recent=8, alpha=5, kernel=3)
    found = positions(policy.evict(view(30, weights, owned=4, keys=keys), 9))
    by_head = [redundancy_by_hand(layer, 0.5) for layer in keys]
    scores = []
    for i in range(30):
        near = [sum(w[j] for w in weights[-5:]) / 5 for j in range(30) if abs(i - j) <= 1]
        redundant = sum(head[i] for layer in by_head for head in layer) / 6
        scores.append(mix * max(near) - (1 - mix) * redundant)
    assert found == lowest(scores, range(4, 22), 9)


def test_rkv_pools_over_what_is_held() -> None:
    """Neighbours are those in the cache, whatever was between them."""
    weights = np.zeros((8, 12))
    weights[:, 6] = 1.0
    held = [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]
    gone = [at for at in range(15) if at not in held]
    keys = torch.ones(1, 12, 1, 4)
    policy = RKV(budget=1, mix=1.0, recent=1, kernel=3)
    found = positions(policy.evict(view(15, weights, gone=gone, keys=keys), 8))
    assert found == [0, 1, 2, 3, 4, 11, 12, 13]


# -- H2O -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_h2o_keeps_heavy_hitters_and_the_newest_half(seed: int) -> None:
    weights = random_weights(40, seed)
    policy = H2O(budget=20, recent=1)
    found = positions(policy.evict(view(40, weights, owned=3), 20))
    assert found == lowest(weights.sum(axis=0), range(3, 30), 20)


def test_h2o_by_hand() -> None:
    """Four positions stay: the two newest and the two of most weight in all."""
    weights = np.array([[0.5, 0.3, 0.1, 0.1, 0, 0, 0], [0.1, 0.1, 0.1, 0.4, 0.1, 0.1, 0.1]])
    policy = H2O(budget=4, slack=1, recent=1)
    # Sums: 0.6, 0.4, 0.2, 0.5, 0.1.
    assert positions(policy.evict(view(7, weights), 3)) == [1, 2, 4]
    # More recent ones may be asked for than the half.
    assert positions(H2O(budget=4, recent=5).evict(view(7, weights), 3)) == [0, 1]


def test_h2o_keeps_the_newest_half_of_the_slots() -> None:
    """Of 10 positions in 7 slots 4 slots stay: so the two newest positions, not three."""
    weights = np.full((1, 10), 1.0) - np.arange(10) / 100
    now = view(10, weights, shared=[(4, 0, 3)])
    assert len(np.unique(now.slot_aliases)) == 7
    # By weight, the most wanted of each slot: 9 and 8 are the newest, then 7, 3.
    assert positions(H2O(budget=4, recent=1).evict(now, 3)) == [2, 3, 6, 7]


# -- SnapKV --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_snapkv_keeps_what_the_window_looks_at(seed: int, pooling: str) -> None:
    weights = random_weights(50, seed)
    policy = SnapKV(budget=20, window=6, kernel=5, pooling=pooling, recent=1)
    # 40 of the prompt, 10 of the response, which stay.
    found = positions(policy.evict(view(50, weights, prompt=40, owned=2), 30))
    mean = weights[-6:].mean(axis=0)
    scores = []
    for i in range(34):
        near = [mean[j] if 0 <= j < 34 else 0.0 for j in range(i - 2, i + 3)]
        scores.append(sum(near) / 5 if pooling == "avg" else max(near))
    assert found == lowest(scores, range(2, 34), 20)


def test_snapkv_is_done_when_the_prompt_is() -> None:
    weights = random_weights(30, 1)
    policy = SnapKV(budget=20, window=4, recent=1)
    # As much of the prompt is held as may be, however long the response is.
    now = view(60, weights, prompt=40, gone=range(5, 35))
    assert policy.excess(60, 30) == 10 and policy.slack == 1
    assert not list(policy.evict(now, 10))
    # And a prompt that belongs to the prefix tree stays.
    assert not list(policy.evict(view(30, weights, prompt=25, owned=25), 10))


def test_snapkv_takes_a_share_of_the_prompt() -> None:
    weights = random_weights(50, 2)
    policy = SnapKV(share=0.5, window=4, recent=1)
    assert policy.excess(50, 50) == 25
    assert len(positions(policy.evict(view(50, weights, prompt=40), 25))) == 20


# -- what all of them share ----------------------------------------------------


ALL = [
    RKV(budget=8, recent=1, alpha=4),
    H2O(budget=8, recent=1),
    SnapKV(budget=8, window=2, recent=1),
]
BY_NAME = pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)


@BY_NAME
def test_whole_pages_go_by_their_mean(policy: Evictor) -> None:
    weights, keys = random_weights(26, 3), random_keys(26, 3)
    now = view(30, weights, prompt=30, owned=4, page=4, gone=range(8, 12), keys=keys)
    found = positions(policy.evict(now, 7))  # type: ignore[attr-defined]
    assert len(found) % 4 == 0 and len(found) >= 8
    assert set(found) <= {*range(4, 8), *range(12, 28)}


@BY_NAME
def test_they_announce_what_they_read(policy: Evictor) -> None:
    assert ATTENTION in policy.needs
    needs = policy.statistics_needs  # type: ignore[attr-defined]
    assert isinstance(needs, StatisticsNeeds)
    assert needs.prompt >= needs.latest
    unasked = dataclasses.replace(
        view(30, random_weights(30, 0), prompt=30, keys=random_keys(30, 0)), attention=NoAttention()
    )
    with pytest.raises(LookupError, match="'attention'"):
        policy.evict(unasked, 5)  # type: ignore[attr-defined]


@BY_NAME
def test_weights_that_are_no_numbers(policy: Evictor) -> None:
    """A NaN costs quality at most."""
    weights, keys = random_weights(30, 3), random_keys(30, 3)
    weights[-1, 4] = math.nan
    found = positions(policy.evict(view(30, weights, prompt=30, keys=keys), 6))  # type: ignore[attr-defined]
    assert 6 <= len(set(found)) == len(found) <= 22


@BY_NAME
def test_where_nothing_may_go_nothing_is_read(policy: Evictor) -> None:
    """A prompt above the budget is asked about again and again."""
    all_prompt = dataclasses.replace(
        view(30, random_weights(30, 0), prompt=29, owned=29), attention=NoAttention()
    )
    assert policy.excess(200, 200) > 0
    assert list(policy.evict(all_prompt, 22)) == []  # type: ignore[attr-defined]


def test_pooling_by_hand() -> None:
    scores = np.array([1.0, 5.0, 0.0, 2.0])
    assert pooled(scores, 3, "max").tolist() == [5, 5, 5, 2]
    assert pooled(scores, 3, "avg").tolist() == pytest.approx([2, 2, 7 / 3, 2 / 3])
    assert pooled(scores, 1, "avg").tolist() == scores.tolist()
    assert pooled(scores, 2, "max").tolist() == [1, 5, 5, 2]
    assert pooled(scores, 9, "max").tolist() == [5, 5, 5, 5]
    assert pooled(scores[:0], 3, "max").tolist() == []


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (RKV, {"mix": 1.5}, "mix"),
        (RKV, {"alpha": 65}, "alpha"),
        (RKV, {"kernel": 0}, "kernel"),
        (RKV, {"threshold": 2}, "threshold"),
        (RKV, {"reach": 0}, "reach"),
        (H2O, {"recent_share": -0.1}, "recent_share"),
        (H2O, {"prompt_queries": 5000}, "prompt_queries"),
        (SnapKV, {"window": 0}, "window"),
        (SnapKV, {"pooling": "sum"}, "pooling"),
    ],
)
def test_options_out_of_bounds(kind: type[Evictor], options: dict[str, float], key: str) -> None:
    with pytest.raises(OptionError) as error:
        kind(budget=10, **options)  # type: ignore[arg-type]
    assert error.value.key == key


@pytest.mark.parametrize("seed", range(2))
def test_snapkv_acts_on_a_chunk_as_on_a_prompt(seed: int) -> None:
    """What has been computed of a prompt is all there is."""
    weights = random_weights(50, seed)
    policy = SnapKV(budget=20, window=6, recent=1)
    assert policy.prompt
    chunk, whole = (view(50, weights, prompt=prompt) for prompt in (400, 50))
    found = positions(policy.evict(chunk, 30))
    assert found == positions(policy.evict(whole, 30))
    assert len(found) == 30 and max(found) < 44

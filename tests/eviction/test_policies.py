# SPDX-License-Identifier: Apache-2.0
"""Tests eviction policies against their formulas on random inputs, and against results worked out by hand."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sglang_reasoncache.eviction.policies import rkv
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, OptionError
from sglang_reasoncache.eviction.policies.h2o import H2O
from sglang_reasoncache.eviction.policies.keydiff import ANCHORS, METRICS, KeyDiff
from sglang_reasoncache.eviction.policies.l2norm import L2Norm
from sglang_reasoncache.eviction.policies.random_attention import RandomAttention
from sglang_reasoncache.eviction.policies.rkv import RKV, redundancy
from sglang_reasoncache.eviction.policies.snapkv import SnapKV
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from sglang_reasoncache.eviction.policies.triattention import TriAttention
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.eviction.rows import GivenLayer, evict, view


def random_keys(held: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Norms of keys differ widely between heads and layers, as in real models.
    scale = torch.rand(3, 1, 2, 1, generator=generator) * 20 + 0.1
    return (torch.randn(3, held, 2, 8, generator=generator) + 0.5) * scale


def random_weights(held: int, seed: int, queries: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(held, 0.3), queries)


def highest(scores: Iterable[float], among: Iterable[int], count: int) -> list[int]:
    by_position = list(scores)
    return sorted(sorted(among, key=lambda at: -by_position[at])[:count])


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@dataclasses.dataclass(frozen=True)
class Scored(Evictor):
    """An eviction policy that returns the scores which a test passes as ``given``."""

    given: Any = None
    budget: int | None = 1

    def scores(self, view: View) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.given))


def test_a_slot_without_a_score_stays_longest() -> None:
    """A slot that two positions share is evicted last if one of them has the score NaN."""
    now = view(8, owned=1, shared=[(5, 2, 1)])
    policy = Scored(given=[-9, -1, -9, -1, -1, np.nan, -1, -9.0], recent=1)
    assert evict(policy, now, 8, 4) == [1, 3, 4, 6]
    assert evict(policy, now, 8, 5) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_what_goes_by_score_gives_back_what_is_asked_for(page: int, seed: int) -> None:
    """Pages that share slots are evicted together. The highest score among these pages decides when."""
    rng = np.random.default_rng(seed)
    pages = 40
    shared = [
        (dst * page, int(rng.integers(2, dst)) * page, page)
        for dst in sorted(rng.choice(np.arange(3, pages), 15, replace=False).tolist())
    ]
    gone = np.flatnonzero(np.repeat(rng.random(pages) < 0.2, page))
    now = view(pages * page + 1, owned=2 * page, page=page, gone=gone, shared=shared)
    scores = rng.random(len(now.held))
    # ``slot_of``: maps a page of positions to its page of slots. ``names``: the reverse, for held pages.
    slot_of = list(range(pages + 1))
    for dst, src, _ in shared:
        slot_of[dst // page] = slot_of[src // page]
    names: dict[int, list[int]] = {}
    for at in (now.held[::page] // page).tolist():
        names.setdefault(slot_of[at], []).append(at)
    recent = int(rng.integers(1, 3 * page))
    last = (now.written - recent) // page
    whole = {k: v for k, v in names.items() if all(2 <= at < last for at in v)}
    by_page = {at: scores[now.held // page == at].mean() for v in whole.values() for at in v}
    wanted = sorted(whole, key=lambda k: (max(by_page[at] for at in whole[k]), k))
    for count in (1, page, 7, 5 * page, 1000):
        found = evict(Scored(given=scores, recent=recent), now, 0, count)
        going = sorted(at for k in wanted[: math.ceil(count / page)] for at in whole[k])
        assert found == [at * page + i for at in going for i in range(page)]


PEAK = np.eye(12)[[6] * 8]
SEVEN = np.array([[0.6, 0.4, 0.2, 0.5, 0.1, 0.1, 0.1]])
FALLING = np.full((1, 10), 1.0) - np.arange(10) / 100
POOLING = RKV(budget=7, mix=1.0, recent=1, kernel=3)
BESIDE = view(15, PEAK, gone=[6, 7, 8], keys=torch.ones(1, 12, 1, 4))
STREAMING = StreamingLLM(budget=10, recent=1)
DONE = SnapKV(budget=20, window=4, recent=1)


@pytest.mark.parametrize(
    ("policy", "now", "count", "expected"),
    [
        (STREAMING, view(20), 10, [*range(4, 14)]),
        # Of 20 positions, only 4 sinks and the 6 newest positions stayed. Then 2 more were written.
        (STREAMING, view(22, gone=range(4, 14)), 2, [14, 15]),
        # The prompt stays.
        (StreamingLLM(budget=10, recent=3), view(20, owned=15), 10, [15, 16]),
        # The number of sinks and ``count`` are rounded up to whole pages.
        (STREAMING, view(30, page=4), 13, [*range(4, 20)]),
        (StreamingLLM(budget=10, recent=1, sinks=5), view(30, page=4), 4, [8, 9, 10, 11]),
        # Pooling uses the nearest held positions, even if evicted positions lie between them.
        (POOLING, BESIDE, 8, [0, 1, 2, 3, 4, 11, 12, 13]),
        # The newest positions stay: as many as half of the budget, or ``recent`` if that is more.
        (H2O(budget=4, recent=1), view(7, SEVEN), 3, [1, 2, 4]),
        (H2O(budget=4, recent=5), view(7, SEVEN), 3, [0, 1]),
        # 10 positions use 7 slots; 4 slots stay: those of positions 8 and 9 (newest) and two with most weight.
        (H2O(budget=4, recent=1), view(10, FALLING, shared=[(4, 0, 3)]), 3, [2, 3, 6, 7]),
        # The held part of the prompt fits the budget: nothing is evicted, however long the response is.
        (DONE, view(60, random_weights(30, 1), prompt=40, gone=range(5, 35)), None, []),
        # A prompt that belongs to the prefix tree stays.
        (DONE, view(30, random_weights(30, 1), prompt=25, owned=25), None, []),
    ],
)
def test_by_hand(policy: Any, now: View, count: int | None, expected: list[int]) -> None:
    assert evict(policy, now, len(now.held), count) == expected


def test_random_attention_is_the_same_again_and_differs_by_seed_and_prompt() -> None:
    policy = RandomAttention(budget=10, recent=1)
    found = evict(policy, view(40), 30)
    assert len(found) == 20 and found == evict(policy, view(40), 30)
    assert found != evict(RandomAttention(budget=10, seed=1, recent=1), view(40), 30)
    assert found != evict(policy, view(40, seed=8), 30)


def assert_uniform(counts: np.ndarray, expected: float) -> None:
    freedom = len(counts) - 1
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("page", [1, 4])
def test_random_attention_is_uniform_however_it_got_there(page: int) -> None:
    """Over all seeds, every position is kept about equally often, even after several small evictions."""
    kept: Counter[int] = Counter()
    tries = 400
    last = 41 * page
    for seed in range(tries):
        policy = RandomAttention(budget=10 * page + 1, seed=seed, slack=1, recent=1)
        gone: list[int] = []
        for written in range(20 * page + 1, last + 1, 4 * page):
            now = view(written, page=page, gone=gone)
            gone += evict(policy, now, len(now.held))
        kept.update(sorted({at // page for at in range(last - 1)} - {at // page for at in gone}))
    counts = np.array([kept[at] for at in range(40)])
    assert counts.sum() == tries * 10
    assert_uniform(counts, tries / 4)


def test_random_attention_is_uniform_over_slots() -> None:
    """A slot that two positions share is kept about as often as a slot with one position."""
    kept = np.zeros(40)
    tries = 400
    for seed in range(tries):
        now = view(41, shared=[(20, 0, 10)])
        going = evict(RandomAttention(budget=16, seed=seed, recent=1), now, 31)
        assert len(np.unique(now.first_readers[going])) == 15
        kept[np.setdiff1d(np.arange(40), going)] += 1
    assert (kept[20:30] == kept[:10]).all()
    assert_uniform(np.delete(kept, np.s_[20:30]), tries / 2)


def averaged(keys: torch.Tensor, score: Callable[[torch.Tensor], list[float]]) -> np.ndarray:
    """Mean of ``score`` over layers and heads. ``score`` takes the keys of one head, ``[held, dim]``."""
    return np.mean([score(own) for layer in keys.double() for own in layer.unbind(1)], axis=0)


def norms(own: torch.Tensor) -> list[float]:
    found = [math.sqrt(sum(x * x for x in key)) for key in own.tolist()]
    return [norm * len(found) / sum(found) for norm in found]


def similarities(own: torch.Tensor, policy: KeyDiff) -> list[float]:
    if policy.anchor == "unit-mean" and policy.metric == "cosine":
        # Scaled by the anchor's length, these are the paper's pairwise scores: mean cosines with all keys.
        length = float(torch.stack([key / key.norm() for key in own]).mean(dim=0).norm())
        return [sum(cosine(key, other) for other in own) / len(own) / length for key in own]
    units = torch.stack([key / key.norm() for key in own])
    lower_medians = torch.stack([column.sort().values[(len(own) - 1) // 2] for column in own.T])
    anchors = {"mean": own.mean(dim=0), "unit-mean": units.mean(dim=0), "median": lower_medians}
    anchor = anchors[policy.anchor]
    if policy.metric == "cosine":
        return [cosine(key, anchor) for key in own]
    if policy.metric == "dot":
        return [float(key @ anchor) for key in own]
    return [-math.dist(key.tolist(), anchor.tolist()) for key in own]


def redundancies(own: torch.Tensor, threshold: float, reach: int) -> list[float]:
    """R-KV's redundancy, pair by pair: a softmax of each key's mean cosine with the other keys. For each key,
    the newest similar key among the last ``reach`` is spared: its mean leaves out this pair's cosine."""
    held = range(len(own))
    sums = [0.0] * len(own)
    for i in held:
        similar = [j for j in held if j != i and cosine(own[i], own[j]) > threshold]
        spared = max((j for j in similar if j >= len(own) - reach), default=None)
        for j in held:
            if j not in (i, spared):
                sums[j] += cosine(own[i], own[j])
    powers = [math.exp(total / len(own)) for total in sums]
    return [power / sum(powers) for power in powers]


def near(weights: np.ndarray, reach: int) -> list[list[float]]:
    """For each position, the weights at most ``reach`` positions away; 0 beyond the first and last position."""
    padded = [0.0] * reach + weights.tolist() + [0.0] * reach
    return [padded[i : i + 2 * reach + 1] for i in range(len(weights))]


def by_hand(policy: Any, keys: torch.Tensor, weights: np.ndarray) -> Iterable[float]:
    """The policy's scores by its formula, negated: the positions with the highest values are evicted."""
    if isinstance(policy, L2Norm):
        return averaged(keys, norms)
    if isinstance(policy, KeyDiff):
        return averaged(keys, lambda own: similarities(own, policy))
    if isinstance(policy, H2O):
        return -weights.sum(axis=0)
    if isinstance(policy, RKV):
        # The request is not in a forward pass in flight: the ``alpha`` (5) newest queries end before it.
        important = [max(some) for some in near(weights[-5:].mean(axis=0), 1)]
        redundant = averaged(keys, lambda own: redundancies(own, policy.threshold, policy.reach))
        return (1 - policy.mix) * redundant - policy.mix * np.array(important)
    if isinstance(policy, SnapKV):
        # Mean weight of the 6 newest queries on prompt positions 0 to 33, averaged over 5 positions.
        return [-float(np.mean(some)) for some in near(weights[-6:].mean(axis=0)[:34], 2)]
    raise NotImplementedError(f"the formula of {policy}")


#: Policy, number of held positions, start and end of those that may be evicted, number of evicted ones.
RULES: list[tuple[Any, int, int, int, int]] = [
    (L2Norm(budget=8, recent=1), 24, 5, 23, 9),
    *(
        (KeyDiff(budget=10, recent=4, anchor=anchor, metric=metric), 20, 2, 16, 8)
        for anchor in ANCHORS
        for metric in METRICS
    ),
    # Half of H2O's budget is for the newest positions, the rest for those with the highest weights.
    (H2O(budget=20, recent=1, prompt_queries=40), 40, 3, 30, 20),
    *(
        (RKV(budget=10, mix=mix, recent=8, alpha=5, kernel=3), 30, 4, 22, 9)
        for mix in (0.1, 0.9, 1.0)
    ),
    *(
        (RKV(budget=10, mix=0.0, recent=8, threshold=threshold, reach=reach), 30, 4, 22, 9)
        for threshold, reach in ((0.0, 512), (0.95, 512), (0.5, 29), (0.5, 6), (0.5, 1))
    ),
    # The prompt has 40 positions, 20 above the budget; the response's 10 positions stay.
    (SnapKV(budget=20, window=6, kernel=5, recent=1), 50, 2, 34, 20),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule[0]))
def test_what_goes_is_the_papers(
    rule: tuple[Any, int, int, int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed == 0:
        monkeypatch.setattr(rkv, "_ELEMENTS", 50)
    policy, held, first, last, count = rule
    keys = random_keys(held, seed)
    weights = random_weights(held, seed)
    whole = isinstance(policy, SnapKV)
    now = view(held, weights, prompt=40 if whole else None, owned=first, keys=keys)
    found = evict(policy, now, held, None if whole else count)
    assert found == highest(by_hand(policy, keys, weights), range(first, last), count)


def test_redundancy_takes_time_by_what_is_held_and_not_by_its_square() -> None:
    products = []
    for held in (1024, 4096):
        with FlopCounterMode(display=False) as counter:
            redundancy(torch.ones(held, 2, 8), 0.5, RKV(budget=1).reach)
        products.append(counter.get_total_flops())
    assert products[1] == 4 * products[0] > 0


def test_given_weights_end_where_asked() -> None:
    weights = random_weights(20, 1, queries=5)
    [layer] = view(20, weights).layers
    assert layer.weights(0, newest=2)[0].numpy() == pytest.approx(weights[3:].sum(axis=0))
    for first, end, rows in (
        (0, None, weights),
        (17, 19, weights[2:4]),
        (17, 10, []),
        (20, 20, []),
    ):
        expected = np.sum(rows, axis=0) if len(rows) else np.zeros(20)
        assert layer.weights(first, end)[0].numpy() == pytest.approx(expected)


@dataclasses.dataclass(frozen=True)
class Totals(Evictor):
    """Keeps running totals of what its newest ``kept`` queries attend to."""

    accumulates: ClassVar[bool] = True
    kept: int = 8

    @property
    def queries(self) -> int:
        return self.kept


def test_running_totals_need_the_queries_of_a_poll() -> None:
    assert Totals(budget=8).queries == 8
    with pytest.raises(OptionError, match="queries at least 8, .* not 7"):
        Totals(budget=8, kept=7)


def test_h2o_goes_on_from_its_total() -> None:
    """Queries counted earlier do not count again. Of prompt queries, only the last ``prompt_queries`` count."""
    weights = random_weights(20, 1, queries=20)
    policy = H2O(budget=8, prompt_queries=3)
    earlier = torch.rand(20)
    now = dataclasses.replace(view(20, weights, prompt=12), earlier=earlier, seen=15)
    expected = earlier + torch.from_numpy(weights[15:].sum(axis=0)).float()
    torch.testing.assert_close(policy.scores(now), expected)
    first = policy.scores(view(20, weights, prompt=12))
    torch.testing.assert_close(first, torch.from_numpy(weights[9:].sum(axis=0)).float())


@pytest.mark.parametrize("seed", range(2))
def test_snapkv_acts_on_a_chunk_as_on_a_prompt(seed: int) -> None:
    """A prefill chunk of 50 tokens is treated like a prompt of 50. ``share`` is a fraction of the prompt."""
    weights = random_weights(50, seed)
    policy = SnapKV(budget=20, window=6, recent=1)
    assert policy.prompt and policy.slack == 1
    chunk, whole = (view(50, weights, prompt=prompt) for prompt in (400, 50))
    found = evict(policy, chunk, 50)
    assert found == evict(policy, whole, 50)
    assert len(found) == 30 and max(found) < 44
    half = SnapKV(share=0.5, window=4, recent=1)
    assert len(evict(half, view(50, weights, prompt=40), 50)) == 20


class Turned(GivenLayer):
    """A layer that rotates its ``plain`` queries for their positions, and reports the oldest as not kept."""

    plain: torch.Tensor

    def queries(self, first: int, end: int | None = None) -> Any:
        at = torch.arange(first, self.written)
        assert self.rotation is not None
        # The query that was not kept is filled with a huge number, so the test fails if a policy uses it.
        kept = at != first
        turned = self.rotation.rotate(self.plain[-len(at) :], at)
        return torch.where(kept[:, None, None], turned, 1e6), at, kept


@pytest.mark.parametrize("is_neox", [True, False])
def test_triattention_is_the_papers_series(is_neox: bool) -> None:
    """The paper's series is computed here in complex numbers, from keys and queries before rotation."""
    held = 24
    heads = 4
    kv_heads = 2
    dim = 8
    window = 6
    generator = torch.Generator().manual_seed(3)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    angles = torch.arange(256.0)[:, None] * frequencies
    rotation = KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=1), dim, is_neox)
    plain_keys = torch.randn(held, kv_heads, dim, generator=generator)
    plain = torch.randn(window, heads, dim, generator=generator) + 1.0
    layer = Turned(rotation.rotate(plain_keys, torch.arange(held)), None, held, rotation)
    layer.plain = plain
    now = dataclasses.replace(view(held), layers=[layer])
    found = TriAttention(budget=8, window=window, reach=100).scores(now)

    def complex_of(some: torch.Tensor) -> torch.Tensor:
        x, y = some.chunk(2, dim=-1) if is_neox else (some[..., ::2], some[..., 1::2])
        return torch.complex(x.double(), y.double())

    queries = complex_of(plain[1:])
    keys = complex_of(plain_keys).repeat_interleave(2, dim=1)
    centre = queries.mean(dim=0)
    size = queries.abs().mean(dim=0)
    ratio = centre * keys.conj()
    at = torch.arange(held)[:, None, None]
    series = torch.zeros(held, heads, dtype=torch.float64)
    for ahead in (1, 2, 4, 8, 16, 32, 64):
        turned = torch.cos(frequencies * (held + ahead - at) + ratio.angle())
        series += (ratio.abs() * turned).sum(dim=-1) / 7
    own = series + ((size - centre.abs()) * keys.abs()).sum(dim=-1)
    expected = ((own - own.mean(dim=0)) / own.std(dim=0, correction=0)).mean(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


FEW: Any = dict(budget=8, recent=1)
OF_KEYS = [L2Norm(**FEW), KeyDiff(**FEW)]
OF_WEIGHTS = [RKV(**FEW, alpha=4), H2O(**FEW), SnapKV(**FEW, window=2)]


@pytest.mark.parametrize("policy", OF_KEYS + OF_WEIGHTS, ids=lambda policy: type(policy).__name__)
def test_keys_and_weights_that_are_no_numbers(policy: Any) -> None:
    """NaN in keys or weights raises no error. If all keys are zero, the oldest positions are evicted first."""
    weights = random_weights(30, 3)
    keys = random_keys(30, 3)
    if policy in OF_KEYS:
        assert evict(policy, view(10, keys=torch.zeros(1, 10, 1, 4)), 10, 3) == [0, 1, 2]
        keys[0, 3, 0, 0] = math.nan
    else:
        weights[-1, 4] = math.nan
    found = evict(policy, view(30, weights, prompt=30, keys=keys), 30, 6)
    assert len(set(found)) == len(found) == 6

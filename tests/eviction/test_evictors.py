# SPDX-License-Identifier: Apache-2.0
"""Each eviction rule against its formula written out, on random keys and by hand."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.eviction.policies.contract import Eviction, RequestView
from sglang_reasoncache.eviction.policies.evictor import Evictor, evict_highest, runs
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.l2norm import L2Norm
from sglang_reasoncache.eviction.policies.random_eviction import RandomEviction
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM


class GivenKeys:
    """Keys of held positions, ``[layers, held, heads, head_dim]``."""

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self.layers = range(len(keys))

    def cached_at(self) -> torch.Tensor:
        return torch.arange(self._keys.shape[1])

    def stored(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def unrotated(self, layer: int) -> torch.Tensor:
        # Some other keys, so that it shows which were asked for.
        return self._keys[layer].flip(0)

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        read = self.unrotated if unrotated else self.stored
        return torch.stack([score(read(i)) for i in self.layers]).mean(dim=(0, 2)).double().numpy()


def view(
    written: int,
    *,
    owned: int = 0,
    page: int = 1,
    gone: Iterable[int] = (),
    keys: torch.Tensor | None = None,
    seed: int = 7,
    shared: Iterable[tuple[int, int, int]] = (),
) -> RequestView:
    held = np.setdiff1d(np.arange(written), np.fromiter(gone, dtype=np.int64))
    given = GivenKeys(torch.zeros(1, len(held), 1, 2) if keys is None else keys)
    slot_aliases = SlotAliases()
    for dst, src, length in shared:
        slot_aliases.share(dst, src, length)
    return RequestView(owned, written, owned, page, held, slot_aliases.of(held), seed, given)


def positions(evictions: Iterable[Eviction]) -> list[int]:
    return [at for evict in evictions for at in range(evict.start, evict.end)]


def random_keys(held: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Heads and layers of very different length, as models have them.
    scale = torch.rand(3, 1, 2, 1, generator=generator) * 20 + 0.1
    return (torch.randn(3, held, 2, 8, generator=generator) + 0.5) * scale


# -- what all of them share ---------------------------------------------------


def test_candidates_are_owned_held_and_not_the_newest() -> None:
    assert view(10, owned=3, gone=[4, 5]).candidates().tolist() == [3, 6, 7, 8]
    assert view(10, owned=3).candidates(recent=4).tolist() == [3, 4, 5]
    assert view(10, owned=3).candidates(recent=0).tolist() == [3, 4, 5, 6, 7, 8]
    assert view(10, owned=3).candidates(recent=50).tolist() == []


def test_candidates_come_in_whole_pages() -> None:
    assert view(13, owned=4, page=4).candidates().tolist() == list(range(4, 12))
    # The newest position is the last of its page, which stays.
    assert view(12, owned=4, page=4).candidates().tolist() == [4, 5, 6, 7]
    assert view(13, owned=4, page=4, gone=range(4, 8)).candidates().tolist() == [8, 9, 10, 11]


def test_what_has_a_slot_with_a_position_that_stays_is_no_candidate() -> None:
    now = view(12, owned=3, shared=[(8, 4, 2)])
    assert len(np.unique(now.slot_aliases)) == 10
    assert now.candidates().tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    # 9 is among the newest, so 5 would free nothing.
    assert now.candidates(recent=3).tolist() == [3, 4, 6, 7, 8]
    # 8 and 9 are named like 1, which is not the request's, and 2.
    assert view(12, owned=3, shared=[(8, 1, 2)]).candidates().tolist() == [3, 4, 5, 6, 7, 10]
    # Once the other name is gone, the slot is one position's again.
    assert view(12, owned=3, gone=[9], shared=[(8, 4, 2)]).candidates(recent=3).tolist() == [
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    pages = view(17, owned=4, page=4, shared=[(8, 4, 4)])
    assert len(np.unique(pages.slot_aliases)) == 13
    assert pages.candidates().tolist() == list(range(4, 16))
    assert pages.candidates(recent=6).tolist() == []


def test_positions_that_share_a_slot_go_together() -> None:
    """When the one that is wanted most would, and they count as what comes back."""
    scores = np.arange(20.0)[::-1].copy()
    now = view(20, owned=2, shared=[(12, 4, 2), (15, 12, 1)])
    # By age, where 5 counts as 13, and 4 as 15, the last ones with their slots.
    order = [[2], [3], *([at] for at in range(6, 12)), [5, 13], [14], [4, 12, 15], [16], [17]]
    for count in range(1, len(order) + 1):
        found = positions(evict_highest(now, now.candidates(), scores, count))
        assert found == sorted(at for slot in order[:count] for at in slot)


def test_a_slot_without_a_score_stays_longest() -> None:
    """One of the positions that have it is enough."""
    now = view(8, owned=1, shared=[(5, 2, 1)])
    scores = np.array([9, 1, 9, 1, 1, np.nan, 1, 9.0])
    assert positions(evict_highest(now, now.candidates(), scores, 4)) == [1, 3, 4, 6]
    assert positions(evict_highest(now, now.candidates(), scores, 5)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(30))
def test_what_goes_by_score_gives_back_what_is_asked_for(page: int, seed: int) -> None:
    """Against the rule in words: whole slots, the highest of their least wanted scores first."""
    rng = np.random.default_rng(seed)
    pages = 40
    shared = [
        (dst * page, int(rng.integers(2, dst)) * page, page)
        for dst in sorted(rng.choice(np.arange(3, pages), 15, replace=False).tolist())
    ]
    gone = np.flatnonzero(np.repeat(rng.random(pages) < 0.2, page))
    now = view(pages * page + 1, owned=2 * page, page=page, gone=gone, shared=shared)
    scores = rng.random(len(now.held))
    # Which slot each page has, as sharing went on, and which pages have a slot.
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
    wanted = sorted(whole, key=lambda k: (-min(by_page[at] for at in whole[k]), k))
    for excess in (1, page, 7, 5 * page, 1000):
        found = positions(evict_highest(now, now.candidates(recent), scores, excess))
        going = sorted(at for k in wanted[: math.ceil(excess / page)] for at in whole[k])
        assert found == [at * page + i for at in going for i in range(page)]


def test_a_view_keeps_its_positions() -> None:
    now = view(10, owned=3, shared=[(7, 5, 1)])
    for array in (now.held, now.slot_aliases):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
    np.random.default_rng(0).shuffle(now.candidates())
    assert now.candidates().tolist() == [3, 4, 5, 6, 7, 8]
    assert now.held.tolist() == list(range(10))


def test_runs_are_the_positions_again() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        chosen = np.flatnonzero(rng.random(60) < rng.random())
        found = runs(chosen)
        assert positions(found) == chosen.tolist()
        assert all(a.end < b.start for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("policy", "written", "held", "excess"),
    [
        (Evictor(budget=100, slack=10), 500, 110, 0),
        (Evictor(budget=100, slack=10), 500, 111, 11),
        (Evictor(share=0.5, slack=10), 201, 111, 0),
        (Evictor(share=0.5, slack=10), 201, 112, 11),
    ],
)
def test_excess_has_slack(policy: Evictor, written: int, held: int, excess: int) -> None:
    """Nothing happens until the slack is used up; then all of it goes."""
    assert policy.excess(written, held) == excess


# -- StreamingLLM --------------------------------------------------------------


def test_streamingllm_keeps_sinks_and_window() -> None:
    policy = StreamingLLM(budget=10, slack=1, recent=1)
    assert positions(policy.evict(view(20), 10)) == list(range(4, 14))
    # What is left: 4 sinks and the 6 newest.
    assert positions(policy.evict(view(22, gone=range(4, 14)), 2)) == [14, 15]


def test_streamingllm_cannot_have_the_prompt() -> None:
    policy = StreamingLLM(budget=10, slack=1, recent=3)
    assert positions(policy.evict(view(20, owned=15), 10)) == [15, 16]


def test_streamingllm_in_pages() -> None:
    """Sinks and excess are rounded up to whole pages."""
    policy = StreamingLLM(budget=16, slack=1, recent=1)
    assert positions(policy.evict(view(30, page=4), 13)) == list(range(4, 20))
    assert positions(StreamingLLM(budget=16, sinks=5, recent=1).evict(view(30, page=4), 4)) == [
        8,
        9,
        10,
        11,
    ]


# -- random --------------------------------------------------------------------


def test_random_eviction_is_the_same_again_and_differs_by_seed_and_prompt() -> None:
    policy = RandomEviction(budget=10, recent=1)
    found = positions(policy.evict(view(40), 20))
    assert found == positions(policy.evict(view(40), 20))
    assert found != positions(RandomEviction(budget=10, seed=1, recent=1).evict(view(40), 20))
    assert found != positions(policy.evict(view(40, seed=8), 20))


@pytest.mark.parametrize("page", [1, 4])
def test_random_eviction_is_uniform_however_it_got_there(page: int) -> None:
    """In many small steps, every position is kept equally often."""
    kept: Counter[int] = Counter()
    tries, last = 400, 41 * page
    for seed in range(tries):
        policy = RandomEviction(budget=10 * page + 1, seed=seed, slack=1, recent=1)
        gone: list[int] = []
        for written in range(20 * page + 1, last + 1, 4 * page):
            now = view(written, page=page, gone=gone)
            gone += positions(policy.evict(now, policy.excess(written, len(now.held))))
        kept.update(sorted({at // page for at in range(last - 1)} - {at // page for at in gone}))
    counts = np.array([kept[at] for at in range(40)])
    assert counts.sum() == tries * 10
    # 40 positions, each kept with probability 1/4: chi-squared with 39 degrees of freedom.
    assert ((counts - tries / 4) ** 2 / (tries / 4)).sum() < 39 + 5 * math.sqrt(2 * 39)


def test_random_eviction_is_uniform_over_slots() -> None:
    """A slot of two positions is kept no more often than others."""
    kept, tries = np.zeros(40), 400
    for seed in range(tries):
        now = view(41, shared=[(20, 0, 10)])
        going = positions(RandomEviction(budget=10, seed=seed, recent=1).evict(now, 15))
        assert len(np.unique(now.slot_aliases[going])) == 15
        kept[np.setdiff1d(np.arange(40), going)] += 1
    assert (kept[20:30] == kept[:10]).all()
    # 30 slots, each kept with probability 1/2: chi-squared with 29 degrees of freedom.
    counts = np.delete(kept, np.s_[20:30])
    assert ((counts - tries / 2) ** 2 / (tries / 4)).sum() < 30 + 5 * math.sqrt(2 * 30)


# -- scores of keys ------------------------------------------------------------


def norm_by_hand(keys: torch.Tensor) -> list[float]:
    layers, held, heads, _ = keys.shape
    scores = [0.0] * held
    for layer in range(layers):
        for head in range(heads):
            norms = [
                math.sqrt(sum(x * x for x in keys[layer, i, head].tolist())) for i in range(held)
            ]
            mean = sum(norms) / held
            for i in range(held):
                scores[i] += norms[i] / mean / (layers * heads)
    return scores


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def keydiff_by_hand(keys: torch.Tensor, anchor: str) -> list[float]:
    """The formulas of the paper, pair by pair, averaged over heads and layers."""
    layers, held, heads, _ = keys.shape
    scores = [0.0] * held
    for layer in range(layers):
        for head in range(heads):
            own = keys[layer, :, head].double()
            for i in range(held):
                if anchor == "pairwise":
                    score = sum(cosine(own[i], own[j]) for j in range(held)) / held
                elif anchor == "mean_raw":
                    score = cosine(own[i], own.mean(dim=0))
                else:
                    score = cosine(own[i], torch.stack([k / k.norm() for k in own]).mean(dim=0))
                scores[i] += score / (layers * heads)
    return scores


def highest(scores: list[float], among: Iterable[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda at: -scores[at])[:count])


@pytest.mark.parametrize("seed", range(5))
def test_l2norm_keeps_low_norms(seed: int) -> None:
    keys = random_keys(24, seed)
    found = positions(L2Norm(budget=8, recent=1).evict(view(24, owned=5, keys=keys), 9))
    assert found == highest(norm_by_hand(keys), range(5, 23), 9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("anchor", ["mean_raw", "mean_norm", "pairwise"])
def test_keydiff_gives_up_what_is_like_the_rest(anchor: str, seed: int) -> None:
    keys = random_keys(20, seed)
    policy = KeyDiff(budget=10, anchor=anchor, recent=4)
    found = positions(policy.evict(view(20, owned=2, keys=keys), 8))
    assert found == highest(keydiff_by_hand(keys, anchor), range(2, 16), 8)


def test_keydiff_pairwise_ranks_a_head_as_the_normalised_anchor() -> None:
    """As the paper says; over several heads the two averages differ."""
    keys = random_keys(30, 3)
    order: dict[str, list[list[int]]] = {}
    for anchor in ("mean_norm", "pairwise"):
        for i in range(12):
            one = keys[:1, :, :1]
            evictions = KeyDiff(budget=1, anchor=anchor, recent=1).evict(view(30, keys=one), i + 1)
            order.setdefault(anchor, []).append(positions(evictions))
    assert order["mean_norm"] == order["pairwise"]


def test_keydiff_by_hand() -> None:
    """Three keys to the right, one of them long, and one up: the odd one stays."""
    keys = torch.tensor([[1.0, 0.0], [9.0, 3.0], [0.0, 1.0], [1.0, 0.1], [1.0, 0.0]])
    # The raw mean leans to the long key, so that goes first; cosines with (2.4, 0.82) are
    # 0.946, 0.9999, 0.323 and 0.974.
    given = view(5, keys=keys[None, :, None])
    assert positions(KeyDiff(budget=1, recent=1).evict(given, 1)) == [1]
    assert positions(KeyDiff(budget=1, recent=1).evict(given, 2)) == [1, 3]
    # At length 1 the mean is (0.789, 0.285): 0.941, 0.9996, 0.34 and 0.969.
    assert positions(KeyDiff(budget=1, anchor="mean_norm", recent=1).evict(given, 3)) == [
        0,
        1,
        3,
    ]


def test_keydiff_without_rotation_reads_other_keys() -> None:
    keys = random_keys(20, 1)
    policy = KeyDiff(budget=10, keys="unrotated", recent=1)
    found = positions(policy.evict(view(20, keys=keys), 8))
    assert found == highest(keydiff_by_hand(keys.flip(1), "mean_raw"), range(19), 8)


@pytest.mark.parametrize(
    "policy",
    [L2Norm(budget=8, recent=1), KeyDiff(budget=8, recent=1), RandomEviction(budget=8, recent=1)],
)
def test_scores_of_a_page_are_averaged(policy: Evictor) -> None:
    """Whole pages go, by their mean; what was evicted before has no key and no say."""
    gone = range(8, 12)
    keys = random_keys(26, 2)
    now = view(30, owned=4, page=4, gone=gone, keys=keys)
    found = positions(policy.evict(now, 7))  # type: ignore[attr-defined]
    assert len(found) == 8 and set(found) <= {*range(4, 8), *range(12, 28)}
    if not isinstance(policy, RandomEviction):
        by_hand = (
            norm_by_hand if isinstance(policy, L2Norm) else lambda k: keydiff_by_hand(k, "mean_raw")
        )
        scores = dict(zip(now.held.tolist(), by_hand(keys), strict=True))
        means = {at: sum(scores[at + i] for i in range(4)) for at in (4, 12, 16, 20, 24)}
        best = sorted(means, key=lambda at: -means[at])[:2]
        assert found == sorted(at + i for at in best for i in range(4))


@pytest.mark.parametrize("policy", [L2Norm(budget=4, recent=1), KeyDiff(budget=4, recent=1)])
def test_keys_are_not_read_where_nothing_may_go(policy: Evictor) -> None:
    """A prompt above the budget is asked about again and again."""

    class NoKeys(GivenKeys):
        def stored(self, layer: int) -> torch.Tensor:
            raise AssertionError("all keys are read for nothing")

    now = dataclasses.replace(view(10, owned=9), keys=NoKeys(torch.zeros(1, 10, 1, 2)))
    assert policy.excess(80, 80) > 0
    assert list(policy.evict(now, 6)) == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [L2Norm(budget=4, recent=1), KeyDiff(budget=4, recent=1)])
def test_keys_of_no_length_and_no_number(policy: Evictor) -> None:
    """All zeros tie, and older ones go first; a NaN is never better than a number."""
    zeros = torch.zeros(1, 10, 1, 4)
    assert positions(policy.evict(view(10, keys=zeros), 3)) == [0, 1, 2]  # type: ignore[attr-defined]
    broken = random_keys(10, 0)
    broken[0, 3, 0, 0] = math.nan
    found = positions(policy.evict(view(10, keys=broken), 4))  # type: ignore[attr-defined]
    assert len(found) == 4

# SPDX-License-Identifier: Apache-2.0
"""Reads a recorded response through the KV caches of all arms and says how predictions change."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eval.fidelity.arms import Arm
from eval.fidelity.cache import EditableCache, Reader
from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.eviction.keys import KeySource
from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

#: Tokens of one forward, and of one comparison of log-probabilities.
_CHUNK, _COMPARED = 128, 32
#: Distances seen before a threshold accepts.
_WARM_UP = 32


@dataclass(frozen=True)
class Score:
    """What an arm did to one response.

    Attributes:
        saved: Share of the response's positions that have no slot of their own at its end.
        nll: Mean negative log-likelihood of the response's tokens, in nats.
        kl: Mean KL(dense || arm) of the next token, in nats.
        top1: Share of the tokens where arm and dense find the same one most likely.
    """

    saved: float
    nll: float
    kl: float
    top1: float


class Decisions:
    """What the plugin's own filter decides about a response.

    Args:
        vocabulary: Of the model's tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._classes = vocabulary, TokenClasses(vocabulary)

    def pairs(
        self, rule: FilterConfig, tokens: Sequence[int], start: int
    ) -> dict[int, list[BlockPair]]:
        """Block pairs that may share once so many tokens are written, ``start`` being prompt."""
        request = RequestFilter(rule, self._classes, self._vocabulary, start)
        found = defaultdict(list)
        for written, token in enumerate(tokens[start:], start + 1):
            for proposal in request.push([token]):
                found[written] += proposal.pairs
        return {written: pairs for written, pairs in found.items() if pairs}


class ArmCache:
    """One arm's row of a cache while a response is read. Its row begins with its first edit."""

    def __init__(self, arm: Arm, reader: Reader, cache: EditableCache, prompt: int) -> None:
        self.arm, self._reader, self._cache, self._prompt = arm, reader, cache, prompt
        self.row = 0
        self._aliases = SlotAliases()
        self._evicted = np.zeros(cache.visible.shape[1], dtype=bool)

    @property
    def saved(self) -> int:
        """Positions written that have no slot of their own."""
        held = np.flatnonzero(~self._evicted[: self._cache.length])
        return self._cache.length - len(np.unique(self._aliases.of(held)))

    def share(self, pairs: Sequence[BlockPair], threshold: AdaptiveThreshold) -> None:
        """Apply block pairs whose distance the threshold accepts."""
        if not pairs or self.arm.filter is None:
            return
        block = self.arm.filter.block
        chosen: Sequence[Any] = [True] * len(pairs)
        if self.arm.percentile < 100:
            chosen = threshold.decide(self._distances(pairs, block))
        rotation = self._reader.rotation if self.arm.corrected else None
        for (dst, src), accepted in zip(pairs, chosen, strict=True):
            reads = self._aliases.redirect(dst, src, block) if accepted else []
            # A source that moves itself must have moved before it is read.
            chained = any(src <= position < src + block for position, _ in reads)
            groups = itertools.groupby(reads, itemgetter(1)) if chained else [(0, reads)]
            for _, group in groups:
                moved = [(position, src + offset) for position, offset in group]
                if moved:
                    self._edit().redirect(self.row, moved, rotation)

    def evict(self, target: int, seed: int) -> None:
        """Give up positions by the arm's policy until ``target`` are gone."""
        written = self._cache.length
        held = np.flatnonzero(~self._evicted[:written])
        excess = len(held) - (written - target)
        if excess <= 0:
            return
        policy = dataclasses.replace(self.arm.evictor, budget=written - target, share=None)
        view = RequestView(
            prompt=self._prompt,
            written=written,
            owned=self._prompt,
            page=1,
            held=held,
            slot_aliases=held.copy(),
            seed=seed,
            keys=self._keys().of(0, held),
        )
        for gone in policy.evict(view, excess):
            self._evicted[gone.start : gone.end] = True
            self._edit().visible[self.row, gone.start : gone.end] = False

    def _edit(self) -> EditableCache:
        if not self.row:
            self.row = self._cache.branch()
        return self._cache

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer as a pool has them, ``[positions, heads, head_dim]``."""
        row, length = self.row, self._cache.length
        keys, values = (
            both[:, row, :, :length].transpose(1, 2).contiguous()
            for both in (self._cache.keys, self._cache.values)
        )
        return list(zip(keys, values, strict=True))

    def _keys(self) -> KeySource:
        layers, device = self._layers(), self._cache.keys.device
        at = torch.arange(self._cache.length, device=device)
        pool = SimpleNamespace(
            start_layer=0, layer_num=len(layers), get_key_buffer=lambda i: layers[i][0]
        )
        positions: Any = SimpleNamespace(positions=at)
        heads = self._cache.keys.shape[2]
        return KeySource(pool, at[None], positions, self._reader.rotation, heads)

    def _distances(self, pairs: Sequence[BlockPair], block: int) -> list[float]:
        """KV distance of each pair, the source's keys as the destination would read them."""
        rotation = self._reader.rotation if self.arm.corrected else None
        kernel = DistanceKernel(self._layers(), rotation)
        device = self._cache.keys.device
        within = torch.arange(block, device=device)
        dst, src = (
            torch.tensor(s, device=device)[:, None] + within for s in zip(*pairs, strict=True)
        )
        shift = None if rotation is None else (dst - src).int()
        squares = kernel.squares(dst, src, shift)
        return block_distances(squares, block, self._cache.keys.shape[2]).tolist()


class Replay:
    """Responses through a model and all arms.

    Args:
        like: Name of the arm whose saving the evictors match.
    """

    def __init__(
        self, reader: Reader, decisions: Decisions, arms: Sequence[Arm], like: str
    ) -> None:
        self._reader, self._decisions, self._arms, self._like = reader, decisions, arms, like
        self._thresholds = {arm.name: AdaptiveThreshold(arm.percentile, _WARM_UP) for arm in arms}

    def scores(self, tokens: Sequence[int], prompt: int) -> dict[str, Score]:
        """Scores by name of arm, and of ``dense``; the first ``prompt`` tokens are not scored."""
        plans = {
            arm.name: self._decisions.pairs(arm.filter, tokens, prompt)
            for arm in self._arms
            if arm.filter is not None
        }
        cache = self._reader.cache(1 + len(self._arms), len(tokens))
        states = {arm.name: ArmCache(arm, self._reader, cache, prompt) for arm in self._arms}
        sums = torch.zeros(1 + len(states), 3, dtype=torch.float64)
        stops = {at for plan in plans.values() for at in plan}
        for end in _ends(stops, prompt, len(tokens)):
            start = cache.length
            logits = self._reader.forward(cache, tokens[start:end])
            # The last token's own prediction has nothing to be compared with.
            targets = tokens[max(start, prompt - 1) + 1 : end + 1]
            found = compare(logits[:, max(start, prompt - 1) - start :][:, : len(targets)], targets)
            sums += found[[0, *(state.row for state in states.values())]]
            if end not in stops:
                continue
            for name, state in states.items():
                if name in plans:
                    state.share(plans[name].get(end, []), self._thresholds[name])
                else:
                    state.evict(states[self._like].saved, sum(tokens[:prompt]))
        count = len(tokens) - prompt
        saved = [0, *(state.saved for state in states.values())]
        return {
            name: Score(slots / count, *(row / count).tolist())
            for name, slots, row in zip(("dense", *states), saved, sums, strict=True)
        }


def compare(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """float64 ``[rows, 3]``: sums of NLL, KL(dense || row) and top-1 agreement with row 0.

    ``logits`` are ``[rows, tokens, vocabulary]``, of the tokens before ``targets``.
    """
    sums = torch.zeros(len(logits), 3, dtype=torch.float64)
    for at in range(0, len(targets), _COMPARED):
        some = torch.tensor(targets[at : at + _COMPARED], device=logits.device)
        log_p = logits[:, at : at + len(some)].float().log_softmax(-1)
        dense = log_p[0]
        nll = -log_p[:, torch.arange(len(some), device=some.device), some].sum(-1)
        kl = (dense.exp() * (dense - log_p)).sum((1, 2))
        same = (log_p.argmax(-1) == dense.argmax(-1)).sum(-1)
        sums += torch.stack((nll, kl, same), dim=-1).double().cpu()
    return sums


def _ends(stops: set[int], prompt: int, length: int) -> Iterator[int]:
    """Ends of the forwards: at every stop, at the prompt's end and after ``_CHUNK`` tokens."""
    start = 0
    for stop in sorted({prompt, length} | stops):
        yield from (*range(start + _CHUNK, stop, _CHUNK), stop)
        start = stop

# SPDX-License-Identifier: Apache-2.0
"""Reads a recorded response through the KV caches of all arms; how predictions change."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eval.fidelity.arms import Arm
from eval.fidelity.cache import EditableCache, Reader
from sglang_reasoncache.eviction.held import HeldKeys, KeySource
from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances
from sglang_reasoncache.sharing.state import RequestState
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

#: Tokens of one forward, and of one comparison of log-probabilities.
_CHUNK, _COMPARED = 128, 32
#: Distances seen before a threshold accepts; it lives as long as the run.
_WARM_UP = 32


class ArmCache:
    """One arm's row of a cache while a response is read; row 0 until its first edit."""

    def __init__(self, arm: Arm, reader: Reader, cache: EditableCache, prompt: int) -> None:
        self.arm, self.cache, self.prompt, self.row = arm, cache, prompt, 0
        self._rotation = reader.rotation
        self._state = RequestState()
        self._gone = np.zeros(cache.visible.shape[1], dtype=bool)

    @property
    def saved(self) -> int:
        """Positions written that have no slot of their own."""
        held = np.flatnonzero(~self._gone[: self.cache.length])
        return self.cache.length - len(np.unique(self._state.slot_aliases.of(held)))

    def share(self, pairs: Sequence[BlockPair], threshold: AdaptiveThreshold) -> None:
        """Apply the block pairs whose distance the threshold accepts."""
        assert self.arm.filter is not None, "asked only of arms that share"
        block, rotation = self.arm.filter.block, self._rotation if self.arm.corrected else None
        # The pipeline's rules: no position is redirected twice.
        pairs = [pair for pair in pairs if self._state.claim(pair.dst_start, block)]
        accepted = np.ones(len(pairs), dtype=bool)
        if pairs and self.arm.percentile < 100:
            at = torch.tensor(pairs).T[..., None] + torch.arange(block)
            dst, src = at.to(self.cache.keys.device)
            shift = None if rotation is None else (dst - src).int()
            squares = DistanceKernel(self._layers(), rotation).squares(dst, src, shift)
            heads = self.cache.keys.shape[2]
            accepted = threshold.decide(block_distances(squares, block, heads).tolist())
        for dst_start, src_start in itertools.compress(pairs, accepted):
            moved = self._state.slot_aliases.redirect(dst_start, src_start, block)
            if moved:
                reads = [(position, src_start + offset) for position, offset in moved]
                self._edited().redirect(self.row, reads, rotation)

    def evict(self, target: int, seed: int) -> None:
        """Give up positions by the arm's policy until ``target`` are gone."""
        written = self.cache.length
        held = np.flatnonzero(~self._gone[:written])
        excess = len(held) - (written - target)
        if excess <= 0:
            return
        keys = [layer for layer, _ in self._layers()]
        at = torch.arange(written, device=self.cache.keys.device)
        pool = SimpleNamespace(start_layer=0, layer_num=len(keys), get_key_buffer=keys.__getitem__)
        positions: Any = SimpleNamespace(positions=at)
        source = KeySource(pool, at[None], positions, self._rotation, keys[0].shape[1])
        slots: Any = dict(held=held, slot_aliases=held.copy(), keys=HeldKeys(source, 0, held))
        view = RequestView(
            prompt=self.prompt, written=written, owned=self.prompt, page=1, seed=seed, **slots
        )
        policy = dataclasses.replace(self.arm.evictor, budget=written - target, share=None)
        for gone in policy.evict(view, excess):
            self._gone[gone.start : gone.end] = True
            self._edited().visible[self.row, gone.start : gone.end] = False

    def _edited(self) -> EditableCache:
        if not self.row:
            self.row = self.cache.branch()
        return self.cache

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer as in a pool, ``[positions, heads, head_dim]``."""
        cache, part = self.cache, (slice(None), self.row, slice(None), slice(self.cache.length))
        both = ([*all_[part].transpose(1, 2).contiguous()] for all_ in (cache.keys, cache.values))
        return list(zip(*both, strict=True))


class Replay:
    """Responses through a model and all arms; evictors save as much as the arm named ``like``."""

    def __init__(
        self, reader: Reader, vocabulary: Vocabulary, arms: Sequence[Arm], like: str
    ) -> None:
        self._reader, self._arms, self._like = reader, arms, like
        self._vocabulary, self._classes = vocabulary, TokenClasses(vocabulary)
        self._thresholds = {arm.name: AdaptiveThreshold(arm.percentile, _WARM_UP) for arm in arms}

    def scores(self, tokens: Sequence[int], prompt: int) -> dict[str, dict[str, float]]:
        """Figures by arm and of ``dense`` over what follows the first ``prompt`` tokens: ``saved``,
        share of the positions without a slot of their own at the end; means of a token's ``nll``
        and ``kl`` (dense || arm) in nats, and of ``top1``, dense's likeliest token is the arm's."""
        rules = {arm.name: arm.filter for arm in self._arms if arm.filter}
        plans = {name: self._plan(rule, tokens, prompt) for name, rule in rules.items()}
        cache = self._reader.cache(1 + len(self._arms), len(tokens))
        states = {arm.name: ArmCache(arm, self._reader, cache, prompt) for arm in self._arms}
        sums = torch.zeros(1 + len(states), 3, dtype=torch.float64)
        stops = {at for plan in plans.values() for at in plan}
        for end in _ends(stops, prompt, len(tokens)):
            start = cache.length
            logits = self._reader.forward(cache, tokens[start:end])
            first = max(start, prompt - 1)
            found = compare(logits[:, first - start :], tokens[first + 1 : end + 1])
            sums += found[[0, *(state.row for state in states.values())]]
            for name, state in states.items() if end in stops else ():
                if name in plans:
                    state.share(plans[name].get(end, ()), self._thresholds[name])
                else:
                    state.evict(states[self._like].saved, sum(tokens[:prompt]))
        count = len(tokens) - prompt
        saved = [0, *(state.saved for state in states.values())]
        columns = torch.cat((torch.tensor(saved)[:, None], sums), dim=1) / count
        figures = ("saved", "nll", "kl", "top1")
        return {
            name: dict(zip(figures, row.tolist(), strict=True))
            for name, row in zip(("dense", *states), columns, strict=True)
        }

    def _plan(
        self, rule: FilterConfig, tokens: Sequence[int], prompt: int
    ) -> dict[int, list[BlockPair]]:
        """Block pairs that the plugin's filter lets share, by the tokens written by then."""
        request = RequestFilter(rule, self._classes, self._vocabulary, prompt)
        found: dict[int, list[BlockPair]] = defaultdict(list)
        for written, token in enumerate(tokens[prompt:], prompt + 1):
            for proposal in request.push([token]):
                found[written] += proposal.pairs
        return {written: pairs for written, pairs in found.items() if pairs}


def compare(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """float64 ``[rows, 3]``: sums of NLL, KL(row 0 || row) and top-1 agreement with row 0, of logits
    ``[rows, tokens, vocabulary]`` of the tokens before ``targets``."""
    sums = torch.zeros(len(logits), 3, dtype=torch.float64)
    for at in range(0, len(targets), _COMPARED):
        some = torch.tensor(targets[at : at + _COMPARED], device=logits.device)
        log_p = logits[:, at : at + len(some)].float().log_softmax(-1)
        nll = -log_p[:, torch.arange(len(some), device=some.device), some].sum(-1)
        kl = (log_p[0].exp() * (log_p[0] - log_p)).sum((1, 2))
        same = (log_p.argmax(-1) == log_p[0].argmax(-1)).sum(-1)
        sums += torch.stack((nll, kl, same), dim=-1).double().cpu()
    return sums


def _ends(stops: set[int], prompt: int, length: int) -> Iterator[int]:
    """Ends of the forwards: at every stop, at the prompt's end and after ``_CHUNK`` tokens."""
    start = 0
    for stop in sorted({prompt, length} | stops):
        yield from (*range(start + _CHUNK, stop, _CHUNK), stop)
        start = stop

# SPDX-License-Identifier: Apache-2.0
"""Reads recorded responses through the KV caches of all arms; how predictions change."""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eval.fidelity.arms import Arm
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.siblings import Slots, proposals
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.eviction.decision import Decision
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

#: Tokens of one forward, and of one comparison of log-probabilities.
_CHUNK, _COMPARED = 128, 32
#: Distances seen before a threshold accepts; it lives as long as the run.
_WARM_UP = 32


class ArmCache:
    """One arm's row of the cache of a response, the ``number``-th of its siblings; row 0 until its
    first edit."""

    def __init__(
        self, arm: Arm, reader: Reader, cache: EditableCache, prompt: int, number: int = 0
    ) -> None:
        self.arm, self.cache, self.prompt, self.row = arm, cache, prompt, 0
        self.slots, self._block = Slots(number), arm.filter.block if arm.filter else 0
        self._rotation = reader.rotation
        self._gone = np.zeros(cache.visible.shape[1], dtype=bool)
        # Blocks that could share, the nearest first.
        self._ledger: list[tuple[float, BlockPair]] = []

    @property
    def saved(self) -> int:
        """Positions written that have no slot of their own."""
        return self.slots.saved + int(np.count_nonzero(self._gone))

    def share(self, pairs: Sequence[BlockPair], threshold: AdaptiveThreshold) -> None:
        """Apply the block pairs whose distance the threshold accepts; of an arm that shares as much
        as it needs, the nearest so far."""
        block = self._block
        # The pipeline's rules: no position is redirected twice.
        pairs = [pair for pair in pairs if self.slots.claim(pair.dst_start, block)]
        accepted, distances = np.ones(len(pairs), dtype=bool), [0.0] * len(pairs)
        if pairs and (self.arm.percentile < 100 or self.arm.need < 1):
            rotation = self._rotation if self.arm.corrected else None
            at = torch.tensor(pairs).T[..., None] + torch.arange(block)
            dst, src = at.to(self.cache.keys.device)
            shift = None if rotation is None else (dst - src).int()
            squares = DistanceKernel(self._layers(), rotation).squares(dst, src, shift)
            heads = self.cache.keys.shape[2]
            distances = block_distances(squares, block, heads).tolist()
            if self.arm.percentile < 100:
                accepted = threshold.decide(distances)
        for entry in itertools.compress(zip(distances, pairs, strict=True), accepted):
            heapq.heappush(self._ledger, entry)
        while self._ledger and self.saved < self.arm.need * (self.cache.length - self.prompt):
            dst_start, src_start = heapq.heappop(self._ledger)[1]
            self._read(dst_start, src_start, self)

    def share_across(self, dst_start: int, src_start: int, lender: "ArmCache") -> None:
        """Apply a block pair whose source is another response's."""
        if self.slots.claim(dst_start, self._block):
            self._read(dst_start, src_start, lender)

    def _read(self, dst_start: int, src_start: int, lender: "ArmCache") -> None:
        reads = self.slots.read(dst_start, src_start, self._block, lender.slots)
        if reads:
            rotation = self._rotation if self.arm.corrected else None
            self._edited().redirect(self.row, reads, rotation, (lender.cache, lender.row))

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
        source = KeySource(pool, at[None], positions, self._rotation)
        layers = source.layers(0, held, written, shifted=False)
        where: Any = dict(prompt=self.prompt, written=written, owned=self.prompt, page=1)
        view = View(**where, held=held, slot_aliases=held, seed=seed, layers=layers)
        policy = dataclasses.replace(self.arm.evictor, budget=written - target, share=None)
        candidates = policy.candidates(view)
        if len(candidates):
            decision = Decision(view, candidates, policy.scores(view), excess)
            gone = decision.positions(Ranks())
            self._gone[gone] = True
            self._edited().visible[self.row, torch.from_numpy(gone)] = False

    def _edited(self) -> EditableCache:
        if not self.row:
            self.row = self.cache.branch()
        return self.cache

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer as in a pool, ``[positions, heads, head_dim]``."""
        cache, part = self.cache, (slice(None), self.row, slice(None), slice(self.cache.length))
        both = ([*all_[part].transpose(1, 2).contiguous()] for all_ in (cache.keys, cache.values))
        return list(zip(*both, strict=True))


class _Response:
    """A response that is read, its arms by name, and sums of figures over what was read: dense's,
    then the arms' in order."""

    def __init__(
        self, reader: Reader, arms: Sequence[Arm], tokens: Sequence[int], prompt: int, number: int
    ) -> None:
        self._reader, self._tokens, self._prompt = reader, tokens, prompt
        self.cache = reader.cache(1 + len(arms), len(tokens))
        self.arms = {arm.name: ArmCache(arm, reader, self.cache, prompt, number) for arm in arms}
        self._sums = torch.zeros(1 + len(arms), 3, dtype=torch.float64)

    def advance(self, end: int) -> None:
        """Read up to position ``end``."""
        for start in range(self.cache.length, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            logits = self._reader.forward(self.cache, self._tokens[start:stop])
            first = max(start, self._prompt - 1)
            found = compare(logits[:, first - start :], self._tokens[first + 1 : stop + 1])
            self._sums += found[[0, *(state.row for state in self.arms.values())]]

    def scores(self) -> dict[str, dict[str, float]]:
        """See :meth:`Replay.scores`."""
        self.advance(len(self._tokens))
        saved = [0, *(state.saved for state in self.arms.values())]
        columns = torch.cat((torch.tensor(saved)[:, None], self._sums), dim=1)
        count, found = len(self._tokens) - self._prompt, {}
        for name, row in zip(("dense", *self.arms), (columns / count).tolist(), strict=True):
            found[name] = dict(zip(("saved", "nll", "kl", "top1"), row, strict=True))
        for name, state in self.arms.items():
            if state.arm.across:
                found[name]["across"] = state.slots.foreign(len(self._tokens)) / count
        return found


class Replay:
    """Responses through a model and all arms; evictors save as much as the arm named ``like``."""

    def __init__(
        self, reader: Reader, vocabulary: Vocabulary, arms: Sequence[Arm], like: str
    ) -> None:
        self._reader, self._arms, self._like = reader, arms, like
        self._vocabulary = vocabulary
        self._thresholds = {arm.name: AdaptiveThreshold(arm.percentile, _WARM_UP) for arm in arms}

    def scores(
        self, siblings: Sequence[Sequence[int]], prompt: int
    ) -> list[dict[str, dict[str, float]]]:
        """Figures by arm and of ``dense`` over what follows the first ``prompt`` tokens, for each of
        the responses to that prompt, which decode together: ``saved``, share of the positions
        without a slot of their own at the end; means of a token's ``nll`` and ``kl`` (dense || arm)
        in nats, and of ``top1``, dense's likeliest token is the arm's. Of arms across also
        ``across``, share of the positions whose slot is a sibling's: it is held, and counted, by
        the one whose position it was first, and saved by its readers."""
        reading = [
            _Response(self._reader, self._arms, tokens, prompt, number)
            for number, tokens in enumerate(siblings)
        ]
        plan = self._plan(siblings, prompt)
        for written, number in sorted(plan):
            reading[number].advance(written)
            for name, state in reading[number].arms.items():
                if state.arm.filter is None:
                    seed = sum(siblings[number][:prompt])
                    state.evict(reading[number].arms[self._like].saved, seed)
                    continue
                for proposal in plan[written, number].get(name, ()):
                    state.share(proposal.pairs, self._thresholds[name])
                    for dst, src, source in proposal.across:
                        lender = reading[source]
                        if lender.cache.length < src + state.arm.filter.block:
                            lender.advance(written)
                        state.share_across(dst, src, lender.arms[name])
        return [response.scores() for response in reading]

    def _plan(
        self, siblings: Sequence[Sequence[int]], prompt: int
    ) -> Mapping[tuple[int, int], Mapping[str, list[Proposal]]]:
        """What the plugin's filter proposes, by the tokens written by then and the response's index,
        and by arm."""
        found: dict[tuple[int, int], dict[str, list[Proposal]]] = defaultdict(dict)
        for arm in self._arms:
            if arm.filter is not None:
                rule = arm.filter, self._vocabulary
                for *at, proposal in proposals(*rule, siblings, prompt, arm.across):
                    found[at[0], at[1]].setdefault(arm.name, []).append(proposal)
        return found


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

# SPDX-License-Identifier: Apache-2.0
"""Feeds recorded responses to a model, editing KV in several ways (*arms*), to see how predictions change."""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eval.fidelity.arms import METRICS, Arm
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.encoders import DenseIndex, encoder
from eval.fidelity.selection import DENSE_LAYERS, ByHead, Quest
from sglang_reasoncache.cache.host_row import HostRow, Moved
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.row_state import Decision
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.request_filter import Proposal, RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances
from sglang_reasoncache.sharing.blocks import Candidate, Run
from sglang_reasoncache.sharing.nearest import nearest_pairs
from sglang_reasoncache.sharing.request import RequestRecord
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold

#: Number of tokens in one forward, and in one comparison of log-probabilities.
_CHUNK = 128
_COMPARED = 32
#: Distances that a threshold must see before it accepts a pair. An arm has one threshold for all responses.
_WARM_UP = 32
#: Difference between the first slot ids of two responses. No response has so many positions.
_FAR = 1 << 32


class ArmCache:
    """An arm's row in a response's cache, and the slots that a server would have put into this row. Until the
    first edit the arm uses row 0, which no arm edits. ``number`` differs between responses that share slots."""

    def __init__(
        self, arm: Arm, reader: Reader, cache: EditableCache, prompt: int, number: int = 0
    ) -> None:
        self.arm = arm
        self.cache = cache
        self.prompt = prompt
        self.row = 0
        self._block = arm.filter.block if arm.filter else 0
        self._first_slot = 1 + number * _FAR
        self._given_up = 0
        self._record = RequestRecord()
        self._slots = HostRow()
        self._rotation = reader.rotation
        self._gone = np.zeros(cache.visible.shape[1], dtype=bool)
        # A heap, ordered by KV distance, of accepted pairs that do not share yet.
        self._ledger: list[tuple[float, BlockPair]] = []
        self._selection: ByHead | Quest | None = None
        if arm.pool is not None:
            self._edited().rounded[self.row] = arm.pool
        if arm.by_head:
            self._selection = ByHead(reader.layers, reader.kv_heads, cache.visible.shape[1])
        elif arm.quest:
            self._selection = Quest(arm.quest, prompt)
        if self._selection is not None:
            self._edited().by_head[self.row] = self._selection.visible

    @property
    def saved(self) -> int:
        """The number of written positions that have no slot of their own. If heads read other positions: the
        mean number that a head does not read."""
        apart = 0 if self._selection is None else self._selection.saved
        return self._given_up + int(np.count_nonzero(self._gone)) + apart

    def share(self, pairs: Sequence[BlockPair], threshold: AdaptiveThreshold) -> None:
        """Add to the ledger the block pairs that the threshold accepts. Then let pairs share, smallest distance
        first, until the fraction ``need`` of the response is saved. By default ``need`` is 1, so all share."""
        # As in a server, drop a pair if its destination overlaps the destination of an earlier pair.
        pairs = [pair for pair in pairs if self._claim(pair)]
        accepted = np.ones(len(pairs), dtype=bool)
        distances = [0.0] * len(pairs)
        if pairs and (self.arm.percentile < 100 or self.arm.need < 1):
            distances = self._distances(pairs)
            if self.arm.percentile < 100:
                accepted = threshold.decide(distances)
        for entry in itertools.compress(zip(distances, pairs, strict=True), accepted):
            heapq.heappush(self._ledger, entry)
        while self._ledger and self.saved < self.arm.need * (self.cache.length - self.prompt):
            dst_start, src_start = heapq.heappop(self._ledger)[1]
            self.read(dst_start, src_start, self)

    def nearest(self, alternatives: Sequence[BlockPair]) -> list[BlockPair]:
        """The pairs that a server with ``align=nearest`` would choose: those with the least KV distance."""
        pairs = [
            pair for pair in alternatives if not self._record.overlaps(pair.dst_start, self._block)
        ]
        distances = self._distances(pairs) if pairs else []
        return [pairs[i] for i in nearest_pairs(pairs, distances)]

    def _distances(self, pairs: Sequence[BlockPair]) -> list[float]:
        """The KV distance of each pair."""
        if self.arm.metric != METRICS[0]:
            return self._apart(pairs)
        rotation = self._rotation if self.arm.corrected else None
        at = torch.tensor(pairs).T[..., None] + torch.arange(self._block)
        at = at.to(self.cache.keys.device)
        shift = None if rotation is None else (at[0] - at[1]).int()
        compared, places = at.unique(return_inverse=True)
        dst, src = places
        squares = DistanceKernel(self._layers(compared), rotation).squares(dst, src, shift)
        heads = self.cache.keys.shape[2]
        distances: list[float] = block_distances(squares, self._block, heads).tolist()
        return distances

    def _apart(self, pairs: Sequence[BlockPair]) -> list[float]:
        """Distances by the arm's ``metric``. ``cosine``: 1 - cosine of flat keys and of flat values, the mean
        of both over all layers. ``norms``: the Euclidean distance as the paper computes it from cached squared
        norms, in the dtype of the KV, in which nearly equal blocks cancel."""
        at = torch.tensor(pairs).T[..., None] + torch.arange(self._block)
        dst, src = at.to(self.cache.keys.device)
        apart = torch.zeros(len(pairs), len(self.cache.keys), 2, dtype=torch.float64)
        for part, all_ in enumerate((self.cache.keys, self.cache.values)):
            for number, layer in enumerate(all_[:, self.row]):
                later, earlier = (layer[:, places].permute(1, 2, 0, 3) for places in (dst, src))
                if all_ is self.cache.keys and self.arm.corrected:
                    earlier = self._rotation.rotate(earlier, dst - src).to(later.dtype)
                later = later.flatten(1)
                earlier = earlier.flatten(1)
                if self.arm.metric == "cosine":
                    distance = 1 - torch.cosine_similarity(later.float(), earlier.float())
                else:
                    products = [
                        (x * y).sum(-1)
                        for x, y in ((later, later), (earlier, earlier), (later, earlier))
                    ]
                    distance = (products[0] + products[1] - 2 * products[2]).clamp(min=0)
                apart[:, number, part] = distance.cpu()
        if self.arm.metric == "cosine":
            return list(apart.mean((1, 2)).tolist())
        return list(block_distances(apart, self._block, self.cache.keys.shape[2]).tolist())

    def kept(self, layer: int) -> list[torch.Tensor]:
        """For each KV head of ``layer`` the written positions that were not evicted, int64 ``[n]``."""
        gone = [self._gone] * self.cache.keys.shape[2]
        if isinstance(self._selection, ByHead):
            gone = list(self._selection.gone[layer])
        return [torch.from_numpy(np.flatnonzero(~mask[: self.cache.length])) for mask in gone]

    def _claim(self, pair: BlockPair) -> bool:
        if self._record.overlaps(pair.dst_start, self._block):
            return False
        self._record.candidates[pair.dst_start] = Candidate((Run(*pair, self._block),))
        return True

    def read(self, dst_start: int, src_start: int, lender: "ArmCache") -> None:
        """Let the block at ``dst_start`` read ``lender``'s block at ``src_start``, perhaps in another response.
        Does nothing if other responses use slots of the block at ``dst_start``, as these would not be freed."""
        lender._located(src_start)
        if not self._slots.in_other_rows.isdisjoint(self._located(dst_start)):
            return
        moves: list[Moved] = []
        self._slots.read(dst_start, src_start, self._block, lender._slots, moves)
        self._given_up += sum(bool(move.positions) for move in moves)
        reads = [
            (position, source)
            for source, move in enumerate(moves, src_start)
            for position in move.positions
        ]
        if reads:
            rotation = self._rotation if self.arm.corrected else None
            self._edited().redirect(self.row, reads, rotation, (lender.cache, lender.row))

    def _located(self, start: int) -> list[int]:
        """The slots of the block at ``start``. A position that was never redirected has a slot of its own."""
        end = start + self._block
        self._slots.locate(start, range(self._first_slot + start, self._first_slot + end))
        slots: list[int] = self._slots.between(start, end).tolist()
        return slots

    def evict(self, target: int, seed: int) -> None:
        """Evict positions by the arm's policy until ``target`` are gone, or let Quest leave out as many."""
        selection = self._selection
        if isinstance(selection, Quest):
            layers = len(self.cache.keys)
            selection.skip = round(target * layers / max(1, layers - DENSE_LAYERS))
            return
        at = torch.arange(self.cache.length, device=self.cache.keys.device)
        keys = [layer for layer, _ in self._layers(at)]
        if isinstance(selection, ByHead):
            for number, (layer, of_heads) in enumerate(zip(keys, selection.gone, strict=True)):
                for head, gone in enumerate(of_heads):
                    # A policy that draws positions draws others for each head, and the same at each call.
                    head_seed = seed + number * len(of_heads) + head
                    gone[self._lowest([layer[:, head : head + 1]], gone, target, head_seed)] = True
            return
        lowest = self._lowest(keys, self._gone, target, seed)
        if len(lowest):
            self._gone[lowest] = True
            self._edited().visible[self.row, torch.from_numpy(lowest)] = False

    def _lowest(
        self, keys: Sequence[torch.Tensor], gone: np.ndarray, target: int, seed: int
    ) -> np.ndarray:
        """The positions that the arm's policy evicts next, int64 ``[n]``, so that ``target`` positions are
        ``gone``. ``keys``: for each layer ``[positions, heads, head_dim]``."""
        written = self.cache.length
        held = np.flatnonzero(~gone[:written])
        excess = len(held) - (written - target)
        if excess <= 0:
            return held[:0]
        at = torch.arange(written, device=self.cache.keys.device)
        pool = SimpleNamespace(start_layer=0, layer_num=len(keys), get_key_buffer=keys.__getitem__)
        positions: Any = SimpleNamespace(positions=at)
        rotations = dict.fromkeys(range(len(keys)), self._rotation)
        source = KeySource(pool, at[None], positions, rotations)
        layers = source.layers(0, held, written, shifted=False)
        owned = 0 if self.arm.evictor.prompt else self.prompt
        where: Any = dict(prompt=self.prompt, written=written, owned=owned, page=1)
        view = View(
            **where,
            held=held,
            first_readers=held,
            worth=np.ones_like(held),
            seed=seed,
            layers=layers,
        )
        policy = dataclasses.replace(self.arm.evictor, budget=written - target, share=None)
        candidates = policy.candidates(view)
        if not len(candidates):
            return candidates
        return Decision(view, candidates, policy.scores(view), excess).positions(Ranks())

    def _edited(self) -> EditableCache:
        if not self.row:
            self.row = self.cache.branch()
        return self.cache

    def _layers(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer at these positions, shaped like SGLang's pool: ``[positions, heads,
        head_dim]``."""
        both = (
            [*all_[:, self.row, :, positions].transpose(1, 2).contiguous()]
            for all_ in (self.cache.keys, self.cache.values)
        )
        return list(zip(*both, strict=True))


class Replay:
    """Scores responses under all arms. Arms that evict, and Quest, save as much as the arm named ``like``."""

    def __init__(
        self, reader: Reader, vocabulary: Vocabulary, arms: Sequence[Arm], like: str
    ) -> None:
        self._reader = reader
        self._arms = arms
        self._like = like
        self._vocabulary = vocabulary
        self._classes = TokenClasses(vocabulary)
        self._encoders = {arm.encoder: encoder(arm.encoder, reader) for arm in arms if arm.encoder}
        self._thresholds = {arm.name: AdaptiveThreshold(arm.percentile, _WARM_UP) for arm in arms}

    def scores(self, tokens: Sequence[int], prompt: int) -> dict[str, dict[str, float]]:
        """Figures of ``dense`` (no edits) and of each arm, over the tokens after the prompt: ``saved``, the
        share of positions without a slot of their own at the end; ``nll`` and ``kl`` (dense || arm), means over
        tokens in nats; ``top1``, the share of tokens where dense and the arm predict the same token."""
        cache = self._reader.cache(1 + len(self._arms), len(tokens))
        states = {arm.name: ArmCache(arm, self._reader, cache, prompt) for arm in self._arms}
        sums = torch.zeros(1 + len(states), 3, dtype=torch.float64)
        plan = self._plan(tokens, prompt)
        for written in sorted({*plan, len(tokens)}):
            for start in range(cache.length, written, _CHUNK):
                stop = min(start + _CHUNK, written)
                logits = self._reader.forward(cache, tokens[start:stop])
                first = max(start, prompt - 1)
                figures = compare(logits[:, first - start :], tokens[first + 1 : stop + 1])
                sums += figures[[0, *(state.row for state in states.values())]]
            proposed = plan.get(written, {})
            for name, state in states.items() if proposed else ():
                if state.arm.follows:
                    state.evict(states[self._like].saved, sum(tokens[:prompt]))
                for proposal in proposed.get(name, ()):
                    for alternatives in proposal.alternatives:
                        state.share(state.nearest(alternatives), self._thresholds[name])
                    state.share(proposal.pairs, self._thresholds[name])
        saved = torch.tensor([0, *(state.saved for state in states.values())])
        columns = torch.cat((saved[:, None], sums), dim=1) / (len(tokens) - prompt)
        return {
            name: dict(zip(("saved", "nll", "kl", "top1"), row, strict=True))
            for name, row in zip(("dense", *states), columns.tolist(), strict=True)
        }

    def _plan(
        self, tokens: Sequence[int], prompt: int
    ) -> Mapping[int, Mapping[str, list[Proposal]]]:
        """What each arm's filter proposes, by number of tokens written at that time and by arm."""
        plan: dict[int, dict[str, list[Proposal]]] = defaultdict(dict)
        for arm in self._arms:
            if arm.filter is None:
                continue
            history = None
            if arm.encoder:
                sizes = arm.filter.max_history_steps, arm.filter.length_factor
                history = DenseIndex(self._encoders[arm.encoder], *sizes)
            request = RequestFilter(
                arm.filter,
                self._classes,
                self._vocabulary,
                prompt,
                prompt=tokens[:prompt] if arm.filter.reads_prompt else (),
                history=history,
            )
            for at in range(prompt, len(tokens)):
                for proposal in request.push(tokens[at : at + 1]):
                    if proposal.pairs or proposal.alternatives:
                        plan[at + 1].setdefault(arm.name, []).append(proposal)
        return plan


def compare(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Returns float64 ``[rows, 3]``: sums over tokens of NLL, KL(row 0 || row) and top-1 agreement with row 0.
    ``logits``, ``[rows, tokens, vocabulary]``, are the predictions of ``targets``."""
    sums = torch.zeros(len(logits), 3, dtype=torch.float64)
    for at in range(0, len(targets), _COMPARED):
        some = torch.tensor(targets[at : at + _COMPARED], device=logits.device)
        log_p = logits[:, at : at + len(some)].float().log_softmax(-1)
        nll = -log_p[:, torch.arange(len(some), device=some.device), some].sum(-1)
        kl = (log_p[0].exp() * (log_p[0] - log_p)).sum((1, 2))
        same = (log_p.argmax(-1) == log_p[0].argmax(-1)).sum(-1)
        sums += torch.stack((nll, kl, same), dim=-1).double().cpu()
    return sums

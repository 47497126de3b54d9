# SPDX-License-Identifier: Apache-2.0
"""A *repair* recomputes some tokens of cached documents that a prompt uses at new positions.

SGLang is told that the cached prefix is shorter by the number of recomputed tokens. So SGLang allocates new
slots for that many tokens and runs an ordinary prefill. Before the forward, the recomputed tokens are *placed*:
they become the first tokens of that prefill, and the row's entries at their positions name the new slots. Each
token reads the row's entries up to its own position. Before SGLang frees the row, the new slots are written
back to the entries where SGLang put them. If placing fails on any rank, SGLang recomputes the last tokens of
the prefix instead."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.composition import NO_POSITIONS, CachedDocuments, Composition, marked
from sglang_reasoncache.compat.types import Request, ScheduleBatch
from sglang_reasoncache.custom_params import Repair, only_scores
from sglang_reasoncache.device.ranks import RankFailed, Ranks
from sglang_reasoncache.device.upload import upload

#: Scores (how much the text after the documents attends to each position) are kept for at most _MOST_PROMPTS
#: prompts and _MOST_TOKENS tokens in all. A prompt whose scores were dropped is served without its repair.
_MOST_PROMPTS = 1024
_MOST_TOKENS = 1 << 24


class Repaired(NamedTuple):
    """What the newest prefill recomputes for one request, and the request's scores.

    Attributes:
        number: Index of the request in the batch.
        token: Index in the batch of the request's first new token. The request has ``new`` new tokens.
        positions: Positions of the first ``n`` new tokens, int64 ``[n]``. Other new tokens follow the prefix.
        least: At least this many entries are read, because SGLang's row length may not reach all ``positions``.
        received: Scores, fp32 ``[length]`` on the device. Attention adds to each position's score how much
            the new tokens attend to the position. None if the request is not scored.
    """

    number: int
    token: int
    new: int
    positions: np.ndarray
    least: int
    received: torch.Tensor | None


class RepairedRow:
    """A request's row up to the end of its composed documents.

    Args:
        slots: The entries, int32 or int64 ``[length]`` on the device.
        start: The first position where SGLang puts a recomputed token's slot.
    """

    def __init__(self, slots: torch.Tensor, start: int) -> None:
        self._slots = slots
        self._start = start
        self._new_slots: list[torch.Tensor] = []

    def placed(
        self, row: torch.Tensor, start: int, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new entries of ``row``, int32 ``[width]``, and the ``n`` slots that SGLang put there from
        ``start`` on. The new entries at ``positions``, int64 ``[n]``, are these slots. Writes nothing."""
        new_slots = row[start : start + len(positions)].clone()
        slots = self._slots.to(row.dtype, copy=True)
        slots[upload(positions, row.device)] = new_slots
        return slots, new_slots

    def place(self, row: torch.Tensor, slots: torch.Tensor, new_slots: torch.Tensor) -> None:
        """Write ``slots`` to the start of ``row`` and remember ``new_slots``. :meth:`placed` returned both, and
        allocated all that is needed."""
        row[: len(slots)] = slots
        self._slots = slots
        self._new_slots.append(new_slots)

    def restore(self, row: torch.Tensor) -> None:
        """Before SGLang frees ``row``, write the slots of the recomputed tokens where SGLang had put them."""
        new_slots = torch.cat(self._new_slots)
        row[self._start : self._start + len(new_slots)] = new_slots


def ends_of(ends: Sequence[int], first: int, last: int = 0) -> np.ndarray:
    """The ``first`` and the ``last`` positions of every document but the first, int64 ``[n]``, ascending.
    ``ends``: the position behind each document."""
    parts = [
        np.arange(start, stop)
        for a, b in pairwise(ends)
        for start, stop in ((a, min(a + first, b)), (max(a + first, b - last), b))
    ]
    return np.concatenate((NO_POSITIONS, *parts))


def highest_of(scores: torch.Tensor, count: int) -> np.ndarray:
    """Indexes of the ``count`` highest ``scores``, fp32 ``[n]`` in host memory: int64, ascending."""
    return np.sort(scores.topk(min(count, len(scores))).indices.numpy())


class Repairs:
    """The repairs of all requests in a scheduler process."""

    def __init__(self) -> None:
        # A request's index in the batch and its id -> what the newest prefill recomputes and scores for it.
        # Several requests may have one id: HTTP processes do not know each other's ids.
        self._prepared: dict[tuple[int, str], Repaired] = {}
        # Key of a prompt (:func:`_key`) -> its scores, entered at the last chunk of the prompt.
        self._scores: OrderedDict[Any, torch.Tensor] = OrderedDict()
        # Whether placing failed. Then nothing is placed until the cache is flushed.
        self._failed = False

    def choose(self, req: Request, prefix: Composition, ranks: Ranks) -> np.ndarray:
        """The positions to compute again, int64 ``[n]`` ascending. A repair by attention (``share``) chooses no
        positions until a scoring request (``max_new_tokens`` 0) has computed scores for this prompt."""
        documents = prefix.documents
        end = prefix.length
        repair = prefix.documents.repair
        if self._failed or not (repair.first or (repair.share and not only_scores(req))):
            return NO_POSITIONS
        marks = _marks_of(req)
        # The choice is kept, because SGLang matches waiting requests often.
        known, chosen = marks.chosen
        if known == end and marks.chosen_by is self:
            return chosen
        if repair.first:
            read = documents.ends[: len(prefix.nodes)]
            return self._keep(marks, end, ends_of(read, repair.first, repair.last))
        scores = self._scores.get(_key(req, prefix, marks)) if self._scores else None
        if scores is None or len(scores) < end:
            return NO_POSITIONS
        # The scores are complete if the scoring request has ended. The server's main process waits for that.
        first = documents.ends[0]
        seen = scores[first:end].cpu()
        try:
            ranks.add(seen)
        except RankFailed:  # on every rank alike
            return NO_POSITIONS
        count = round(repair.share * (end - documents.start))
        return self._keep(marks, end, highest_of(seen, count) + first)

    def _keep(self, marks: CachedDocuments, end: int, positions: np.ndarray) -> np.ndarray:
        marks.chosen = (end, positions)
        marks.chosen_by = self
        return positions

    def begin(self, batch: ScheduleBatch) -> bool:
        """Forget what the prefill before computed again. Whether this prefill needs :meth:`prepare`: the result
        is the same on all ranks."""
        # Otherwise a later request with the same id, index and number of tokens would be taken for that one.
        self._prepared = {}
        return any(isinstance(req.last_node, Composition) for req in batch.reqs)

    def prepare(self, batch: ScheduleBatch, ranks: Ranks) -> None:
        """Before a prefill, place the tokens to recompute, and choose the requests whose attention is scored.
        Either all ranks do this or none does, because all must compute the same tokens."""
        self._prepared = {}
        token = 0
        if self._failed:
            return
        # Stays True if anything below raises. Then nothing is placed, and SGLang computes an ordinary prefill.
        self._failed = True
        prepared = dict[tuple[int, str], Repaired]()
        work = list[Callable[[], None]]()
        for number, (req, count) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
            prefix = req.last_node
            if isinstance(prefix, Composition):
                positions = self._positions(req, prefix, count)
                received = self._scores_of(req, prefix, batch.device)
                if received is not None and req.prefix_len + count == len(req.origin_input_ids):
                    work.append(partial(self._publish, req, prefix, received))
                if len(positions):
                    work.append(self._placing(batch, req, prefix, token, positions))
                what = positions, prefix.length if len(positions) else 0, received
                prepared[number, req.rid] = Repaired(number, token, count, *what)
            token += count
        ranks.agree()
        with ranks.agreed():
            for place in work:
                place()
        self._prepared = prepared
        self._failed = False

    def of(self, rids: Sequence[str], counts: Sequence[int]) -> list[Repaired]:
        """What was prepared for the requests ``rids``. A request is left out if it was prepared at another
        index or with another number of new tokens (``counts``). SGLang may pad ``counts``."""
        prepared = (self._prepared.get(place) for place in enumerate(rids))
        return [
            each
            for each, count in zip(prepared, counts, strict=False)
            if each is not None and each.new == count
        ]

    def _positions(self, req: Request, prefix: Composition, count: int) -> np.ndarray:
        """The positions to recompute among a request's next ``count`` new tokens, int64 ``[n]``."""
        start = req.prefix_len - prefix.kept
        return NO_POSITIONS if prefix.repaired is None else prefix.again[start : start + count]

    def _placing(
        self,
        batch: ScheduleBatch,
        req: Request,
        prefix: Composition,
        token: int,
        positions: np.ndarray,
    ) -> Callable[[], None]:
        """Do the part of placing ``positions`` that may fail. The returned function does the rest."""
        ids = torch.tensor([req.full_untruncated_fill_ids[at] for at in positions.tolist()])
        index = req.kv.req_pool_idx
        repaired = prefix.repaired
        assert repaired is not None
        row = batch.req_to_token_pool.req_to_token[index]
        slots, new_slots = repaired.placed(row, req.prefix_len, positions)
        known = batch.tree_cache.token_to_kv_pool_allocator.row_of(index)
        tokens = batch.prefill_input_ids_cpu

        def place() -> None:
            repaired.place(row, slots, new_slots)
            known.repaired = repaired
            tokens[token : token + len(ids)] = ids

        return place

    def _scores_of(self, req: Request, prefix: Composition, device: Any) -> torch.Tensor | None:
        """The scores of a request so far, fp32 ``[length]``. None if the request is not scored."""
        if not prefix.documents.repair.share or not only_scores(req):
            return None
        marks = _marks_of(req)
        if req.prefix_len == prefix.length or marks.scores is None:
            # This is the first chunk of the prompt, perhaps computed again after a retraction.
            marks.scores = torch.zeros(prefix.length, device=device)
        return marks.scores

    def _publish(self, req: Request, prefix: Composition, received: torch.Tensor) -> None:
        """Keep the scores of ``req`` for later requests. Called for the prompt's last chunk."""
        marks = _marks_of(req)
        key = _key(req, prefix, marks)
        kept = self._scores
        kept[key] = received
        kept.move_to_end(key)
        while len(kept) > _MOST_PROMPTS or (
            sum(map(len, kept.values())) > _MOST_TOKENS and len(kept) > 1
        ):
            kept.popitem(last=False)


def missed(req: Request, prefix: Composition) -> bool:
    """Whether ``req`` asked for a repair, but ``prefix`` gets none. False for a scoring request."""
    wants_repair = prefix.documents.repair != Repair() and not only_scores(req)
    return wants_repair and not len(prefix.again)


def _marks_of(req: Request) -> CachedDocuments:
    """What a request with a composed prefix marks."""
    marks = marked(req)
    assert marks is not None, "only a request that marks documents has a composed prefix"
    return marks


def _key(req: Request, prefix: Composition, marks: CachedDocuments) -> Any:
    """Key of a prompt's scores: all that they depend on. Digests stand for what clients send to save memory."""
    if marks.digest is None:
        marks.digest = hashlib.sha256(array("q", req.origin_input_ids)).digest()
    tokens = marks.digest
    names = hashlib.sha256(repr((req.extra_key, req.cache_salt)).encode()).digest()
    return tokens, names, req.lora_id, prefix.documents

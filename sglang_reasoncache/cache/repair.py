# SPDX-License-Identifier: Apache-2.0
"""Computes tokens of moved documents again, at their places, in slots of the request.

SGLang sees an ordinary prefill behind a prefix that is shorter by the number of these tokens. Before the
forward they take the first places of the prefill: their ids, positions and slots in the row. Each reads
the entries up to its own position. At the end the row names their slots where SGLang frees them. If
anything here fails on any rank, SGLang computes the last tokens of the prefix again instead.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.composition import NO_POSITIONS, Composition
from sglang_reasoncache.cache.ranks import RankFailed, Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import Request, ScheduleBatch

#: Tokens of prompts whose scores are kept. Who waits behind more than these is served without its repair.
_MOST_SCORED = 1 << 24


class Repaired(NamedTuple):
    """What the newest prefill does for a request.

    Attributes:
        number: The request's in the batch.
        token: Its first token in the batch, which has ``new`` of them.
        positions: Where its first tokens stand, int64 ``[n]``. The others follow the row's prefix.
        least: Positions that the row has at least.
        received: fp32 ``[length]`` on the device. Attention adds to each position how much the tokens attend
            to it. None: it is not asked.
    """

    number: int
    token: int
    new: int
    positions: np.ndarray
    least: int
    received: torch.Tensor | None


class RepairedRow:
    """The entries of the base and the composed documents in a request's row: ``slots``, int64 ``[length]``
    on the device."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._own: list[torch.Tensor] = []

    def placed(
        self, row: torch.Tensor, start: int, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries once ``positions``, int64 ``[n]``, name the slots that SGLang put into ``row``, int32
        ``[width]``, from ``start`` on; and these slots."""
        own = row[start : start + len(positions)].to(torch.int64)
        slots = self._slots.clone()
        slots[upload(positions, row.device)] = own
        return slots, own

    def place(self, row: torch.Tensor, slots: torch.Tensor, own: torch.Tensor) -> None:
        """Take over what :meth:`placed` gave."""
        row[: len(slots)] = slots
        self._slots = slots
        self._own.append(own)

    def restore(self, row: torch.Tensor, start: int) -> None:
        """Have ``row`` name the request's own slots where SGLang put them: from ``start`` on."""
        own = torch.cat(self._own)
        row[start : start + len(own)] = own


def heads_of(ends: Sequence[int], count: int) -> np.ndarray:
    """The first ``count`` positions of each document but the first, int64 ``[n]``. ``ends``: the position
    behind each."""
    heads = (range(a, min(a + count, b)) for a, b in pairwise(ends))
    return np.fromiter(chain.from_iterable(heads), dtype=np.int64)


def highest_of(scores: torch.Tensor, count: int) -> np.ndarray:
    """Where the ``count`` highest of ``scores``, fp32 ``[n]`` in host memory, are, or all; int64, ascending."""
    return np.sort(scores.topk(min(count, len(scores))).indices.numpy())


class Repairs:
    """The repairs of a scheduler process."""

    def __init__(self) -> None:
        # By request id, of the newest prefill.
        self._prepared: dict[str, Repaired] = {}
        # By index in ``req_to_token``: the row, and where SGLang takes its repaired entries to be.
        self._rows: dict[int, tuple[RepairedRow, int]] = {}
        # By request id, until the last chunk of its prompt.
        self._scoring: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._scores: OrderedDict[Any, torch.Tensor] = OrderedDict()
        self._chosen: OrderedDict[Any, np.ndarray] = OrderedDict()
        # Placing failed; nothing is placed until the cache is flushed.
        self._failed = False

    def choose(self, req: Request, prefix: Composition, ranks: Ranks) -> np.ndarray:
        """The positions to compute again, int64 ``[n]`` ascending. For a share of what the query attends
        to: none until a request that only scores has been prefilled."""
        documents, end, repair = prefix.documents, prefix.length, prefix.documents.repair
        if self._failed:
            return NO_POSITIONS
        if repair.first:
            return heads_of(documents.ends[: len(prefix.nodes)], repair.first)
        if not repair.share or _only_scores(req):
            return NO_POSITIONS
        key = _key(req, prefix)
        scores = self._scores.get(key)
        if scores is None or len(scores) < end:
            return NO_POSITIONS
        # A request is matched again at every step that it waits.
        if (key, end) not in self._chosen:
            # The forward that wrote the scores ended before its request was answered.
            first = documents.ends[0]
            seen = scores[first:end].cpu()
            try:
                ranks.add(seen)
            except RankFailed:  # on every rank alike
                return NO_POSITIONS
            count = round(repair.share * (end - documents.start))
            _keep(self._chosen, (key, end), highest_of(seen, count) + first)
        return self._chosen[key, end]

    @staticmethod
    def concerns(batch: ScheduleBatch) -> bool:
        """Whether a prefill needs :meth:`prepare`. Ranks agree."""
        return any(isinstance(req.last_node, Composition) for req in batch.reqs)

    def prepare(self, batch: ScheduleBatch, ranks: Ranks) -> None:
        """Before a prefill: place what is computed again, and choose whose attention is scored. All ranks
        do, or none: they compute one sequence of tokens."""
        self._prepared, token = {}, 0
        if self._failed:
            return
        # A row of which a part was not placed is SGLang's from there on.
        self._failed = True
        prepared, work = dict[str, Repaired](), list[Callable[[], None]]()
        for number, (req, count) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
            prefix = req.last_node
            if isinstance(prefix, Composition):
                positions = self._positions(req, prefix, count)
                received = self._scores_of(req, prefix, batch.device)
                if received is not None and req.prefix_len + count == len(req.origin_input_ids):
                    work.append(partial(self._publish, req, prefix))
                if len(positions):
                    work.append(self._placing(batch, req, prefix, token, positions))
                what = positions, prefix.length if len(positions) else 0, received
                prepared[req.rid] = Repaired(number, token, count, *what)
            token += count
        ranks.agree()
        for place in work:
            place()
        self._prepared, self._failed = prepared, False

    def of(self, rids: Sequence[str], counts: Sequence[int]) -> list[Repaired]:
        """For a forward of requests ``rids`` with so many new tokens each: what it does for some of them.
        SGLang may pad ``counts``."""
        found = (self._prepared.get(rid) for rid in rids)
        return [
            each
            for number, (each, count) in enumerate(zip(found, counts, strict=False))
            if each is not None and (each.number, each.new) == (number, count)
        ]

    def _positions(self, req: Request, prefix: Composition, count: int) -> np.ndarray:
        """Where the first of a request's ``count`` new tokens stand."""
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
        """What places ``positions``, all of which may fail done."""
        ids = torch.tensor([req.full_untruncated_fill_ids[at] for at in positions.tolist()])
        index, repaired = req.kv.req_pool_idx, prefix.repaired
        assert repaired is not None
        row = batch.req_to_token_pool.req_to_token[index]
        slots, own = repaired.placed(row, req.prefix_len, positions)
        tokens = batch.prefill_input_ids_cpu

        def place() -> None:
            repaired.place(row, slots, own)
            self._rows[index] = repaired, prefix.kept
            tokens[token : token + len(ids)] = ids

        return place

    def restore(self, index: int, rows: torch.Tensor) -> None:
        """A request is about to give its row back. ``rows``: int32 ``[num_rows, width]``."""
        if index in self._rows:
            repaired, start = self._rows[index]
            repaired.restore(rows[index], start)
            del self._rows[index]

    def _scores_of(self, req: Request, prefix: Composition, device: Any) -> torch.Tensor | None:
        """To which the attention of a request is added, if it only scores."""
        if not prefix.documents.repair.share or not _only_scores(req):
            return None
        if req.prefix_len == prefix.length or req.rid not in self._scoring:
            # Its first chunk, perhaps for the second time: it was retracted.
            _keep(self._scoring, req.rid, torch.zeros(prefix.length, device=device))
        return self._scoring[req.rid]

    def _publish(self, req: Request, prefix: Composition) -> None:
        """Others see the scores of a request from the last chunk of its prompt on."""
        key = _key(req, prefix)
        for known in [known for known in self._chosen if known[0] == key]:
            del self._chosen[known]
        _keep(self._scores, key, self._scoring.pop(req.rid))


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while sum(map(len, kept.values())) > _MOST_SCORED and len(kept) > 1:
        kept.popitem(last=False)


def _only_scores(req: Request) -> bool:
    return bool(req.sampling_params.max_new_tokens == 0)


def _key(req: Request, prefix: Composition) -> Any:
    """What the attention to a prompt depends on, and the choice by it."""
    tokens = array("q", req.origin_input_ids).tobytes()
    return tokens, req.extra_key, req.cache_salt, req.lora_id, prefix.documents

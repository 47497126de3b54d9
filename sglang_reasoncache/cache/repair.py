# SPDX-License-Identifier: Apache-2.0
"""Computes tokens of moved documents again, at their places, in slots of the request.

SGLang sees an ordinary prefill behind a prefix that is shorter by the number of these tokens. Before the
forward they take the first places of the prefill: their ids, positions and slots in the row. Each reads
the entries up to its own position. At the end the row names their slots where SGLang frees them. If
anything here fails, SGLang computes the last tokens of the prefix again instead, which is as well.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.composition import NO_POSITIONS, Composition
from sglang_reasoncache.cache.ranks import RankFailed, Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import Request, ScheduleBatch

#: Most prompts whose scores are kept.
_MOST_SCORED = 64


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

    def place(self, row: torch.Tensor, start: int, positions: np.ndarray) -> None:
        """Have ``positions``, int64 ``[n]``, name the slots that SGLang put into ``row``, int32 ``[width]``,
        from ``start`` on."""
        own = row[start : start + len(positions)].to(torch.int64)
        slots = self._slots.clone()
        slots[upload(positions, row.device)] = own
        row[: len(slots)] = slots.to(row.dtype)
        self._slots = slots
        self._own.append(own)

    def restore(self, row: torch.Tensor, start: int) -> None:
        """Have ``row`` name the request's own slots where SGLang put them: from ``start`` on."""
        own = torch.cat(self._own)
        row[start : start + len(own)] = own.to(row.dtype)


class Repairs:
    """The repairs of a scheduler process."""

    def __init__(self) -> None:
        # By request id, of the newest prefill.
        self._prepared: dict[str, Repaired] = {}
        # By index in ``req_to_token``: the row, and where SGLang takes its repaired entries to be.
        self._rows: dict[int, tuple[RepairedRow, int]] = {}
        self._scores: OrderedDict[Any, torch.Tensor] = OrderedDict()

    def choose(self, req: Request, prefix: Composition, ranks: Ranks) -> np.ndarray:
        """The positions to compute again, int64 ``[n]`` ascending. For a share of what the query attends
        to: none until a request that only scores has been prefilled."""
        documents, end, repair = prefix.documents, prefix.length, prefix.documents.repair
        if repair.first:
            moved = pairwise(documents.ends[: len(prefix.nodes)])
            heads = [np.arange(a, min(a + repair.first, b)) for a, b in moved]
            return np.concatenate(heads).astype(np.int64)
        scores = self._scores.get(_prompt(req)) if repair.share and not _only_scores(req) else None
        if scores is None or len(scores) < end:
            return NO_POSITIONS
        # The forward that wrote them ended before its request was answered.
        first = documents.ends[0]
        seen = scores[first:end].cpu()
        try:
            ranks.add(seen)
        except RankFailed:  # on every rank alike
            return NO_POSITIONS
        count = min(round(repair.share * (end - documents.start)), len(seen))
        return np.sort(seen.topk(count).indices.numpy()) + first

    def prepare(self, batch: ScheduleBatch) -> None:
        """Before a prefill: place what is computed again, and choose whose attention is scored."""
        self._prepared, token = {}, 0
        for number, (req, count) in enumerate(zip(batch.reqs, batch.extend_lens, strict=True)):
            prefix = req.last_node
            if isinstance(prefix, Composition):
                positions, received = self._place(batch, req, prefix, token, count), None
                if prefix.documents.repair.share and _only_scores(req):
                    received = self._scores_of(req, prefix.length, batch.device)
                what = positions, prefix.length if len(positions) else 0, received
                self._prepared[req.rid] = Repaired(number, token, count, *what)
            token += count

    def of(self, rids: Sequence[str], counts: Sequence[int]) -> list[Repaired]:
        """For a forward of requests ``rids`` with so many new tokens each: what it does for some of them."""
        found = (self._prepared.get(rid) for rid in rids)
        return [
            each
            for number, (each, count) in enumerate(zip(found, counts, strict=True))
            if each is not None and (each.number, each.new) == (number, count)
        ]

    def _place(
        self, batch: ScheduleBatch, req: Request, prefix: Composition, token: int, count: int
    ) -> np.ndarray:
        """Returns the positions of the request's first tokens."""
        start = req.prefix_len - prefix.kept
        positions = prefix.again[start : start + count]
        if prefix.repaired is None or not len(positions):
            return NO_POSITIONS
        ids = torch.tensor([req.full_untruncated_fill_ids[at] for at in positions.tolist()])
        index = req.kv.req_pool_idx
        prefix.repaired.place(
            batch.req_to_token_pool.req_to_token[index], req.prefix_len, positions
        )
        self._rows[index] = prefix.repaired, prefix.kept
        batch.prefill_input_ids_cpu[token : token + len(ids)] = ids
        return positions

    def restore(self, index: int, rows: torch.Tensor) -> None:
        """A request is about to give its row back. ``rows``: int32 ``[num_rows, width]``."""
        if index in self._rows:
            repaired, start = self._rows.pop(index)
            repaired.restore(rows[index], start)

    def _scores_of(self, req: Request, length: int, device: Any) -> torch.Tensor:
        key = _prompt(req)
        if req.prefix_len == length or key not in self._scores:
            self._scores[key] = torch.zeros(length, device=device)
            self._scores.move_to_end(key)
            if len(self._scores) > _MOST_SCORED:
                self._scores.popitem(last=False)
        return self._scores[key]


def _only_scores(req: Request) -> bool:
    return bool(req.sampling_params.max_new_tokens == 0)


def _prompt(req: Request) -> Any:
    """What the KV of a prompt depends on."""
    tokens = array("q", req.origin_input_ids).tobytes()
    return tokens, req.extra_key, req.cache_salt, req.lora_id

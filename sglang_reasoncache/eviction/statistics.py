# SPDX-License-Identifier: Apache-2.0
"""How much weight queries gave to the positions of each row, noted while attention runs.

Per position, not per slot: two positions that share a slot have a weight each. Weights are
summed over query heads and layers. Nothing here moves when a row does: a row that is built
anew starts anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import Observation
from sglang_reasoncache.kernels.plan import RowPlan

#: Of a call that computes weights of a prompt's queries: 64 MiB of logits under 32 heads.
_ENTRIES = 1 << 19


class _Row:
    """Weights of one request's row.

    Attributes:
        generation: Of the row, by SGLang's count of requests that got it.
        first, covered: Queries at positions ``[first, covered)`` were observed, one by one.
        latest: fp32 ``[queries, positions]``: place ``query % queries`` has its weights; None
            where nobody reads them.
        total: fp32 ``[positions]``, or None; 0 behind ``covered``.
    """

    def __init__(self, generation: int, wanted: Observation) -> None:
        self.generation = generation
        self.first = self.covered = 0
        self.latest = allocated(wanted.latest, 0) if wanted.latest else None
        self.total = allocated(0) if wanted.total else None

    def reserve(self, positions: int) -> None:
        """Have room for as many; what is new of ``latest`` is not cleared."""
        # Each place is cleared for as many positions as come before it is written again.
        if self.latest is not None and self.latest.shape[1] < positions + len(self.latest):
            grown = allocated(len(self.latest), positions + positions // 2 + len(self.latest))
            grown[:, : self.latest.shape[1]] = self.latest
            self.latest = grown
        if self.total is not None and len(self.total) < positions:
            grown = allocated(positions + positions // 2)
            grown[len(self.total) :] = 0
            grown[: len(self.total)] = self.total
            self.total = grown

    def add(self, weights: torch.Tensor, seen: int) -> None:
        """``weights``: ``[queries, positions]`` of consecutive queries, the last of which saw
        ``seen`` positions."""
        weights = weights[:, :seen]
        if self.total is not None:
            self.total[:seen] += weights[0] if len(weights) == 1 else weights.sum(dim=0)
        if self.latest is not None:
            kept = len(self.latest)
            newest = weights[-kept:]
            # Slices, not indices: this is done for every request in every decode step.
            for query in range(len(newest)):
                place = self.latest[(seen - len(newest) + query) % kept]
                place[:seen] = newest[query]
                place[seen : seen + kept] = 0


def allocated(*shape: int) -> torch.Tensor:
    """fp32, not cleared.

    Raises:
        MemoryError: there is none, and who asks for so much.
    """
    try:
        return torch.empty(shape)
    except RuntimeError as error:
        count = 4 * math.prod(shape)
        raise MemoryError(f"no {count} bytes for attention statistics of a request") from error


@dataclass
class Observed:
    """Queries of one forward whose weights are noted. Every layer adds to ``weights``.

    Attributes:
        weights: fp32, one for each entry of the first query, then of the next, and so on.
        tokens: int64, which tokens of the batch they are; None: all, each over its row.
        spans: int32 ``[queries]`` each, begin and end of their entries; None with ``tokens``.
        rows: Rows, and how many consecutive queries of each.
        seen: int64 ``[queries]``, positions up to and including their own.
        held: bool ``[queries, positions]``, which positions the entries belong to.
    """

    weights: torch.Tensor
    tokens: torch.Tensor | None
    spans: tuple[torch.Tensor, torch.Tensor] | None
    rows: list[tuple[_Row, int]]
    seen: torch.Tensor
    held: torch.Tensor

    def parts(
        self,
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """``tokens``, ``spans`` and ``weights`` of some queries at a time: a call keeps the logits
        of all its entries."""
        assert self.tokens is not None and self.spans is not None, "of a prefill"
        begin, end = self.spans
        first = at = 0
        for stop, entries in enumerate((end - begin).cumsum(0).tolist(), 1):
            if entries - at < _ENTRIES and stop < len(begin):
                continue
            some = slice(first, stop)
            yield self.tokens[some], (begin[some], end[some]), self.weights[at:entries]
            first, at = stop, entries


class AttentionStatistics:
    """One per attention backend, in host memory.

    ``4 * (wanted.latest + wanted.total)`` bytes for each position of a request, and half as much
    again for those to come. A row's memory is given back when another request gets the row.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        generations: int64 ``[max_requests]``, counts the requests that got each row
            (``req_generation``).
        wanted: What the policies read.

    Raises:
        MemoryError: there is no memory for a request of the whole context.
    """

    def __init__(self, rows: torch.Tensor, generations: torch.Tensor, wanted: Observation) -> None:
        self._rows = rows
        self._generations = generations
        self._wanted = wanted
        allocated(wanted.latest + wanted.total, rows.shape[1])
        self._of: dict[int, _Row] = {}
        self._pending: Observed | None = None

    def observe(
        self,
        plan: RowPlan,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        new: Sequence[int] | None = None,
    ) -> Observed | None:
        """Begin a forward; None where no query of it is observed.

        Args:
            plan: Entries in order of positions.
            requests, lengths: int ``[batch]``, rows and their positions, new ones included.
            new: New tokens of each request; None: one each (decode).
        """
        self._settle()
        if new is not None:
            return self._observe_prompts(plan, requests, lengths, new)
        rows = [
            self._begin(row, length, 1, decodes=True)
            for row, length in zip(requests.tolist(), lengths.tolist(), strict=True)
        ]
        # SGLang counts its lengths up in place, before the weights are looked at.
        requests = requests.to(torch.int64, copy=True)
        lengths = lengths.to(torch.int64, copy=True)
        return self._observed(plan.kv_indices.shape[0], None, None, rows, requests, lengths)

    def _begin(
        self, row: int, length: int, count: int, *, decodes: bool = False
    ) -> tuple[_Row, int]:
        """A row that gets ``count`` positions, up to ``length``; and how many of their queries,
        the last ones, are observed."""
        generation = int(self._generations[row])
        known = self._of.get(row)
        if known is None or known.generation != generation:
            known = self._of[row] = _Row(generation, self._wanted)
        follows = known.covered > 0 and length - count == known.covered
        # One position that follows may be a decoding request's, in a batch with prompts.
        decodes |= count == 1 and follows
        observed = 1 if decodes else min(count, self._wanted.prompt)
        if not (follows and observed == count):
            known.first = length - observed
            if known.total is not None:
                known.total.zero_()
        known.covered = length
        known.reserve(length)
        return known, observed

    def _observe_prompts(
        self, plan: RowPlan, requests: torch.Tensor, lengths: torch.Tensor, new: Sequence[int]
    ) -> Observed | None:
        """The last queries of each chunk; a decoding request's only one under mixed chunk."""
        bounds = plan.kv_indptr.tolist()
        tokens: list[int] = []
        rows: list[tuple[_Row, int]] = []
        of: list[int] = []
        seen: list[int] = []
        begins: list[int] = []
        ends: list[int] = []
        at = 0
        for b, (row, length, count) in enumerate(
            zip(requests.tolist(), lengths.tolist(), new, strict=True)
        ):
            known, observed = self._begin(row, length, count)
            if observed:
                rows.append((known, observed))
            for left in range(observed - 1, -1, -1):
                tokens.append(at + count - 1 - left)
                of.append(row)
                seen.append(length - left)
                begins.append(bounds[b])
                ends.append(bounds[b + 1] - left)
            at += count
        if not tokens:
            return None
        spans = torch.tensor(begins, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        return self._observed(
            int((spans[1] - spans[0]).sum()),
            torch.tensor(tokens),
            spans,
            rows,
            torch.tensor(of),
            torch.tensor(seen),
        )

    def _observed(
        self,
        entries: int,
        tokens: torch.Tensor | None,
        spans: tuple[torch.Tensor, torch.Tensor] | None,
        rows: list[tuple[_Row, int]],
        requests: torch.Tensor,
        seen: torch.Tensor,
    ) -> Observed:
        # Now, as the plan: rows may change before the weights are there.
        most = int(seen.max()) if len(seen) else 0
        held = self._rows[requests, :most] >= 0
        held &= torch.arange(most) < seen[:, None]
        self._pending = Observed(torch.zeros(entries), tokens, spans, rows, seen, held)
        return self._pending

    def _settle(self) -> None:
        """Bring the last forward's weights to the rows."""
        done, self._pending = self._pending, None
        if done is None:
            return
        weights = torch.zeros(done.held.shape).masked_scatter_(done.held, done.weights)
        seen, at = done.seen.tolist(), 0
        for row, count in done.rows:
            row.add(weights[at : at + count], seen[at + count - 1])
            at += count

    def _known(self, row: int) -> _Row | None:
        """What was noted of the request that has the row; None: nothing."""
        self._settle()
        known = self._of.get(row)
        if known is None or known.generation != int(self._generations[row]):
            return None
        return known

    def total(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """fp64 ``[positions]``: weights by all queries since the end of the prompt's last chunk,
        and by the last ``Observation.prompt`` ones of that.

        ``positions``: int64, held ones. What a policy's needs did not announce is a LookupError.
        """
        if not self._wanted.total:
            raise LookupError("no policy announced that it reads total weights")
        known = self._known(row)
        if known is None or known.total is None:
            return torch.zeros(len(positions), dtype=torch.float64)
        return known.total[positions].double()

    def latest(self, row: int, positions: torch.Tensor, queries: int) -> torch.Tensor:
        """fp64 ``[positions]``: mean of the weights by the ``queries`` newest ones, or by
        as many as were observed. A position behind a query got nothing from it."""
        if not 0 < queries <= self._wanted.latest:
            raise LookupError(f"no policy announced that it reads the latest {queries} queries")
        known = self._known(row)
        first = 0 if known is None else max(known.first, known.covered - queries)
        if known is None or known.latest is None or first >= known.covered:
            return torch.zeros(len(positions), dtype=torch.float64)
        places = torch.arange(first, known.covered) % len(known.latest)
        return known.latest[places[:, None], positions].double().mean(dim=0)

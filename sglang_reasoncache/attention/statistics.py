# SPDX-License-Identifier: Apache-2.0
"""How much weight queries gave to the positions of each row, noted while attention runs.

Per position, not per slot: two positions that share a slot have a weight each. Weights are
summed over query heads and layers. Nothing here moves when a row does: a row that is built
anew starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.policies.contract import Observation

#: Of a call that computes weights of a prompt's queries: 64 MiB of logits under 32 heads.
_ENTRIES = 1 << 19


@dataclass
class Observed:
    """Queries of one forward whose weights are noted. Every layer adds to ``weights``.

    Attributes:
        weights: fp32, one for each entry of the first query, then of the next, and so on.
        tokens: int64, which tokens of the batch they are; None: all, each over its row.
        spans: int32 ``[queries]`` each, begin and end of their entries; None with ``tokens``.
        requests: int64 ``[queries]``, their rows.
        seen: int64 ``[queries]``, positions up to and including their own.
        held: bool ``[queries, positions]``, which positions the entries belong to.
    """

    weights: torch.Tensor
    tokens: torch.Tensor | None
    spans: tuple[torch.Tensor, torch.Tensor] | None
    requests: torch.Tensor
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

    ``4 * (wanted.latest + wanted.total)`` bytes a position; what no request has reached is
    not even touched.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        wanted: What the policies read.
    """

    def __init__(self, rows: torch.Tensor, wanted: Observation) -> None:
        self._rows = rows
        self._wanted = wanted
        # Not cleared: a row's part is, when the row is built.
        self._latest = torch.empty((wanted.latest, *rows.shape)) if wanted.latest else None
        self._total = torch.empty(rows.shape) if wanted.total else None
        # Of each row: the queries at positions [first, covered) were observed, one by one.
        self._first = torch.zeros(len(rows), dtype=torch.int64)
        self._covered = torch.zeros(len(rows), dtype=torch.int64)
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
        # SGLang counts its lengths up in place, before the weights are looked at.
        requests = requests.to(torch.int64, copy=True)
        lengths = lengths.to(torch.int64, copy=True)
        if new is None:
            if self._total is not None:
                self._total[requests, lengths - 1] = 0
            self._covered[requests] = lengths
            observed = self._observed(plan.kv_indices.shape[0], None, None, requests, lengths)
        else:
            observed = self._observe_prompts(plan, requests, lengths, new)
        self._pending = observed
        return observed

    def _observe_prompts(
        self, plan: RowPlan, requests: torch.Tensor, lengths: torch.Tensor, new: Sequence[int]
    ) -> Observed | None:
        """The last queries of each chunk; a decoding request's only one under mixed chunk."""
        bounds = plan.kv_indptr.tolist()
        tokens: list[int] = []
        rows: list[int] = []
        seen: list[int] = []
        begins: list[int] = []
        ends: list[int] = []
        at = 0
        for b, (row, length, count) in enumerate(
            zip(requests.tolist(), lengths.tolist(), new, strict=True)
        ):
            observed = min(count, self._wanted.prompt)
            goes_on = observed == count and length - count == self._covered[row]
            if not goes_on:
                self._first[row] = length - observed
            if self._total is not None:
                self._total[row, length - count if goes_on else 0 : length] = 0
            self._covered[row] = length
            for left in range(observed - 1, -1, -1):
                tokens.append(at + count - 1 - left)
                rows.append(row)
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
            torch.tensor(rows),
            torch.tensor(seen),
        )

    def _observed(
        self,
        entries: int,
        tokens: torch.Tensor | None,
        spans: tuple[torch.Tensor, torch.Tensor] | None,
        requests: torch.Tensor,
        seen: torch.Tensor,
    ) -> Observed:
        # Now, as the plan: rows may change before the weights are there.
        most = int(seen.max()) if len(seen) else 0
        held = self._rows[requests, :most] >= 0
        held &= torch.arange(most) < seen[:, None]
        return Observed(torch.zeros(entries), tokens, spans, requests, seen, held)

    def _settle(self) -> None:
        """Bring the last forward's weights to the rows."""
        done, self._pending = self._pending, None
        if done is None:
            return
        weights = torch.zeros(done.held.shape).masked_scatter_(done.held, done.weights)
        most = weights.shape[1]
        if self._total is not None:
            self._total[:, :most].index_add_(0, done.requests, weights)
        if self._latest is not None:
            kept = len(self._latest)
            last = self._covered[done.requests] - done.seen < kept
            # Positions that come before this place is written again got nothing here.
            padded = min(most + kept, self._latest.shape[2]) - most
            self._latest[(done.seen[last] - 1) % kept, done.requests[last], : most + padded] = (
                torch.nn.functional.pad(weights[last], (0, padded))
            )

    def total(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """fp64 ``[positions]``: weights by all queries since the end of the prompt's last chunk,
        and by the last ``Observation.prompt`` ones of that.

        ``positions``: int64, held ones. What a policy's needs did not announce is a LookupError.
        """
        self._settle()
        if self._total is None:
            raise LookupError("no policy announced that it reads total weights")
        return self._total[row, positions].double()

    def latest(self, row: int, positions: torch.Tensor, queries: int) -> torch.Tensor:
        """fp64 ``[positions]``: mean of the weights by the ``queries`` newest ones, or by
        as many as were observed. A position behind a query got nothing from it."""
        self._settle()
        if self._latest is None or not 0 < queries <= len(self._latest):
            raise LookupError(f"no policy announced that it reads the latest {queries} queries")
        covered = int(self._covered[row])
        first = max(int(self._first[row]), covered - queries)
        if first >= covered:
            return torch.zeros(len(positions), dtype=torch.float64)
        places = torch.arange(first, covered) % len(self._latest)
        return self._latest[places[:, None], row, positions].double().mean(dim=0)

# SPDX-License-Identifier: Apache-2.0
"""Requests with attention statistics, and all weights that were ever given; on a host or a device."""

from __future__ import annotations

import random
from typing import Any

import torch

from sglang_reasoncache.eviction.device_statistics import DeviceStatistics
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.kernels.batch import BatchRows
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from tests.unit.attention_rig import Rig

ROWS, WIDTH, SLOTS = 5, 90, 600
WANTED = StatisticsNeeds(latest=4, total=True, prompt=6)


class World:
    """Rows that are built, grow, get evicted positions and are built anew, and all weights ever given."""

    def __init__(self, seed: int, wanted: StatisticsNeeds) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(-1, SLOTS, (ROWS, WIDTH), dtype=torch.int32)
        self.wanted = wanted
        #: Of each row, how many requests got it.
        self.generations = torch.zeros(ROWS, dtype=torch.int64)
        self.statistics: Any = self.made()
        self.update: Any = None
        self.length = [0] * ROWS
        #: Rows of requests some of whose positions were computed.
        self.begun: set[int] = set()
        #: Of each row: query position -> weights of the positions it saw.
        self.given: list[dict[int, torch.Tensor]] = [{} for _ in range(ROWS)]

    def made(self) -> AttentionStatistics:
        """What is tested."""
        return AttentionStatistics(self.rows, self.generations, self.wanted)

    def begin_forward(
        self, requests: torch.Tensor, lengths: torch.Tensor, new: list[int] | None
    ) -> torch.Tensor:
        """Returns what layers add to."""
        prefill = self.statistics.begin(requests, lengths, new)
        plan = plan_rows(self.rows, requests, lengths, num_slots=SLOTS)
        read = BatchRows(plan, requests, lengths, int(lengths.max()))
        if prefill is None:
            self.update = self.statistics.decode(read)
        else:
            self.update = self.statistics.prefill(read, prefill)
        return self.update.weights

    def done(self) -> None:
        """All layers have run."""
        self.update.apply()

    def forward(self, requests: list[int], new: list[int] | None) -> None:
        counts = new or [1] * len(requests)
        for row, count in zip(requests, counts, strict=True):
            self.length[row] += count
            at = slice(self.length[row] - count, self.length[row])
            self.rows[row, at] = torch.randint(0, SLOTS, (count,), dtype=torch.int32)
        lengths = torch.tensor([self.length[row] for row in requests])
        indices = torch.tensor(requests)
        layers = self.begin_forward(indices, lengths, new)
        # As SGLang does with its own.
        lengths += 1
        indices.zero_()
        expected = []
        for row, count in zip(requests, counts, strict=True):
            told = 1 if new is None else min(count, self.wanted.prompt)
            if row in self.begun and count == 1:
                told = 1
            self.begun.add(row)
            for query in range(self.length[row] - told, self.length[row]):
                weights = torch.rand(query + 1, generator=self.torch)
                weights[self.rows[row, : query + 1] < 0] = 0
                self.given[row][query] = weights
                expected.append(weights[self.rows[row, : query + 1] >= 0])
        found = torch.cat([torch.zeros(0), *expected])
        # As two layers do.
        layers[: len(found)] += found / 4
        layers[: len(found)] += found * 3 / 4
        self.done()

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.2:  # a request begins, with some of its prompt from the prefix cache
            row = self.random.randrange(ROWS)
            self.begin(row, self.random.choice([self.random.randrange(0, 20), self.length[row]]))
        elif kind < 0.3:  # the next chunk of a long prompt: what came before is forgotten
            row = self.random.randrange(ROWS)
            if 0 < self.length[row] < WIDTH - 20:
                count = self.random.choice([2, 6, 7, 15])
                if count > self.wanted.prompt:
                    self.given[row].clear()
                self.forward([row], [count])
        elif kind < 0.4:  # evicted positions
            row = self.random.randrange(ROWS)
            if self.length[row] > 4:
                start = self.random.randrange(self.length[row] - 2)
                self.rows[row, start : start + 2] = -1
        else:
            some = [r for r in range(ROWS) if 0 < self.length[r] < WIDTH]
            some = self.random.sample(some, self.random.randint(0, len(some)))
            if some:
                mixed = self.random.random() < 0.2
                self.forward(some, [1] * len(some) if mixed else None)

    def begin(self, row: int, cached: int) -> None:
        """Another request gets the row and finds its first ``cached`` positions computed."""
        self.given[row].clear()
        self.begun.discard(row)
        self.generations[row] += 1
        self.length[row] = min(cached, WIDTH - 40)
        self.rows[row, : self.length[row]] = 7
        self.forward([row], [self.random.randrange(1, 20)])

    def check(self, row: int) -> None:
        length = self.length[row]
        held = (self.rows[row, :length] >= 0).nonzero()[:, 0]
        queries = sorted(self.given[row])
        padded = [
            torch.nn.functional.pad(self.given[row][q], (0, length - q - 1))[held].double()
            for q in queries
        ]
        if self.wanted.total:
            found = self.statistics.total(row, held)
            torch.testing.assert_close(found, sum(padded), rtol=1e-5, atol=1e-6)
        for newest in range(1, self.wanted.latest + 1):
            some = padded[-newest:]
            found = self.statistics.latest(row, held, newest)
            torch.testing.assert_close(found, sum(some) / len(some), rtol=1e-5, atol=1e-6)


class DeviceWorld(World):
    """Its weights go the way of a GPU, decode steps in buffers that stay."""

    def made(self) -> DeviceStatistics:
        self.buffers = PlanBuffers.of(8, 8 * self.rows.shape[1], "cpu", positions=True)
        self.weights = torch.zeros(8 * self.rows.shape[1])
        return DeviceStatistics(self.rows, self.generations, self.wanted)

    def begin_forward(
        self, requests: torch.Tensor, lengths: torch.Tensor, new: list[int] | None
    ) -> torch.Tensor:
        prefill = self.statistics.begin(requests.tolist(), lengths.tolist(), new)
        plan_into(self.buffers, self.rows, requests, lengths, num_slots=SLOTS)
        if prefill is None:
            # As in a graph: SGLang's buffers, written anew before each replay.
            where = requests.clone(), lengths.clone()
            read = BatchRows(self.buffers, *where, self.rows.shape[1])
            self.update = self.statistics.decode(read, self.weights)
        else:
            read = BatchRows(self.buffers, requests, lengths, int(lengths.max()))
            self.update = self.statistics.prefill(read, prefill)
            [(_, (begin, end), _)] = self.update.parts
            spans = end - begin
            assert len(self.update.weights) >= spans.sum()
            assert not len(spans) or spans.max() <= self.update.longest
        return self.update.weights

    def done(self) -> None:
        super().done()
        # Ready for the next step.
        assert not self.update.weights.any()


def dense_weights(rig: Rig, batch: Any, queries: int) -> list[torch.Tensor]:
    """fp64 sums over heads and the last ``queries`` of each row, by position."""
    keys = rig.pool.k_buffer[1].double()
    found, query = [], iter(rig.query.double().split(batch.extend_seq_lens.tolist()))
    for row, length in zip(rig.row_of.tolist(), rig.lengths, strict=True):
        k = keys[rig.rows.req_to_token[row, :length].long()].repeat_interleave(
            rig.heads // rig.kv_heads, dim=1
        )
        q = next(query)[-queries:]
        logits = torch.einsum("qhd,nhd->hqn", q, k) * rig.layer.scaling
        behind = torch.arange(length) > torch.arange(length - len(q), length)[:, None]
        found.append(logits.masked_fill(behind, float("-inf")).softmax(-1).sum(dim=(0, 1)))
    return found

# SPDX-License-Identifier: Apache-2.0
"""Tests the ring buffer of queries, and attention weights of these queries over held (not evicted) keys."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cpu.backend import PagedCpuBackend
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction import held as held_module
from sglang_reasoncache.eviction.held import HeldLayer, KeySource
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.h2o import H2O
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.rkv import RKV
from sglang_reasoncache.eviction.policies.snapkv import SnapKV
from sglang_reasoncache.eviction.policies.triattention import TriAttention
from sglang_reasoncache.eviction.recent_queries import LayerShape, RecentQueries
from sglang_reasoncache.eviction.row_state import Decision
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.kernels.attention_cases import dense
from tests.two_ranks import in_two_threads
from tests.unit.attention_rig import SHORT, Rig

WINDOW = 4
ROWS = 3
HEADS = 4
KV_HEADS = 2
DIM = 8
LAYERS = 2
CPU = torch.device("cpu")


def recent(
    generations: torch.Tensor, window: int = WINDOW, heads: int = HEADS, cap: float = 0.0
) -> RecentQueries:
    layers = {layer: LayerShape(heads, DIM, 0.3, cap) for layer in range(LAYERS)}
    return RecentQueries(layers, generations, window, torch.float32, CPU)


class Kept:
    """A ring buffer that gets random queries, and a record of every query to compare with."""

    def __init__(self) -> None:
        self.pool = ReqToTokenPool(ROWS, 64, "cpu", False)
        self.recent = recent(self.pool.req_generation)
        self.rows: dict[str, int] = {}
        self.all: dict[str, dict[int, torch.Tensor]] = {}

    def begin(self, *rids: str) -> None:
        """Gives each request a row from SGLang's pool, which reuses the row that was freed last."""
        for rid in rids:
            rows = self.pool.alloc_rows(1)
            assert rows is not None
            self.rows[rid] = rows[0]
            self.all[rid] = {}

    def end(self, rid: str) -> None:
        self.pool.free_rows([self.rows[rid]])

    def forward(self, *parts: tuple[str, int, int], decodes: bool = False) -> None:
        """Runs a forward. ``parts``: each request's name, and the start and end of its new positions."""
        positions = [torch.arange(first, end) for _, first, end in parts]
        where = torch.tensor([self.rows[rid] for rid, _, _ in parts]), torch.cat(positions)
        self.recent.forget()
        if decodes:
            self.recent.begin_decode(*where)
        else:
            self.recent.begin_extend(*where, [end - first for _, first, end in parts])
        for layer in range(LAYERS):
            queries = torch.randn(len(where[1]), HEADS * DIM)
            self.recent.keep(layer, queries)
            at = 0
            for rid, first, end in parts:
                for position in range(first, end):
                    if layer == LAYERS - 1:
                        self.all[rid][position] = queries[at].view(HEADS, DIM)
                    at += 1

    def check(self, rid: str, written: int, first: int) -> None:
        """Reads kept queries of positions ``[first, written)``. Compares each kept query with the recorded one.
        Stores the positions of the kept queries in ``there``."""
        queries, positions, kept = self.recent.read(LAYERS - 1, self.rows[rid], first, written)
        assert positions.tolist() == list(range(max(first, written - WINDOW - 1, 0), written))
        for query, position, there in zip(queries, positions.tolist(), kept, strict=True):
            if there:
                assert torch.equal(query, self.all[rid][position])
        self.there = [at for at, yes in zip(positions.tolist(), kept.tolist(), strict=True) if yes]


def test_the_newest_queries_are_there_however_they_came() -> None:
    """Feeds queries of prefill chunks (after a cached prefix, which has none), decode steps and mixed batches
    until the ring has wrapped around. Names and rows of finished requests are used again."""
    rng = random.Random(4)
    kept = Kept()
    # For each request: its number of positions, and the position since which the buffer skipped no query.
    lengths: dict[str, int] = {}
    begun: dict[str, int] = {}
    for _ in range(300):
        running = rng.sample([*lengths], min(len(lengths), 2))
        decodes = rng.random() < 0.6
        joins = set("abc") - lengths.keys()
        parts = [(rid, lengths[rid], lengths[rid] + 1) for rid in running]
        if not decodes:
            parts = [(rid, first, first + rng.randint(1, 9)) for rid, first, _ in parts]
        if not decodes and joins:
            rid = rng.choice(sorted(joins))
            first = rng.randrange(6)
            kept.begin(rid)
            parts.append((rid, first, first + rng.randint(1, 9)))
            begun[rid] = first
        if not parts:
            continue
        kept.forward(*parts, decodes=decodes)
        for rid, first, end in parts:
            # Of a chunk, only the newest WINDOW queries are kept.
            lengths[rid] = end
            begun[rid] = max(begun[rid], end - WINDOW if end - first > WINDOW else 0)
            since = max(begun[rid], end - WINDOW - 1)
            kept.check(rid, end, 0)
            assert kept.there == list(range(since, end))
            # A read may end one position earlier, to leave out the query of a forward pass in flight.
            kept.check(rid, end - 1, 0)
            assert kept.there == list(range(since, end - 1))
        if rng.random() < 0.15:
            rid = rng.choice([*lengths])
            del lengths[rid]
            kept.end(rid)


#: Slot of each position of row 1. -1 marks evicted positions; positions 1 and 4 share slot 9.
ROW = [3, 9, -1, 14, 9, -1, -1, 30, 1, 22]
HELD = np.array([0, 1, 3, 4, 7, 8, 9])


def rotation_of() -> KeyRotation:
    angles = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=1), DIM, True)


def source(
    layers: list[torch.Tensor], queries: RecentQueries | None, rotation: KeyRotation | None
) -> KeySource:
    """A ``KeySource`` over plain tensors, with a stub in place of SGLang's KV pool."""
    pool = SimpleNamespace(start_layer=0, layer_num=len(layers), get_key_buffer=layers.__getitem__)
    rows = torch.full((ROWS, 12), 99, dtype=torch.int32)
    rows[1, : len(ROW)] = torch.tensor(ROW, dtype=torch.int32)
    cached_at = CachedPositions(32, "cpu")
    cached_at.record(torch.tensor([3, 9, 14, 30, 1, 22]), torch.tensor([0, 1, 3, 7, 8, 9]))
    rotations = None if rotation is None else dict.fromkeys(range(len(layers)), rotation)
    return KeySource(pool, rows, cached_at, rotations, queries)


def pool_keys(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(LAYERS, 32, KV_HEADS, DIM, generator=generator)
    return [layer.to(dtype) for layer in keys]


def filled(heads: slice = slice(None), cap: float = 0.0) -> tuple[RecentQueries, torch.Tensor]:
    """A buffer that got the queries of positions 2 to 9 of row 1 and kept the newest 6, and all 8 queries."""
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(LAYERS, 8, HEADS, DIM, generator=generator)[:, :, heads]
    kept = recent(torch.zeros(ROWS, dtype=torch.int64), 6, queries.shape[2], cap)
    kept.begin_extend(torch.tensor([1]), torch.arange(2, 10), [8])
    for layer in range(LAYERS):
        kept.keep(layer, queries[layer].flatten(1))
    return kept, queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_keys_of_held_positions(dtype: torch.dtype) -> None:
    """Checks keys as cached and rotated for ``HELD``. Position 4 reads the key computed for position 1."""
    layers = pool_keys(dtype)
    rotation = rotation_of()
    at = torch.from_numpy(HELD)
    slots = torch.tensor(ROW)[at]
    cached = torch.tensor([0, 1, 3, 1, 7, 8, 9])
    for layer in source(layers, None, rotation).layers(1, HELD, 10, shifted=True):
        assert isinstance(layer, HeldLayer)
        plain = torch.stack([layers[layer._number].float()[slot] for slot in slots.tolist()])
        assert torch.equal(layer.stored(), plain)
        torch.testing.assert_close(layer.used(), rotation.rotate(plain, at - cached))
    [first, _] = source(layers, None, None).layers(1, HELD, 10, shifted=True)
    assert torch.equal(first.used(), first.stored())


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("logits", [1, 1 << 20])
def test_weights_are_those_of_dense_attention(
    cap: float, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query head attends to its own KV head. Keys are rotated for the held positions. A query
    sees neither later nor evicted positions."""
    monkeypatch.setattr(held_module, "_LOGITS", logits)
    (kept, queries), rotation = filled(cap=cap), rotation_of()
    layers = pool_keys()
    for number, layer in enumerate(
        source(layers, kept, rotation).layers(1, HELD, 10, shifted=True)
    ):
        for first, newest in ((0, 6), (4, 6), (7, 3), (9, 1)):
            asked = queries[number, -newest:]
            at = torch.arange(10 - newest, 10)[:, None]
            hidden = torch.from_numpy(HELD) > at
            _, weights = dense(asked, layer.used(), layer.used(), 0.3, hidden=hidden, cap=cap)
            expected = weights.sum(dim=1)
            torch.testing.assert_close(
                layer.weights(first).double(), expected, rtol=1e-4, atol=1e-5
            )
    # The forward in flight computes position 9. The query of this position is read only if ``end`` is None.
    [layer, _] = source(layers, kept, rotation).layers(1, HELD[:-1], 9, shifted=True)
    for end, newest in ((9, 5), (None, 6)):
        assert layer.weights(0, end).sum(dim=1).tolist() == pytest.approx([newest] * HEADS)


POLICIES: list[Any] = [
    H2O(budget=2, recent=1, recent_share=0.0),
    RKV(budget=2, recent=1, kernel=1),
    SnapKV(budget=2, recent=1, window=2, kernel=3),
    KeyDiff(budget=2, recent=1),
    TriAttention(budget=2, recent=1, window=6),
]


def decided(share: slice, ranks: Ranks) -> list[tuple[list[float], list[int]]]:
    """Each policy's scores, summed over ranks, and its evictions. ``share``: this rank's KV heads."""
    group = HEADS // KV_HEADS
    kept, _ = filled(slice(share.start * group, share.stop * group))
    layers = [layer[:, share].contiguous() for layer in pool_keys()]
    found = []
    for policy in POLICIES:
        read = source(layers, kept, rotation_of()).layers(1, HELD, 10, shifted=True)
        now = View(10, 10, 0, 1, HELD, HELD, np.ones_like(HELD), 7, read)
        scores = policy.scores(now)
        gone = Decision(now, policy.candidates(now), scores, 3).positions(ranks)
        sums = scores.double()
        ranks.add(sums)
        found.append((sums.tolist(), gone.tolist()))
    return found


def test_ranks_give_up_the_same_as_one_with_all_heads() -> None:
    found = in_two_threads(lambda rank, group: decided(slice(rank, rank + 1), Ranks(group)))
    assert found[0] == found[1]
    for (sums, gone), (whole, expected) in zip(
        found[0], decided(slice(0, KV_HEADS), Ranks()), strict=True
    ):
        assert np.array(sums) / 2 == pytest.approx(np.array(whole), rel=1e-4, abs=1e-5)
        assert len(gone) == 3 and gone == expected


def assert_kept(rig: Rig, found: RecentQueries, new: list[int]) -> None:
    """Checks that ``found`` kept the queries of the last forward pass of ``rig``, which runs layer 1 only."""
    for row, end, own in zip(rig.row_of.tolist(), rig.lengths, rig.query.split(new), strict=True):
        newest = own[-found.window :]
        queries, _, kept = found.read(1, row, end - len(newest), end)
        assert kept.all() and torch.equal(queries, newest.float())


@pytest.mark.usefixtures("published_config", "out_of_tree_platform")
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 19, 30]], ids=["decode", "extend"])
def test_the_cpu_backend_keeps_queries_and_computes_the_same(new: list[int]) -> None:
    rig = Rig(shifted=0.4, lengths=SHORT)
    backend = PagedCpuBackend(rig.runner, rig.cached_at)
    expected = rig.forward(backend, rig.batch(new))
    found = backend.paged.keep_queries(3)
    assert found.layers[1] == LayerShape(rig.heads, 16, rig.layer.scaling, 0.0)
    assert torch.equal(rig.forward(backend, rig.batch(new)), expected)
    assert_kept(rig, found, new)

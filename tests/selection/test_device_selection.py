# SPDX-License-Identifier: Apache-2.0
"""Pages selected on a device, under Triton's interpreter: as on the CPU, and in graphs."""

import functools
from typing import Any

import pytest
import torch

from sglang_reasoncache.attention.paged_cuda import SHIFTED, GraphVariants
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import BatchRows
from sglang_reasoncache.selection import page_bounds
from sglang_reasoncache.selection.quest import Quest
from tests.selection.test_page_selection import selection_on_host
from tests.triton_runs import INTERPRETED, under_interpreter
from tests.triton_runs import small_launches as small_launches
from tests.unit.attention_rig import TOLERANCE, Rig
from tests.unit.test_attention_cuda_graph import Graphs, triton_backend
from tests.unit.test_attention_cuda_graph import ranks as ranks

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform", "ranks")


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are read by Triton, as on a device."""
    if INTERPRETED:
        paged = functools.partial(PagedKv, backend="triton")
        monkeypatch.setattr(page_bounds, "PagedKv", paged)


def rig_of(lengths: list[int], *, shifted: tuple[int, ...] = ()) -> Rig:
    """Rows of whole pages of 8 in a pool; the pages of the longest row named in ``shifted`` are
    cached for other positions."""
    rig = Rig(shifted=0.0, lengths=lengths, heads=2, kv_heads=1, notes_shifted=bool(shifted))
    rig.runner.token_to_kv_pool_allocator.page_size = 8
    for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=rig.generator))
    place(rig, lengths, shifted)
    return rig


def place(rig: Rig, lengths: list[int], shifted: tuple[int, ...] = ()) -> None:
    rig.lengths = lengths
    count = len(rig.pool.k_buffer[1]) // 8 - 1
    pages = iter((torch.randperm(count, generator=rig.generator) + 1).tolist())
    for row, length in zip(rig.row_of.tolist(), lengths, strict=True):
        for start in range(0, length, 8):
            slots = next(pages) * 8 + torch.arange(min(8, length - start))
            rig.rows.req_to_token[row, start : start + len(slots)] = slots.to(torch.int32)
            away = 40 if start // 8 in shifted and length == max(lengths) else 0
            rig.cached_at.record(slots, start + away + torch.arange(len(slots)))


POLICY = Quest(budget=24, whole_layers=1)


def noted(rig: Rig, backend: Any, policy: Any = POLICY) -> Any:
    """The backend, with bounds of what is in the pool now."""
    if backend.paged.selection is None:
        backend.paged.select(policy)
    backend.paged.selection.update(1, torch.arange(len(rig.pool.k_buffer[1])))
    return backend


def read_of(rig: Rig, policy: Any = POLICY) -> list[torch.Tensor]:
    """bool ``[length]`` of each row: what the layer reads, by the CPU's selection over the pool."""
    keys = {0: rig.pool.k_buffer[0], 1: rig.pool.k_buffer[1]}
    read = []
    for i, (row, length) in enumerate(zip(rig.row_of, rig.lengths, strict=True)):
        slots = rig.rows.req_to_token[row, :length].long()
        held = slots >= 0
        away = held & (rig.cached_at.positions[slots.clamp_min(0)] != torch.arange(length))
        if length <= policy.budget:
            read.append(held)
            continue
        rows = rig.rows.req_to_token[row : row + 1].clone()
        rows[0, :length][away] = -1
        # Bounds are those of pages as they lie, on both sides.
        host = selection_on_host(policy, keys, 8, rows)
        host.update(1, torch.arange(len(keys[1])))
        where = torch.tensor([0]), torch.tensor([length])
        whole = plan_rows(rows, *where, num_slots=len(keys[1]))
        host.begin(BatchRows(whole, *where, length))
        chosen_slots = host.plan(1, rig.query[i : i + 1], rig.layer.scaling).kv_indices
        chosen = away | (held & torch.isin(slots, chosen_slots))
        read.append(chosen)
    return read


def check(rig: Rig, backend: Any, policy: Any = POLICY) -> None:
    """Dense attention over what the CPU would read, everything else masked."""
    batch = rig.batch([1] * len(rig.lengths))
    found = rig.forward(backend, batch)
    kept = rig.rows.req_to_token.clone()
    for row, read in zip(rig.row_of, read_of(rig, policy), strict=True):
        assert read.sum() < len(read) or len(read) <= policy.budget
        rig.rows.req_to_token[row, : len(read)][~read] = -1
    expected = rig.expected(batch)
    rig.rows.req_to_token.copy_(kept)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])


def counts_of(rig: Rig, policy: Any = POLICY) -> dict[str, int]:
    """What a step adds to the counts: rows beyond the budget."""
    held = read = 0
    for row, chosen in zip(rig.row_of, read_of(rig, policy), strict=True):
        if len(chosen) > policy.budget:
            held += int((rig.rows.req_to_token[row, : len(chosen)] >= 0).sum())
            read += int(chosen.sum())
    return {"positions_held": held, "positions_read": read}


@under_interpreter
def test_decode_reads_what_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and in graphs, one row within the budget; rows, cached and evicted positions change in between."""
    rig = rig_of([70, 19, 41], shifted=(1, 4))
    backend = noted(rig, triton_backend(rig, monkeypatch))
    selection = backend.paged.selection
    assert GraphVariants(backend).capture_labels == (SHIFTED,)
    check(rig, backend)
    # What Prometheus gets is the state of an earlier call.
    assert selection.recent()["positions_read"] == 0
    assert selection.recent() == selection.describe()
    assert selection.describe() == {"name": "quest", **counts_of(rig)}
    graphs = Graphs(rig, backend)
    check(rig, graphs)
    place(rig, [33, 64, 1], shifted=(2,))
    noted(rig, backend)
    # Evicted, and a page that is used twice.
    own = rig.rows.req_to_token[rig.row_of[1]]
    own[8:16], own[40:48] = -1, own[24:32].clone()
    rig.runner.token_to_kv_pool_allocator.has_evicted = True
    before = selection.describe()
    check(rig, graphs)
    after, counts = selection.describe(), counts_of(rig)
    assert {key: after[key] - before[key] for key in counts} == counts
    check(rig, backend)
    rig.row_of = rig.row_of[:1]
    place(rig, [60])
    noted(rig, backend)
    check(rig, graphs)
    # Within the budget: read whole, and not counted.
    before = selection.describe()
    place(rig, [20])
    check(rig, graphs)
    check(rig, backend)
    assert selection.plan(1, rig.query, 1.0) is None and selection.describe() == before
    graphs.graphs[1, SHIFTED]()
    assert selection.plan(0, rig.query, 1.0) is None, "a first layer"
    selection.forget()
    assert selection.plan(1, rig.query, 1.0) is None, "no step was begun"
    assert set(graphs.replayed) == {SHIFTED}
    seen = selection.describe()
    assert 0 < seen["positions_read"] < seen["positions_held"]


@under_interpreter
def test_bounds_follow_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts by SGLang's kernels and by ours, then token by token, where keys are as cached."""
    rig = rig_of([30, 9, 17])
    backend = triton_backend(rig, monkeypatch, corrected=False)
    selection = backend.paged.select(POLICY)

    def right() -> None:
        keys, ends = rig.pool.k_buffer[1], selection._bounds[1].ends
        for row, length in zip(rig.row_of, rig.lengths, strict=True):
            for start in range(0, length, 8):
                slots = rig.rows.req_to_token[row, start : min(start + 8, length)].long()
                page = int(slots[0]) // 8
                assert torch.equal(ends[page, :, :16], keys[slots].amax(dim=0))
                assert torch.equal(ends[page, :, 16:], keys[slots].amin(dim=0))

    for evicted in (False, True):
        rig.runner.token_to_kv_pool_allocator.has_evicted = evicted
        batch = rig.batch([30, 9, 17])
        assert not backend.can_run_prefill_cuda_graph(batch)
        rig.forward(backend, batch)
        right()
    for _ in range(2):
        check(rig, backend)
        right()

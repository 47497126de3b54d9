# SPDX-License-Identifier: Apache-2.0
"""Selected pages with our Triton kernels, under the interpreter: in graphs and without, as attention that masks
what the selection on the CPU leaves out. ``tests/kernels/test_page_logits.py`` has the kernel alone."""

import dataclasses
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_reasoncache.attention.paged_cuda import SHIFTED, GraphVariants
from sglang_reasoncache.selection.pages import PageSelection
from sglang_reasoncache.selection.quest import Quest
from tests.triton_runs import small_launches as small_launches
from tests.triton_runs import under_interpreter
from tests.unit.attention_rig import TOLERANCE, Rig, mark
from tests.unit.test_attention_cuda_graph import Graphs, triton_backend
from tests.unit.test_attention_cuda_graph import ranks as ranks

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform", "ranks")
PAGE = 8
QUEST = Quest(budget=24, whole_layers=1)


def rig_of(lengths: list[int]) -> Rig:
    """Rows of whole pages, with finite keys everywhere."""
    rig = Rig(shifted=0.0, lengths=lengths, heads=2, kv_heads=1, page=PAGE)
    for buffer in rig.buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=rig.generator))
    return rig


def place(rig: Rig, lengths: list[int], shifted: tuple[int, ...] = ()) -> None:
    """Give the rows other pages of the pool. The pages ``shifted`` of the longest row are cached elsewhere."""
    rig.lengths = lengths
    pages = torch.randperm(rig.pool.size // PAGE, generator=rig.generator) + 1
    each = iter(pages.tolist())
    for row, length in zip(rig.row_of.tolist(), lengths, strict=True):
        for start in range(0, length, PAGE):
            slots = next(each) * PAGE + torch.arange(min(PAGE, length - start))
            rig.rows.req_to_token[row, start : start + len(slots)] = slots.to(torch.int32)
            away = 40 if start // PAGE in shifted and length == max(lengths) else 0
            rig.cached_at.record(slots, start + away + torch.arange(len(slots)))
    rig.allocator.has_shifted_slots |= bool(shifted)


def prefilled(rig: Rig, selection: PageSelection) -> None:
    """Have the selection see all rows, as a prefill of a cached prefix does."""
    selection.begin(rig.row_of, torch.tensor(rig.lengths), max(rig.lengths), decodes=False)
    selection.written(1)
    selection.forget()


def left_out(rig: Rig, corrected: bool) -> torch.Tensor:
    """bool ``[rows, width]``: what the step of ``rig.query`` does not read, chosen row by row on the CPU."""
    gone = torch.zeros(rig.rows.req_to_token.shape, dtype=torch.bool)
    keys = {0: rig.pool.k_buffer[0], 1: rig.pool.k_buffer[1]}
    cached_at = rig.cached_at.positions if corrected else None
    table = rig.rows.req_to_token
    for number, (row, length) in enumerate(zip(rig.row_of, rig.lengths, strict=True)):
        host = PageSelection(QUEST, keys, PAGE, table, cached_at, "native")
        where = (row[None], torch.tensor([length]), length)
        for decodes in (False, True):
            host.begin(*where, decodes=decodes)
            host.written(1)
        chosen = host.choose(1, rig.query[number : number + 1], rig.layer.scaling)
        if chosen is not None:
            gone[row, :length] = chosen[0][0, :length] < 0
    return gone


def check(rig: Rig, backend: Any, corrected: bool = True) -> tuple[int, int]:
    """A decode step, beside attention over what the CPU would choose. Returns positions held, positions read of
    rows beyond the budget."""
    batch = rig.batch([1] * len(rig.lengths))
    mark(batch, needs_ours=False)
    found = rig.forward(backend, batch)
    gone = left_out(rig, corrected)
    table = rig.rows.req_to_token
    kept = table.clone()
    long = [length > QUEST.budget for length in rig.lengths]
    rows = [int(row) for row, is_long in zip(rig.row_of, long, strict=True) if is_long]
    held = sum(
        int((kept[row, :length] >= 0).sum())
        for row, length, is_long in zip(rig.row_of, rig.lengths, long, strict=True)
        if is_long
    )
    table[gone] = -1
    expected = rig.expected(batch)
    table.copy_(kept)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])
    already = kept < 0
    return held, held - int((gone & ~already)[rows].sum())


@under_interpreter
def test_decode_reads_what_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs and in them; one row within the budget. In between rows, cached and evicted positions
    change."""
    rig = rig_of([70, 19, 41])
    place(rig, [70, 19, 41], shifted=(1, 4))
    backend = triton_backend(rig, monkeypatch)
    selection = backend.paged.select(QUEST)
    assert GraphVariants(backend).capture_labels == (SHIFTED,)
    prefilled(rig, selection)
    assert selection.newly_counted() == (0, 0)
    counts = check(rig, backend)
    assert counts[1] < counts[0]
    assert selection.newly_counted() == counts
    graphs = Graphs(rig, backend)
    selection.newly_counted()
    assert check(rig, graphs) == selection.newly_counted()
    place(rig, [33, 64, 1], shifted=(2,))
    own = rig.rows.req_to_token[rig.row_of[1]]
    own[8:16] = -1
    own[40:44] = own[24:28].clone()
    rig.allocator.has_evicted = True
    prefilled(rig, selection)
    for _ in range(2):
        assert check(rig, graphs) == selection.newly_counted()
    assert check(rig, backend) == selection.newly_counted()
    rig.row_of = rig.row_of[:1]
    for lengths in ([60], [20]):
        place(rig, lengths)
        prefilled(rig, selection)
        held, read = check(rig, graphs)
        assert (held, read) == selection.newly_counted()
        assert (held > read) == (lengths == [60])
    assert set(graphs.replayed) == {SHIFTED}
    # A group of DP attention without a request of its own replays the graph that there is.
    idle = dataclasses.replace(rig.batch([1]), forward_mode=ForwardMode.IDLE)
    assert backend.choose_graph(idle) == SHIFTED


@under_interpreter
@pytest.mark.parametrize("corrected", [True, False])
def test_bounds_follow_every_forward(corrected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts by SGLang's kernels and by ours, then decode steps."""
    rig = rig_of([30, 9, 17])
    rig.settle()
    backend = triton_backend(rig, monkeypatch, corrected)
    selection = backend.paged.select(QUEST)
    assert not backend.can_run_prefill_cuda_graph(rig.batch([30, 9, 17]))
    for new in ([30, 9, 17], [5, 9, 1]):
        for ours in (False, True):
            rig.allocator.has_evicted = ours
            batch = rig.batch(new)
            mark(batch, needs_ours=ours)
            rig.forward(backend, batch)
            assert_bounds(rig, selection)
    for _ in range(2):
        check(rig, backend, corrected)
        assert_bounds(rig, selection)


def assert_bounds(rig: Rig, selection: PageSelection) -> None:
    keys = rig.pool.k_buffer[1]
    for row, length in zip(rig.row_of, rig.lengths, strict=True):
        for start in range(0, length, PAGE):
            slots = rig.rows.req_to_token[row, start : min(start + PAGE, length)].long()
            bounds = selection.bounds[1][int(slots[0]) // PAGE]
            assert torch.equal(bounds[:, : keys.shape[2]], keys[slots].amax(dim=0))
            assert torch.equal(bounds[:, keys.shape[2] :], keys[slots].amin(dim=0))

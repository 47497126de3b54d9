# SPDX-License-Identifier: Apache-2.0
"""Pages selected in decode: bounds as keys are written, shifted and evicted pages, what is read."""

import math
from typing import Any

import pytest
import torch

from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import BatchRows
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.page_selection import PageSelection
from sglang_reasoncache.selection.quest import Quest

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 64, 4, 2, 8
SLOTS = PAGE * PAGES


def selection_on_host(policy: Any, keys: dict[int, torch.Tensor], page: int, rows: Any) -> Any:
    """Read by C++, whatever reads bounds elsewhere."""
    host = PageSelection(policy, keys, page, rows, None)
    host._on_gpu = False
    for bounds in host._bounds.values():
        bounds._paged = PagedKv(bounds.ends, bounds.ends[..., :1], backend="native")
        bounds.on_gpu = False
    return host


class World:
    """Two rows in one layer: pages as cached and shifted, and one that was evicted."""

    def __init__(self, *, shifted: bool, policy: Any = None) -> None:
        torch.manual_seed(5)
        self.keys = torch.randn(SLOTS, KV_HEADS, DIM) * 2
        self.values = torch.randn(SLOTS, KV_HEADS, DIM)
        self.lengths = torch.tensor([39, 9])
        self.rows = torch.full((3, 50), -1, dtype=torch.int32)
        self.cached_at = torch.zeros(SLOTS, dtype=torch.int32)
        pages = torch.randperm(PAGES)
        for row, length in ((2, 39), (0, 9)):
            for at in range(length):
                slot = int(pages[at // PAGE + 20 * row]) * PAGE + at % PAGE
                self.rows[row, at] = slot
                self.cached_at[slot] = at
        if shifted:
            # Positions 24 to 27 read the page of 8 to 11; 28 to 31 that of another request.
            self.rows[2, 24:28] = self.rows[2, 8:12]
            self.cached_at[self.rows[2, 28:32].long()] += 500
        self.rows[2, 16:20] = -1
        self.requests = torch.tensor([2, 0])
        self.query = torch.randn(2, HEADS, DIM) * 3
        self.policy = policy or Quest(budget=16, whole_layers=0)
        read = self.policy, {7: self.keys}, PAGE, self.rows, self.cached_at
        self.selection = PageSelection(*read)
        self.selection.update(7, torch.arange(SLOTS))
        rows = self.rows, self.requests, self.lengths, self.cached_at
        self.plan = plan_rows(*rows, num_slots=SLOTS)

    def begun(self) -> Any:
        """What the layer reads in a step that begins."""
        self.selection.begin(BatchRows(self.plan, self.requests, self.lengths, 39))
        return self.selection.plan(7, self.query, DIM**-0.5)

    def expected(self, row: int, length: int, query: torch.Tensor) -> list[int]:
        """Positions that are read: of pages by bounds of their keys, and of shifted pages."""
        bounds: dict[int, list[float]] = {}
        shifted = []
        for page in range(-(-length // PAGE)):
            slots = [int(s) for s in self.rows[row, page * PAGE : min(length, page * PAGE + PAGE)]]
            if slots[0] < 0:
                continue
            if page * PAGE != self.cached_at[slots[0]]:
                shifted.append(page)
                continue
            whole = self.keys[slots[0] // PAGE * PAGE :][:PAGE]
            ends = (side.repeat_interleave(2, dim=0) for side in (whole.amin(0), whole.amax(0)))
            logits = torch.maximum(*(query * end for end in ends)).sum(dim=1) * DIM**-0.5
            bounds[page] = logits.tolist()
        newest = (length - 1) // PAGE
        softmax = torch.tensor(list(bounds.values())).softmax(dim=0).sum(dim=1)
        shares = dict(zip(bounds, softmax.tolist(), strict=True))
        best = sorted((p for p in shares if p != newest), key=lambda p: -shares[p])
        pages = sorted([newest, *shifted, *best[: math.ceil(self.policy.budget / PAGE) - 1]])
        return [at for p in pages for at in range(p * PAGE, min(length, p * PAGE + PAGE))]


@pytest.mark.parametrize("budget", [1, 10, 16])
@pytest.mark.parametrize("shifted", [False, True])
def test_best_pages_are_read(shifted: bool, budget: int) -> None:
    """And the newest, in the order of the row: of 10 positions in pages of 4 three pages."""
    world = World(shifted=shifted, policy=Quest(budget=budget, whole_layers=0))
    assert world.selection.plan(7, world.query, DIM**-0.5) is None, "no step was begun"
    rows = world.begun()
    assert (rows.shift is not None) == shifted
    ends, held, read = rows.kv_indptr.tolist(), 0, 0
    for i, (row, length) in enumerate(((2, 39), (0, 9))):
        expected = torch.tensor(world.expected(row, length, world.query[i]))
        slots = world.rows[row, expected]
        assert torch.equal(rows.kv_indices[ends[i] : ends[i + 1]], slots)
        if shifted:
            found = expected - world.cached_at[slots.long()]
            assert torch.equal(rows.shift[ends[i] : ends[i + 1]].long(), found)
        if length > budget:
            held += int((world.rows[row, :length] >= 0).sum())
            read += len(expected)
    counts = {"positions_held": held, "positions_read": read}
    assert world.selection.describe() == {"name": "quest", **counts}
    assert world.selection.recent() == world.selection.describe()


@pytest.mark.parametrize("options", [(39, 0), (8, 1)], ids=["short rows", "first layers"])
def test_short_rows_and_first_layers_are_read_whole(options: tuple[int, int]) -> None:
    assert World(shifted=False, policy=Quest(*options)).begun() is None
    world = World(shifted=False)
    assert world.begun() is not None
    world.selection.forget()
    assert world.selection.plan(7, world.query, 1.0) is None, "a prefill came in between"


def test_bounds_without_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(PageBounds, "__init__", none)
    with pytest.raises(MemoryError, match="Tried to allocate"):
        World(shifted=False)

# SPDX-License-Identifier: Apache-2.0
"""Which pages a decode step reads: by bounds of keys, with pages that share or are evicted, within a budget."""

import math
import random

import pytest
import torch

from sglang_reasoncache.selection.pages import PageSelection
from sglang_reasoncache.selection.quest import Quest

PAGE = 4
PAGES = 64
HEADS = 4
KV_HEADS = 2
DIM = 8
SLOTS = PAGE * PAGES
LAYER = 7
SCALE = DIM**-0.5
LENGTHS = {2: 39, 0: 9}


class World:
    """Rows 2 and 0 of one layer. In the first, pages are as cached, and one was evicted. ``shares``: one of its
    pages names slots of two pages, another the slots of an earlier page, and the keys of a third one were
    cached elsewhere."""

    def __init__(
        self, quest: Quest, *, shares: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(5)
        self.quest = quest
        self.keys = (torch.randn(SLOTS, KV_HEADS, DIM) * 2).to(dtype)
        self.rows = torch.full((3, 50), -1, dtype=torch.int32)
        self.cached_at = torch.zeros(SLOTS, dtype=torch.int32)
        pages = torch.randperm(PAGES)
        for row, length in LENGTHS.items():
            for at in range(length):
                slot = int(pages[at // PAGE + 20 * row]) * PAGE + at % PAGE
                self.rows[row, at] = slot
                self.cached_at[slot] = at
        self.rows[2, 16:20] = -1
        #: Pages of row 2 that are always read.
        self.always: set[int] = set()
        if shares:
            self.rows[2, 22:24] = self.rows[2, 4:6]
            self.rows[2, 24:28] = self.rows[2, 8:12]
            self.cached_at[self.rows[2, 28:32].long()] += 500
            self.always = {5, 6, 7}
        self.requests = torch.tensor([*LENGTHS])
        self.lengths = torch.tensor([*LENGTHS.values()])
        self.query = torch.randn(len(LENGTHS), HEADS, DIM) * 3
        self.selection = PageSelection(
            quest, {LAYER: self.keys}, PAGE, self.rows, self.cached_at, "native"
        )

    def begin(self, *, decodes: bool) -> None:
        longest = int(self.lengths.max())
        self.selection.begin(self.requests, self.lengths, longest, decodes=decodes)

    def chosen(self) -> list[list[int]] | None:
        """The positions that each row reads in a decode step. None: all."""
        self.begin(decodes=False)
        self.selection.written(LAYER)
        self.begin(decodes=True)
        self.selection.written(LAYER)
        found = self.selection.choose(LAYER, self.query, SCALE)
        if found is None:
            return None
        rows, lengths = found
        assert lengths.tolist() == self.lengths.tolist()
        for row, of in zip(self.requests, rows, strict=True):
            kept = of[: self.rows.shape[1]]
            held = kept >= 0
            assert torch.equal(kept[held], self.rows[row, : len(kept)][held])
        return [(of >= 0).nonzero().flatten().tolist() for of in rows]

    def expected(self, number: int) -> list[int]:
        """What row ``number`` of the batch should read, from the largest logit of every page, key by key."""
        row = int(self.requests[number])
        length = int(self.lengths[number])
        held = [at for at in range(length) if self.rows[row, at] >= 0]
        if length <= self.quest.budget:
            return held
        newest = (length - 1) // PAGE
        always = self.always if row == 2 else set()
        logits = {}
        for page in {at // PAGE for at in held} - always:
            slots = self.rows[row, page * PAGE : min(page * PAGE + PAGE, length)].long()
            keys = self.keys[slots].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
            most = torch.maximum(
                self.query[number] * keys.amax(0), self.query[number] * keys.amin(0)
            )
            logits[page] = most.sum(dim=1) * SCALE
        shares = torch.stack([*logits.values()]).softmax(dim=0).sum(dim=1).tolist()
        ranked = sorted(zip(shares, logits, strict=True), reverse=True)
        best = [page for _, page in ranked if page != newest]
        pages = {newest, *always, *best[: math.ceil(self.quest.budget / PAGE) - 1]}
        return [at for at in held if at // PAGE in pages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("budget", [1, 8, 10, 16])
@pytest.mark.parametrize("shares", [False, True])
def test_the_best_pages_are_read(shares: bool, budget: int, dtype: torch.dtype) -> None:
    """Of 10 positions in pages of 4: three pages, the newest among them, beside those without bounds."""
    world = World(Quest(budget=budget, whole_layers=0), shares=shares, dtype=dtype)
    chosen = world.chosen()
    assert chosen is not None
    assert chosen == [world.expected(0), world.expected(1)]
    held = read = 0
    for row, length, positions in zip(world.requests, LENGTHS.values(), chosen, strict=True):
        if length > budget:
            held += int((world.rows[row, :length] >= 0).sum())
            read += len(positions)
    assert read < held
    assert world.selection.newly_counted() == (held, read)
    assert world.selection.newly_counted() == (0, 0)


def test_what_the_largest_logit_belongs_to_is_read() -> None:
    """Bounds are never below the logit of a key: if one key's logit exceeds all bounds, its page is read."""
    draw = random.Random(4)
    for _ in range(50):
        world = World(Quest(budget=8, whole_layers=0))
        at = draw.choice([at for at in range(36) if world.rows[2, at] >= 0])
        world.keys[world.rows[2, at].long()] = 20 * world.query[0].view(KV_HEADS, 2, DIM)[:, 0]
        chosen = world.chosen()
        assert chosen is not None and at in chosen[0]


def test_short_rows_and_first_layers_are_read_whole() -> None:
    assert World(Quest(budget=39, whole_layers=0)).chosen() is None
    assert World(Quest(budget=8, whole_layers=1)).chosen() is None
    world = World(Quest(budget=8, whole_layers=0))
    assert world.chosen() is not None
    world.begin(decodes=False)
    assert world.selection.choose(LAYER, world.query, SCALE) is None, "a prefill reads everything"
    world.selection.forget()
    assert world.selection.choose(LAYER, world.query, SCALE) is None, "no forward began"


def test_a_request_that_opted_out_is_read_whole() -> None:
    world = World(Quest(budget=8, whole_layers=0))
    world.selection.admit(world.requests, [True, False])
    chosen = world.chosen()
    assert chosen is not None
    held = (world.rows[world.requests[0]] >= 0).nonzero().flatten().tolist()
    assert chosen[0] == held and chosen[1] == world.expected(1)
    world.selection.admit(world.requests[:1], [False])
    assert world.chosen() == [world.expected(0), world.expected(1)], "the next request of that row"


def test_a_row_of_which_every_page_shares_is_read_whole() -> None:
    world = World(Quest(budget=8, whole_layers=0))
    world.cached_at += 1
    assert world.chosen() == [[*range(16), *range(20, 39)], [*range(9)]]


def test_a_page_grows_token_by_token_and_starts_anew() -> None:
    """As a page is filled its bounds are those of the tokens it has, not of what its slots held before."""
    world = World(Quest(budget=8, whole_layers=0))
    first = int(world.rows[2, 32])
    for length in range(33, 40):
        world.lengths[0] = length
        world.keys[world.rows[2, length - 1].long()] = torch.randn(KV_HEADS, DIM)
        world.begin(decodes=True)
        world.selection.written(LAYER)
        page = (length - 1) // PAGE * PAGE
        slots = world.rows[2, page:length].long()
        bounds = world.selection.bounds[LAYER][int(slots[0]) // PAGE]
        torch.testing.assert_close(bounds[:, :DIM], world.keys[slots].amax(0))
        torch.testing.assert_close(bounds[:, DIM:], world.keys[slots].amin(0))
    assert first % PAGE == 0


def test_missing_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(PageSelection, "_empty", none)
    with pytest.raises(MemoryError, match="Tried to allocate"):
        World(Quest(whole_layers=0))

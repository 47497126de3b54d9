# SPDX-License-Identifier: Apache-2.0
"""Pages selected in decode: bounds as keys are written, shifted and evicted pages, what is read."""

import itertools
import math
from typing import Any

import pytest
import torch

from sglang_reasoncache import registry
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import BatchRows, RowPlan
from sglang_reasoncache.policy_options import OptionError
from sglang_reasoncache.selection.contract import Quest
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.page_selection import PageSelection
from tests.kernels.pools import make_rotation

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 64, 4, 2, 8
SLOTS = PAGE * PAGES


class Wrong(Quest):
    """Answers something else."""

    answer: Any = None

    def keep(self, shares: Any, held: Any, newest: Any, page: int) -> Any:
        return self.answer(super().keep(shares, held, newest, page), newest, shares, held)


def wrong(answer: Any, budget: int = 16) -> Wrong:
    policy = Wrong(budget=budget, whole_layers=0)
    object.__setattr__(policy, "answer", answer)
    return policy


NONSENSE = [
    (lambda keep, *_: None, "malformed", "must give a plain bool tensor .*, got NoneType"),
    (lambda keep, *_: keep.float(), "malformed", "got Tensor torch.float32"),
    (lambda keep, *_: keep[:, :-1], "malformed", "must give a plain bool tensor"),
    (lambda keep, *_: keep.to_sparse(), "malformed", "must give a plain bool tensor"),
    (lambda keep, *_: 1 / 0, "policy_failed", "ZeroDivisionError: division by zero"),
]


def selection_on_host(policy: Any, keys: dict[int, torch.Tensor], page: int, rows: Any) -> Any:
    """Read by PyTorch, whatever reads bounds elsewhere."""
    host = PageSelection("quest", policy, keys, page, rows, None)
    for bounds in host._bounds.values():
        bounds._paged = PagedKv(bounds.ends, bounds.ends[..., :1], backend="torch")
    return host


def test_shares_are_by_the_largest_possible_logit() -> None:
    """Against every corner of the box between the bounds, page by page and head by head."""
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(SLOTS, KV_HEADS, 3, generator=generator)
    query = torch.randn(1, HEADS, 3, generator=generator)
    bounds = PageBounds(keys, PAGE)
    bounds.update(torch.arange(SLOTS))
    pages = [5, 9, 0, 40]
    logits = torch.full((len(pages), HEADS), float("-inf"))
    for (i, page), head in itertools.product(enumerate(pages), range(HEADS)):
        own = keys[page * PAGE : page * PAGE + PAGE, head // (HEADS // KV_HEADS)]
        ends = torch.stack((own.amin(dim=0), own.amax(dim=0)), dim=1)
        corners = torch.cartesian_prod(*ends)
        logits[i, head] = (corners @ query[0, head]).max()
        assert logits[i, head] >= (own @ query[0, head]).max()
    found = bounds.largest(query.expand(4, -1, -1), torch.tensor(pages))
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    plan = RowPlan(torch.tensor([0, 4]).int(), torch.tensor(pages).int(), None)
    expected = (logits * 0.3).softmax(dim=0).sum(dim=1)
    torch.testing.assert_close(bounds.shares(query, plan, 0.3), expected, rtol=1e-4, atol=1e-6)


class World:
    """Two rows in one layer: pages as cached and shifted, and one that was evicted."""

    def __init__(self, *, shifted: bool, policy: Any = None) -> None:
        torch.manual_seed(5)
        rotation = make_rotation(DIM, True)
        assert rotation is not None
        self.rotation = rotation
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
        read = "quest", self.policy, {7: self.keys}, PAGE, self.rows, self.cached_at
        self.selection = PageSelection(*read, self.rotation)
        self.selection.update(7, torch.arange(SLOTS))
        rows = self.rows, self.requests, self.lengths, self.cached_at
        self.plan = plan_rows(*rows, num_slots=SLOTS)

    def begun(self) -> Any:
        """What the layer reads in a step that begins."""
        self.selection.begin(BatchRows(self.plan, self.requests, self.lengths, 39), False)
        return self.selection.plan(7, self.query, DIM**-0.5)

    def expected(self, row: int, length: int, query: torch.Tensor) -> list[int]:
        """Positions that are read, by bounds of the keys as they lie and a query rotated back."""
        bounds: dict[int, list[float]] = {}
        for page in range(-(-length // PAGE)):
            slots = [int(s) for s in self.rows[row, page * PAGE : min(length, page * PAGE + PAGE)]]
            if slots[0] < 0:
                continue
            whole = self.keys[slots[0] // PAGE * PAGE :][:PAGE]
            shift = torch.tensor([page * PAGE - int(self.cached_at[slots[0]])])
            rotated = self.rotation.rotate(query[None], -shift)[0]
            ends = (side.repeat_interleave(2, dim=0) for side in (whole.amin(0), whole.amax(0)))
            logits = torch.maximum(*(rotated * end for end in ends)).sum(dim=1) * DIM**-0.5
            bounds[page] = logits.tolist()
        newest = (length - 1) // PAGE
        softmax = torch.tensor(list(bounds.values())).softmax(dim=0).sum(dim=1)
        shares = dict(zip(bounds, softmax.tolist(), strict=True))
        best = sorted((p for p in shares if p != newest), key=lambda p: -shares[p])
        pages = sorted([newest, *best[: self.policy.budget // PAGE - 1]])
        return [at for p in pages for at in range(p * PAGE, min(length, p * PAGE + PAGE))]


@pytest.mark.parametrize("shifted", [False, True])
def test_best_pages_are_read(shifted: bool) -> None:
    world = World(shifted=shifted)
    assert world.selection.plan(7, world.query, DIM**-0.5) is None, "no step was begun"
    found = world.begun()
    assert found is not None
    rows, among = found[0], world.selection._among
    assert (rows.shift is not None) == shifted
    # The same entries of the whole plan, in its order.
    assert torch.equal(rows.kv_indices, world.plan.kv_indices[among])
    if rows.shift is not None and world.plan.shift is not None:
        assert torch.equal(rows.shift, world.plan.shift[among])
    bounds = rows.kv_indptr.tolist()
    for i, (row, length) in enumerate(((2, 39), (0, 9))):
        slots = rows.kv_indices[bounds[i] : bounds[i + 1]]
        expected = world.expected(row, length, world.query[i])
        assert slots.tolist() == world.rows[row, expected].tolist()
        assert len(expected) < 17
    counts = {"positions_held": len(among), "positions_read": len(rows.kv_indices)}
    assert len(among) == len(world.plan.kv_indices)
    assert world.selection.describe() == {"name": "quest", **counts, "refusals": {}}
    assert world.selection.recent() == world.selection.describe()


@pytest.mark.parametrize("options", [(39, 0), (8, 1)], ids=["short rows", "first layers"])
def test_short_rows_and_first_layers_are_read_whole(options: tuple[int, int]) -> None:
    assert World(shifted=False, policy=Quest(*options)).begun() is None
    world = World(shifted=False)
    assert world.begun() is not None
    world.selection.forget()
    assert world.selection.plan(7, world.query, 1.0) is None, "a prefill came in between"


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        *((answer, refusal) for answer, refusal, _ in NONSENSE),
        (lambda keep, *_: keep.to("meta"), "malformed"),
        (lambda keep, *_: keep.as_subclass(torch.nn.Buffer), "malformed"),
        (lambda keep, newest, *_: keep.scatter(1, newest[:, None], False), "newest"),
    ],
)
def test_nonsense_is_refused_by_name(answer: Any, refusal: str) -> None:
    world = World(shifted=False, policy=wrong(answer))
    found = world.begun()
    assert world.selection.describe()["refusals"] == {refusal: 1}
    if refusal == "newest":
        assert found is not None
        expected = world.expected(2, 39, world.query[0])
        assert found[0].kv_indices[: len(expected)].tolist() == world.rows[2, expected].tolist()
    else:
        assert found is None


def test_pages_that_a_row_does_not_have_cost_nothing() -> None:
    world = World(shifted=False, policy=wrong(lambda keep, *_: torch.ones_like(keep)))
    assert torch.equal(world.begun()[0].kv_indices, world.plan.kv_indices)


def in_place(keep: Any, newest: Any, shares: Any, held: Any) -> Any:
    newest -= 100
    held.fill_(True)
    shares.zero_()
    return keep


@pytest.mark.parametrize("shifted", [False, True])
def test_layers_get_the_same_whatever_a_selector_writes(shifted: bool) -> None:
    found = []
    for policy in (None, wrong(in_place)):
        world = World(shifted=shifted, policy=policy)
        for plan in (world.begun, lambda w=world: w.selection.plan(7, w.query, DIM**-0.5)):
            assert plan() is not None
            found.append(world.selection._among)
        assert world.selection.describe()["refusals"] == {}
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("budget", None), ("budget", 0), ("budget", 1e3), ("budget", True), ("whole_layers", -1)],
)
def test_a_selector_must_say_what_it_reads_whole(key: str, value: Any) -> None:
    class Odd:
        budget: Any = 16
        whole_layers: Any = 0
        keep = Quest.keep

    rows = torch.zeros(1, 8, dtype=torch.int32)
    read = {7: torch.zeros(SLOTS, 1, 2)}, PAGE, rows, None
    setattr(Odd, key, value)
    with pytest.raises(ValueError, match=f"--reasoncache-policy odd: {key} .* got {value!r}"):
        PageSelection("odd", Odd(), *read)
    delattr(Odd, key)
    with pytest.raises(ValueError, match=f"{key} .* got AttributeError"):
        PageSelection("odd", Odd(), *read)


def test_bounds_without_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(PageBounds, "__init__", none)
    with pytest.raises(MemoryError, match="Tried to allocate"):
        World(shifted=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 4, 5, 12, 28, 500])
def test_the_newest_page_and_the_best_are_read(seed: int, budget: int) -> None:
    """Of 40 positions in pages of 16 three pages are read."""
    by_hand = torch.tensor([[0.9, 0.7, 1.1, 0.1]]), torch.ones(1, 4).bool(), torch.tensor([3])
    assert Quest(budget=40).keep(*by_hand, 16).tolist() == [[True, False, True, True]]
    shares = torch.rand(3, 7, generator=torch.Generator().manual_seed(seed))
    held = torch.ones(3, 7, dtype=torch.bool)
    held[0, 3] = held[1, 5:] = False
    newest = torch.tensor([6, 4, 6])
    keep = Quest(budget=budget).keep(shares, held, newest, PAGE)
    assert keep.dtype == torch.bool
    for row, last in enumerate(newest.tolist()):
        others = [page for page in held[row].nonzero()[:, 0].tolist() if page != last]
        others.sort(key=lambda page: -float(shares[row, page]))
        expected = {last, *others[: math.ceil(budget / PAGE) - 1]}
        assert set(keep[row].nonzero()[:, 0].tolist()) == expected


def test_options() -> None:
    choice = registry.parse("reasoncache+quest:budget=64:whole_layers=0+keydiff:budget=9")
    assert choice.selector == ("quest", Quest(budget=64, whole_layers=0))
    assert choice.shares and [name for name, _ in choice.evictors] == ["keydiff"]
    for options, key in (({"budget": 0}, "budget"), ({"whole_layers": -1}, "whole_layers")):
        with pytest.raises(OptionError) as error:
            Quest(**options)
        assert error.value.key == key

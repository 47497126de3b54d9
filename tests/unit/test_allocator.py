# SPDX-License-Identifier: Apache-2.0
"""Allocators that hand a shared page out again only after its last reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_reasoncache.cache.admission import SharingBudget
from sglang_reasoncache.cache.allocator import (
    SharedPagedAllocator,
    SharedTokenAllocator,
    shared_allocator_of,
)
from sglang_reasoncache.cache.references import ReferenceCountError

SLOTS = 16
PAGE = 4
COMMON: dict[str, Any] = dict(dtype=torch.float32, device="cpu", kvcache=None)


Allocator = SharedTokenAllocator | SharedPagedAllocator


def make(page: int, need_sort: bool = False) -> Allocator:
    if page == 1:
        return SharedTokenAllocator(SLOTS, need_sort=need_sort, **COMMON)
    return SharedPagedAllocator(SLOTS, page_size=page, need_sort=need_sort, **COMMON)


@pytest.fixture(params=[False, True], ids=["in-order", "need-sort"])
def need_sort(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def token(need_sort: bool) -> Allocator:
    return make(1, need_sort)


@pytest.fixture
def paged(need_sort: bool) -> Allocator:
    return make(PAGE, need_sort)


@pytest.fixture(params=[1, PAGE], ids=["page1", "page4"])
def either(request: pytest.FixtureRequest, need_sort: bool) -> Allocator:
    return make(request.param, need_sort)


def take(allocator: Allocator, pages: int) -> list[int]:
    """Ids of newly allocated pages."""
    page = allocator.page_size
    return (allocator.alloc(pages * page)[::page] // page).tolist()


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def page_slots(*pages: int) -> torch.Tensor:
    """All slots of ``pages``, as a row names them."""
    return (slots(*pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def free_list(allocator: Allocator) -> list[int]:
    """Free page ids; fails if one is there twice."""
    pages = sorted(allocator.get_all_free_pages().tolist())
    assert len(set(pages)) == len(pages), f"free twice: {pages}"
    return pages


class DeviceReads(TorchDispatchMode):
    """Notes the operators whose result depends on what is in a tensor: a GPU is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        masks = args[1] if func is torch.ops.aten.index.Tensor else ()
        if any(mask is not None and mask.dtype == torch.bool for mask in masks) or func in (
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
            torch.ops.aten._local_scalar_dense.default,
        ):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_eviction_does_not_wait_for_the_device(either: Allocator) -> None:
    page = either.page_size
    pages = either.alloc(2 * page)[::page] // page
    with DeviceReads() as reads:
        assert either.evict(pages[:1]) == page
        assert either.evict(pages[1:]) == page
    assert reads.found == []
    # A row's own entries tell which of them are evicted positions.
    with reads:
        either.free(torch.full((page,), -1))
    assert reads.found
    assert len(free_list(either)) == SLOTS // page


# -- page size 1 ----------------------------------------------------------------


def test_unshared_slots_come_back_at_once(token: Allocator) -> None:
    taken = token.alloc(5)
    assert token.available_size() == SLOTS - 5
    token.free(taken)
    assert free_list(token) == list(range(1, SLOTS + 1))


def test_shared_slot_comes_back_with_its_last_reference(token: Allocator) -> None:
    first, second = token.alloc(2).tolist()
    token.share([first, first])
    for _ in range(2):
        token.free(slots(first))
        assert token.available_size() == SLOTS - 2
    token.free(slots(first))
    assert free_list(token) == [s for s in range(1, SLOTS + 1) if s != second]


def test_slot_named_twice_in_one_call_loses_two_references(token: Allocator) -> None:
    first, second = token.alloc(2).tolist()
    token.share([first])
    token.free(slots(first, second, first))
    assert free_list(token) == list(range(1, SLOTS + 1))
    assert len(token.references) == 0


def test_free_group_counts_references_across_its_calls(token: Allocator) -> None:
    """SGLang frees a batch's finished requests in one group."""
    first, second, third = token.alloc(3).tolist()
    token.share([first, first, third])
    token.free_group_begin()
    token.free(slots(first, second))
    token.free(slots(first, third))
    assert token.available_size() == SLOTS - 3
    assert token.references == {first: 3, third: 2}
    token.free_group_end()
    assert free_list(token) == [s for s in range(1, SLOTS + 1) if s not in (first, third)]
    assert len(token.references) == 0
    token.free(slots(first, third))
    assert token.available_size() == SLOTS


def test_double_free_is_noticed_while_anything_is_shared(token: Allocator) -> None:
    first, second = token.alloc(2).tolist()
    token.share([first])
    with pytest.raises(ReferenceCountError):
        token.free(slots(first, second, second))


def test_free_page_ids_counts_too(token: Allocator) -> None:
    first, second = token.alloc(2).tolist()
    token.share([first])
    token.free_page_ids(slots(first, second))
    assert token.available_size() == SLOTS - 1


# -- page size above 1 ------------------------------------------------------------


def test_segment_frees_each_page_of_a_row(paged: Allocator) -> None:
    a, b = take(paged, 2)
    paged.share([a])
    # A row whose second page was redirected to its first; the last page is cut.
    paged.free_segment(page_slots(a, a, b)[: 2 * PAGE + 1], start_pos=0)
    assert free_list(paged) == [1, 2, 3, 4]
    assert len(paged.references) == 0


def test_shared_page_survives_one_of_two_rows(paged: Allocator) -> None:
    a, b = take(paged, 2)
    paged.share([a])
    paged.free_segment(page_slots(a, b), start_pos=4 * PAGE)
    assert free_list(paged) == sorted({1, 2, 3, 4} - {a})
    paged.free_segment(page_slots(a), start_pos=0)
    assert free_list(paged) == [1, 2, 3, 4]


@pytest.mark.parametrize("order", [("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")])
@pytest.mark.parametrize("cut", [0, 1, PAGE - 1])
def test_free_counts_a_page_named_twice(paged: Allocator, order: tuple[str, ...], cut: int) -> None:
    """Stock ``free`` would deduplicate and lose the second reference."""
    a, b = take(paged, 2)
    paged.share([a])
    pages = [{"a": a, "b": b}[name] for name in order]
    paged.free(page_slots(*pages)[: 3 * PAGE - cut])
    assert free_list(paged) == [1, 2, 3, 4]


def test_free_without_shared_pages_is_the_stock_one(paged: Allocator) -> None:
    """Any order and any part of a page, as SGLang allows."""
    a, b = take(paged, 2)
    paged.free(page_slots(a, b)[[7, 0, 5, 2]])
    assert free_list(paged) == [1, 2, 3, 4]


def test_free_group_counts_pages_of_both_kinds_of_free(paged: Allocator) -> None:
    a, b, c = take(paged, 3)
    paged.share([a, a, b])
    paged.free_group_begin()
    paged.free(page_slots(a, c))
    paged.free_segment(page_slots(a, b), start_pos=0)
    paged.free_segment(page_slots(b), start_pos=0)
    assert paged.available_size() == SLOTS - 3 * PAGE
    paged.free_group_end()
    assert free_list(paged) == sorted({1, 2, 3, 4} - {a})
    assert len(paged.references) == 0
    paged.free_page_ids(slots(a))
    assert free_list(paged) == [1, 2, 3, 4]


def test_nothing_freed_is_nothing_changed(paged: Allocator) -> None:
    taken = paged.alloc(PAGE)
    paged.share([int(taken[0]) // PAGE])
    paged.free(slots())
    paged.free_segment(slots(), start_pos=0)
    paged.free_page_ids(slots())
    assert paged.available_size() == SLOTS - PAGE


# -- both ---------------------------------------------------------------------------


def test_freed_pages_can_all_be_allocated_again(either: Allocator) -> None:
    page = either.page_size
    taken = either.alloc(SLOTS)
    assert either.alloc(page) is None
    either.share((taken[::page] // page).tolist())
    either.free_segment(taken, start_pos=0)
    assert either.alloc(page) is None
    either.free_segment(taken, start_pos=0)
    assert sorted(either.alloc(SLOTS).tolist()) == list(range(page, SLOTS + page))


def test_shifted_slots_outlive_their_references(either: Allocator) -> None:
    """A slot in the tree can have one reference left and still be shifted, until a flush."""
    assert not either.has_shifted_slots
    [page] = take(either, 1)
    either.share([page])
    either.free_page_ids(slots(page))
    assert len(either.references) == 0
    assert either.has_shifted_slots
    either.share([page])
    either.clear()
    assert len(either.references) == 0
    assert not either.has_shifted_slots
    assert either.available_size() == SLOTS


@pytest.mark.parametrize("credit", [None, 0.0, 0.25])
def test_credit_above_zero_replaces_the_prefill_budget(credit: float | None) -> None:
    allocator = make(1)
    if credit is not None:
        allocator.credit_source = lambda: credit
    budget = allocator.create_prefill_budget(None, num_mixed_decode_tokens=3)  # type: ignore[arg-type]
    assert type(budget) is (SharingBudget if credit else PrefillBudget)
    assert budget.total_offset == budget.current_offset == 3


def test_rebuilt_allocator_keeps_size_page_and_pool() -> None:
    pool = object()
    common: dict[str, Any] = {**COMMON, "kvcache": pool, "need_sort": True}
    token = shared_allocator_of(TokenToKVPoolAllocator(SLOTS, **common))
    paged = shared_allocator_of(PagedTokenToKVPoolAllocator(SLOTS, page_size=PAGE, **common))
    assert (type(token), type(paged)) == (SharedTokenAllocator, SharedPagedAllocator)
    for allocator, page in ((token, 1), (paged, PAGE)):
        assert allocator.size == allocator.available_size() == SLOTS
        assert allocator.page_size == page
        assert allocator.get_kvcache() is pool
        assert allocator.need_sort
        assert allocator.dtype == torch.float32


def test_any_other_allocator_is_refused() -> None:
    class SlidingWindow(TokenToKVPoolAllocator):
        """A subclass may keep books of its own."""

    with pytest.raises(ValueError, match="SlidingWindow"):
        shared_allocator_of(SlidingWindow(SLOTS, need_sort=False, **COMMON))
    with pytest.raises(ValueError, match="SharedTokenAllocator"):
        shared_allocator_of(make(1))

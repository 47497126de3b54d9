# SPDX-License-Identifier: Apache-2.0
"""Tests SGLang's allocators with reference counts of shared pages."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_reasoncache.cache.allocator import (
    SharedPagedAllocator,
    SharedTokenAllocator,
    shared_allocator_of,
)
from sglang_reasoncache.cache.references import ReferenceCountError
from tests.property.world import allocator_of
from tests.strict_device import Refused, WouldWait

SLOTS = 16
PAGE = 4
Allocator = SharedTokenAllocator | SharedPagedAllocator


@pytest.fixture(params=[1, PAGE], ids=["page1", "page4"])
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[False, True], ids=["in-order", "need-sort"])
def either(request: pytest.FixtureRequest, page: int) -> Allocator:
    return allocator_of(page, SLOTS, need_sort=request.param)


def take(allocator: Allocator, pages: int) -> list[int]:
    """Ids of newly allocated pages."""
    page = allocator.page_size
    return (allocator.alloc(pages * page)[::page] // page).tolist()


def share(allocator: Allocator, pages: list[int]) -> None:
    """Adds a reference to a page for each of its occurrences in ``pages``."""
    allocator.commit(allocator.prepare([], pages))


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def page_slots(page: int, *pages: int) -> torch.Tensor:
    """All slots of ``pages``, in the order in which a row has them."""
    return (slots(*pages)[:, None] * page + torch.arange(page)).flatten()


def free_list(allocator: Allocator) -> list[int]:
    """The ids of free pages; fails if an id occurs twice."""
    pages = sorted(allocator.get_all_free_pages().tolist())
    assert len(set(pages)) == len(pages), f"free twice: {pages}"
    return pages


def test_an_eviction_does_not_wait_for_the_device(either: Allocator, page: int) -> None:
    row = either.alloc(2 * page)
    with Refused():
        for some in (row[:page], row[page:]):
            change = either.prepare_known(some, np.zeros(page, dtype=np.int64))
            assert either.commit(change, evicts=True) == page
        # ``free`` must read the entries on the device to know which of them are evicted.
        with pytest.raises(WouldWait):
            either.free(torch.full((page,), -1))
    either.free(torch.full((page,), -1))
    assert len(free_list(either)) == SLOTS // page


@settings(max_examples=500, deadline=None)
@given(
    st.data(),
    st.sampled_from((1, PAGE)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("free", "free_segment", "free_page_ids", "cut-1", "cut-3", "mixed")),
)
def test_pages_come_back_with_their_last_reference(
    data: st.DataObject, page: int, need_sort: bool, grouped: bool, how: str
) -> None:
    """Rows are freed one by one, or in a free group, as SGLang does for requests that finish in one batch. The
    last page of a row may be incomplete. A page that is named twice in one call loses two references."""
    allocator = allocator_of(page, SLOTS, need_sort=need_sort)
    ids = take(allocator, 3)
    more = data.draw(st.lists(st.sampled_from(ids), max_size=3))
    share(allocator, more)
    counted = dict(allocator.references)
    left = Counter([*ids, *more])
    freed = data.draw(st.permutations([*ids, *more]))[: data.draw(st.integers(0, 6))]
    calls = data.draw(st.integers(1, 3))
    if grouped:
        allocator.free_group_begin()
    for pages in (freed[i::calls] for i in range(calls)):
        row = page_slots(page, *pages)
        if how == "free_page_ids":
            allocator.free_page_ids(slots(*pages))
        elif how == "free_segment":
            allocator.free_segment(row, start_pos=4 * page)
        elif how == "mixed":
            allocator.free(row.reshape(-1, page).T.flatten())
        else:
            cut = int(how.partition("-")[2] or 0) if page > 1 else 0
            allocator.free(row[: len(row) - cut])
    if grouped:
        if how != "free_page_ids":
            assert allocator.available_size() == SLOTS - 3 * page
            assert allocator.references == counted
        allocator.free_group_end()
    left.subtract(freed)
    assert free_list(allocator) == [at for at in range(1, SLOTS // page + 1) if not left[at]]
    assert allocator.references == {at: count for at, count in left.items() if count > 1}


def test_double_free_is_noticed_while_anything_is_shared() -> None:
    """While nothing is shared, SGLang's ``free`` runs. It accepts slots in any order and parts of pages."""
    token = allocator_of(1, SLOTS)
    paged = allocator_of(PAGE, SLOTS)
    first, second = token.alloc(2).tolist()
    share(token, [first])
    assert first in token.references and second not in token.references
    with pytest.raises(ReferenceCountError):
        token.free(slots(first, second, second))
    paged.free(page_slots(PAGE, *take(paged, 2))[[7, 0, 5, 2]])
    assert free_list(paged) == [1, 2, 3, 4]


def test_shifted_slots_outlive_their_references(either: Allocator) -> None:
    """A slot with one reference left may still be shifted: ``has_shifted_slots`` stays True until a flush."""
    assert not either.has_shifted_slots
    [page] = take(either, 1)
    share(either, [page])
    either.free_page_ids(slots(page))
    assert len(either.references) == 0 and either.has_shifted_slots
    share(either, [page])
    either.clear()
    assert len(either.references) == 0 and not either.has_shifted_slots
    assert either.available_size() == SLOTS


def test_without_an_owner_a_prefill_budget_counts_as_sglangs() -> None:
    allocator = allocator_of(1, SLOTS)
    tree: Any = SimpleNamespace(evictable_size=lambda: 2, supports_mamba=lambda: False)
    tree.req_to_token_pool = SimpleNamespace(size=4, available_size=lambda: 4)
    ours = allocator.create_prefill_budget(tree, num_mixed_decode_tokens=3)
    stock = PrefillBudget(allocator, tree, num_mixed_decode_tokens=3)
    for each in (ours, stock):
        each.reserve(4, 5)
    assert (ours.total_offset, ours.current_offset) == (stock.total_offset, stock.current_offset)
    assert (ours.remaining_total, ours.remaining_current) == (SLOTS + 2 - 13, SLOTS + 2 - 8)
    assert (stock.remaining_total, stock.remaining_current) == (SLOTS + 2 - 13, SLOTS + 2 - 8)


def test_rebuilt_allocator_keeps_size_page_and_pool(page: int) -> None:
    pool = object()
    allocator = allocator_of(page, SLOTS, pool, need_sort=True)
    assert type(allocator) is (SharedTokenAllocator if page == 1 else SharedPagedAllocator)
    assert allocator.size == allocator.available_size() == SLOTS and allocator.page_size == page
    assert allocator.get_kvcache() is pool
    assert allocator.need_sort and allocator.dtype == torch.float32


def test_any_other_allocator_is_refused() -> None:
    class SlidingWindow(TokenToKVPoolAllocator):
        """A subclass of an allocator may count slots in another way, so it is refused too."""

    pool: Any = None
    with pytest.raises(ValueError, match="SlidingWindow"):
        shared_allocator_of(SlidingWindow(SLOTS, torch.float32, "cpu", pool, need_sort=False))
    with pytest.raises(ValueError, match="SharedTokenAllocator"):
        shared_allocator_of(allocator_of(1, SLOTS))

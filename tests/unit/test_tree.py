# SPDX-License-Identifier: Apache-2.0
"""Prefix tree with shared slots, on hand-made rows.

Rows and token sequences are written as strings: every letter of a row is a page
(a slot at page size 1), the same letter twice is a shared one. Sizes are in
pages, so each case holds for every page size.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.tree import SharedRadixCache
from sglang_reasoncache.plugin.controller import Controller
from sglang_reasoncache.sharing.state import OPT_OUT_KEY, RequestState, attach

PAGES = 24

pytestmark = pytest.mark.usefixtures("published_config")


class _Controller:
    """What the tree asks of a controller, without a policy behind it."""

    state_of = staticmethod(Controller.state_of)
    allows = staticmethod(Controller.allows)

    def __init__(self) -> None:
        self.released: list[Any] = []
        self.resets = 0

    def on_release(self, req: Any) -> None:
        self.released.append(req)

    def reset(self) -> None:
        self.resets += 1

    def after_chunk(self, req: Any, written: int) -> None:
        raise AssertionError("no prompt is kept")

    def keeps_prompt(self, req: Any) -> bool:
        return False


class Bench:
    """A tree over a small pool, spoken to in letters."""

    def __init__(self, page: int, publish_aliased: bool) -> None:
        self.page = page
        common: dict[str, Any] = dict(
            dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
        )
        size = PAGES * page
        self.allocator = shared_allocator_of(
            TokenToKVPoolAllocator(size, **common)
            if page == 1
            else PagedTokenToKVPoolAllocator(size, page_size=page, **common)
        )
        self.rows = ReqToTokenPool(4, size, "cpu", False)
        self.tree = SharedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
            ),
            publish_aliased=publish_aliased,
        )
        self.controller = _Controller()
        self.tree.controller = self.controller
        self._pages: dict[str, int] = {}

    def tokens(self, text: str) -> array[int]:
        return array("q", [ord(letter) for letter in text for _ in range(self.page)])

    def request(self, text: str, exact_only: bool = False) -> Req:
        params = SamplingParams(custom_params={OPT_OUT_KEY: False} if exact_only else None)
        return Req("r", "", self.tokens(text), params)

    def match(self, text: str, exact_only: bool = False) -> MatchResult:
        key = RadixKey(self.tokens(text))
        return self.tree.match_prefix(
            MatchPrefixParams(key=key, req=self.request(text, exact_only))
        )

    def matched(self, text: str, exact_only: bool = False) -> int:
        """Pages of ``text`` that a request gets from the tree."""
        return self.match(text, exact_only).device_prefix_len // self.page

    def run(self, text: str, row: str, *, protected: int = 0, exact_only: bool = False) -> Req:
        """A request that has computed ``text`` into ``row``, of which the tree owns the start."""
        req = self.request(text, exact_only)
        if protected:
            result = self.match(text[:protected])
            assert result.device_prefix_len == protected * self.page
            req.lock = self.tree.lock(result.last_device_node)
        for letter in row[protected:]:
            if letter in self._pages:
                self.allocator.share([self._pages[letter]])
            else:
                self._pages[letter] = int(self.allocator.alloc(self.page)[0]) // self.page
        pages = torch.tensor([self._pages[letter] for letter in row])
        slots = (pages[:, None] * self.page + torch.arange(self.page)).flatten()
        assert self.rows.alloc([req]) is not None
        self.rows.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        req.kv.cache_protected_len = protected * self.page
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(slots)
        return req

    def finish(self, req: Req, first_shared: int | None = None) -> None:
        state = attach(req, RequestState(followed=None))
        if first_shared is not None:
            state.mark_shared(first_shared * self.page)
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=True)

    def leave(
        self, text: str, row: str, *, first_shared: int | None = None, protected: int = 0
    ) -> None:
        """A request ran and finished."""
        self.finish(self.run(text, row, protected=protected), first_shared)

    def evict(self, pages: int) -> int:
        """Evict; return pages that came back."""
        before = self.allocator.available_size()
        result = self.tree.evict(EvictParams(num_tokens=pages * self.page))
        freed = self.allocator.available_size() - before
        assert result.num_tokens_evicted == freed
        return freed // self.page

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Evictable, protected and aliased, in pages."""
        tree = self.tree
        sizes = (tree.evictable_size(), tree.protected_size(), tree.alias_positions)
        assert all(size % self.page == 0 for size in sizes)
        evictable, protected, aliased = (size // self.page for size in sizes)
        return evictable, protected, aliased

    @property
    def free(self) -> int:
        """Free pages, each counted once."""
        pages = self.allocator.get_all_free_pages().tolist()
        assert len(set(pages)) == len(pages)
        return len(pages)


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def aliased(page: int) -> Bench:
    return Bench(page, publish_aliased=True)


@pytest.fixture
def exact(page: int) -> Bench:
    return Bench(page, publish_aliased=False)


# -- counting ---------------------------------------------------------------------


def test_shared_page_counts_once_at_its_topmost_position(aliased: Bench) -> None:
    aliased.leave("123456", "abcabd", first_shared=3)
    assert aliased.sizes == (4, 0, 2)
    assert aliased.free == PAGES - 4


def test_page_shared_by_a_later_node_counts_where_it_was_first(aliased: Bench) -> None:
    """A follow-up turn refers to what the tree owns."""
    aliased.leave("123", "abc")
    aliased.leave("123456", "abcbdb", protected=3, first_shared=3)
    assert aliased.sizes == (4, 0, 2)
    assert aliased.evict(1) == 1
    assert aliased.sizes == (3, 0, 0)
    assert aliased.evict(3) == 3
    assert aliased.free == PAGES


def test_branches_share_what_their_common_ancestor_holds(aliased: Bench) -> None:
    aliased.leave("12", "ab")
    aliased.leave("123", "aba", protected=2, first_shared=2)
    aliased.leave("124", "abb", protected=2, first_shared=2)
    assert aliased.sizes == (2, 0, 2)
    assert aliased.free == PAGES - 2
    assert aliased.evict(2) == 2
    assert aliased.free == PAGES


def test_split_divides_aliases_between_the_halves(aliased: Bench) -> None:
    aliased.leave("123456", "abcabd", first_shared=3)
    upper = aliased.match("1234").last_device_node
    assert aliased.sizes == (4, 0, 2)
    lock = aliased.tree.lock(upper)
    # The lower half holds b again, and d.
    assert aliased.sizes == (1, 3, 2)
    assert aliased.evict(9) == 1
    assert aliased.sizes == (0, 3, 1)
    assert aliased.free == PAGES - 3
    aliased.tree.unlock(lock)
    assert aliased.sizes == (3, 0, 1)
    assert aliased.evict(1) == 3
    assert aliased.sizes == (0, 0, 0)
    assert aliased.free == PAGES


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("first", range(1, 6))
def test_split_anywhere_keeps_the_sums(aliased: Bench, first: int, at: int) -> None:
    """Halves are split again; every position stays with its node."""
    aliased.leave("123456", "aababb", first_shared=1)
    assert aliased.matched("123456"[:first]) == first
    assert aliased.matched("123456"[:at]) == at
    assert aliased.sizes == (2, 0, 4)
    aliased.tree.lock(aliased.match("123456"[:at]).last_device_node)
    distinct = len(set("aababb"[:at]))
    assert aliased.sizes == (2 - distinct, distinct, 4)
    # What is below the lock goes, with the aliases it held.
    assert aliased.evict(9) == 2 - distinct
    assert aliased.sizes == (0, distinct, at - distinct)


def test_insert_hands_ownership_to_the_position_below(aliased: Bench) -> None:
    """The page that was first becomes a duplicate; the one that shared it owns it from then on."""
    aliased.leave("12", "mn")
    aliased.leave("1234", "uvuw", first_shared=2)
    # v was a duplicate of n and is free; u lives on at position 2.
    assert aliased.sizes == (4, 0, 0)
    assert aliased.free == PAGES - 4
    assert len(aliased.allocator.references) == 0
    assert aliased.evict(2) == 2
    assert aliased.evict(2) == 2
    assert aliased.free == PAGES


def test_insert_hands_over_what_is_named_twice_below(aliased: Bench) -> None:
    aliased.leave("12", "mn")
    aliased.leave("12345", "uvuuw", first_shared=2)
    assert aliased.sizes == (4, 0, 1)
    assert list(aliased.allocator.references.values()) == [2]
    assert aliased.evict(9) == 4
    assert aliased.free == PAGES


def test_lock_moves_physical_pages_only(aliased: Bench) -> None:
    aliased.leave("12", "ab")
    aliased.leave("123456", "abacda", protected=2, first_shared=2)
    leaf = aliased.match("123456").last_device_node
    first, second = aliased.tree.lock(leaf), aliased.tree.lock(leaf)
    assert aliased.sizes == (0, 4, 2)
    top = aliased.tree.lock(aliased.match("12").last_device_node)
    aliased.tree.unlock(first)
    assert aliased.sizes == (0, 4, 2)
    aliased.tree.unlock(second)
    assert aliased.sizes == (2, 2, 2)
    aliased.tree.unlock(top)
    assert aliased.sizes == (4, 0, 2)


def test_eviction_goes_on_until_enough_pages_came_back(aliased: Bench) -> None:
    """The oldest leaf has five positions and frees one page."""
    aliased.leave("12345", "aaaaa", first_shared=1)
    aliased.leave("678", "bcd")
    assert aliased.sizes == (4, 0, 4)
    assert aliased.evict(2) == 4
    assert aliased.free == PAGES


def test_eviction_stops_when_enough_pages_came_back(aliased: Bench) -> None:
    aliased.leave("123", "bcd")
    aliased.leave("45678", "aaaaa", first_shared=1)
    assert aliased.evict(3) == 3
    assert aliased.sizes == (1, 0, 4)


def test_running_request_keeps_its_page_when_the_tree_lets_it_go(aliased: Bench) -> None:
    req = aliased.run("1234", "aaba")
    aliased.leave("5", "c")
    assert aliased.evict(9) == 1
    assert aliased.free == PAGES - 2
    aliased.finish(req, first_shared=1)
    assert aliased.evict(9) == 2
    assert aliased.free == PAGES


# -- exact publishing ------------------------------------------------------------


def test_exact_publishing_ends_before_the_first_shared_position(exact: Bench) -> None:
    exact.leave("123456", "abcabd", first_shared=3)
    assert exact.sizes == (3, 0, 0)
    assert exact.matched("123456") == 3
    assert exact.free == PAGES - 3
    assert len(exact.allocator.references) == 0


def test_exact_publishing_keeps_what_was_published_before(exact: Bench) -> None:
    exact.leave("12", "ab")
    exact.leave("1234", "abac", protected=2, first_shared=2)
    assert exact.sizes == (2, 0, 0)
    assert exact.free == PAGES - 2


def test_unshared_request_is_published_whole(exact: Bench) -> None:
    exact.leave("1234", "abcd")
    assert exact.sizes == (4, 0, 0)


# -- requests that want exact KV only ------------------------------------------------


def test_opted_out_request_stops_before_the_first_shared_position(aliased: Bench) -> None:
    aliased.leave("123456", "abcabd", first_shared=3)
    assert aliased.matched("123456", exact_only=True) == 3
    assert aliased.matched("123456") == 6


@pytest.mark.parametrize("at", range(1, 6))
def test_split_keeps_where_exact_kv_ends(aliased: Bench, at: int) -> None:
    aliased.leave("123456", "abcabd", first_shared=3)
    assert aliased.matched("123456"[:at]) == at
    assert aliased.matched("123456", exact_only=True) == 3
    assert aliased.matched("123456"[:at], exact_only=True) == min(at, 3)


def test_what_was_computed_after_a_shared_position_is_not_exact(aliased: Bench) -> None:
    """A follow-up turn that shares nothing itself continues from approximations."""
    aliased.leave("1234", "abac", first_shared=2)
    aliased.leave("123456", "abacde", protected=4)
    aliased.leave("1234567", "abacdef", protected=6)
    assert aliased.matched("1234567") == 7
    assert aliased.matched("1234567", exact_only=True) == 2


def test_shared_positions_that_met_exact_nodes_leave_an_inexact_rest(aliased: Bench) -> None:
    """The tree already held an exact copy of what the request shared."""
    aliased.leave("1234", "abcd")
    aliased.leave("12345", "uvuwx", first_shared=2)
    assert aliased.matched("12345") == 5
    assert aliased.matched("12345", exact_only=True) == 4


def test_opted_out_request_publishes_up_to_the_approximation(aliased: Bench) -> None:
    aliased.leave("1234", "abac", first_shared=2)
    free = aliased.free
    aliased.finish(aliased.run("12345", "uvwxy", exact_only=True))
    assert aliased.matched("12345") == 4
    assert aliased.free == free


def test_opted_out_request_publishes_freely_elsewhere(aliased: Bench) -> None:
    aliased.leave("1234", "abac", first_shared=2)
    aliased.finish(aliased.run("1256", "uvwx", exact_only=True))
    assert aliased.matched("1256", exact_only=True) == 4
    assert aliased.matched("1234", exact_only=True) == 2


def test_evicted_approximation_is_forgotten(aliased: Bench) -> None:
    aliased.leave("1234", "abac", first_shared=2)
    aliased.evict(9)
    aliased.leave("1234", "defg")
    assert aliased.matched("1234", exact_only=True) == 4


# -- running requests, flush -----------------------------------------------------


def test_running_request_with_output_publishes_its_prompt_only(aliased: Bench) -> None:
    """After a retraction, output in the tree could not be shared again."""
    req = aliased.run("1234", "abcd")
    req.output_ids = req.origin_input_ids[2 * aliased.page :]
    req.origin_input_ids = req.origin_input_ids[: 2 * aliased.page]
    req.refresh_fill_ids()
    aliased.tree.checkpoint(req, up_to=4 * aliased.page)
    assert req.kv.cache_protected_len == 2 * aliased.page
    assert aliased.sizes == (0, 2, 0)


def test_release_tells_the_controller(aliased: Bench) -> None:
    req = aliased.run("12", "ab")
    release_kv_cache(req, aliased.tree, checkpoint=False)
    assert aliased.controller.released == [req]
    assert aliased.free == PAGES


def test_flush_forgets_aliases_and_approximations(aliased: Bench) -> None:
    aliased.leave("1234", "abac", first_shared=2)
    aliased.tree.reset()
    aliased.allocator.clear()
    assert aliased.controller.resets == 1
    assert aliased.sizes == (0, 0, 0)
    aliased.leave("1234", "mnop")
    assert aliased.matched("1234", exact_only=True) == 4

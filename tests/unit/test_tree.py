# SPDX-License-Identifier: Apache-2.0
"""Prefix tree with shared slots, on hand-made rows; random ones, and locks, splits and releases in
any order: ``tests/property``. Rows and token sequences are written as strings: every letter of a
row is a page, the same letter twice a shared one. Sizes are in pages, so each case holds for every
page size."""

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_reasoncache.sharing.state import RequestState, attach
from tests.property.world import Setup, World, finish

PAGES = 24

pytestmark = pytest.mark.usefixtures("published_config")


class Bench(World):
    """A tree over a small pool, spoken to in letters."""

    def __init__(self, page: int, publish: str, core: str = "python") -> None:
        super().__init__(Setup(page, page, PAGES * page, publish, core=core))
        self._pages: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text for _ in range(self.page)]

    def matched(self, text: str, exact_only: bool = False) -> int:
        """Pages of ``text`` that a request gets from the tree."""
        return self._match(self.request("r", self.tokens(text), exact_only)) // self.page

    def _match(self, req: Req, upto: int | None = None) -> int:
        """Slots; the request's lock is then on the last node."""
        params = MatchPrefixParams(key=RadixKey(req.origin_input_ids[:upto]), req=req)
        result = self.tree.match_prefix(params)
        req.last_node = result.last_device_node
        return result.device_prefix_len

    def leave(
        self,
        text: str,
        row: str,
        first_shared: int | None = None,
        protected: int = 0,
        exact_only: bool = False,
    ) -> None:
        """A request computed ``text`` into ``row``, whose start the tree owned, and finished."""
        req = self.request("r", self.tokens(text), exact_only)
        if protected:
            assert self._match(req, protected * self.page) == protected * self.page
            req.lock = self.tree.lock(req.last_node)
        for letter in row[protected:]:
            if letter in self._pages:
                self.allocator.commit(self.allocator.prepare([], [self._pages[letter]]))
            else:
                self._pages[letter] = int(self.allocator.alloc(self.page)[0]) // self.page
        pages = torch.tensor([self._pages[letter] for letter in row])
        slots = (pages[:, None] * self.page + torch.arange(self.page)).flatten()
        assert self.rows.alloc([req]) is not None
        self.rows.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        known = self.allocator.row_of(req.kv.req_pool_idx)
        shared = [at for at, letter in enumerate(row) if row.count(letter) > 1]
        for at in (at * self.page + i for at in shared for i in range(self.page)):
            known.locate(at, [int(slots[at])])
        req.kv.cache_protected_len = protected * self.page
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(slots)
        attach(req, RequestState(followed=None))
        known.first_shared = None if first_shared is None else first_shared * self.page
        finish(self, req)

    def evict(self, pages: int) -> int:
        """Evict; return pages that came back."""
        before = self.allocator.available_size()
        result = self.tree.evict(EvictParams(num_tokens=pages * self.page))
        assert result.num_tokens_evicted == self.allocator.available_size() - before
        return result.num_tokens_evicted // self.page

    @property
    def sizes(self) -> tuple[int, ...]:
        """Evictable, protected and aliased, in pages."""
        tree = self.tree
        sizes = (tree.evictable_size(), tree.protected_size(), tree.count_aliases())
        assert all(size % self.page == 0 for size in sizes)
        return tuple(size // self.page for size in sizes)

    @property
    def free(self) -> int:
        """Free pages, each counted once."""
        pages = self.free_pages().tolist()
        assert len(set(pages)) == len(pages)
        return len(pages)


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def page(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def aliased(page: int) -> Bench:
    return Bench(page, "aliased")


BRANCHES = [("12", "ab"), ("123", "aba", 2, 2), ("124", "abb", 2, 2)]
TURNS = [("1234", "abac", 2), ("123456", "abacde", None, 4), ("1234567", "abacdef", None, 6)]


@pytest.mark.parametrize(
    ("publish", "runs", "sizes", "evictions"),
    [
        # A shared page counts once, at its topmost position.
        ("aliased", [("123456", "abcabd", 3)], (4, 0, 2), []),
        # A follow-up turn refers to what the tree owns.
        ("aliased", [("123", "abc"), ("123456", "abcbdb", 3, 3)], (4, 0, 2), [(1, 1), (3, 3)]),
        # Branches share what their common ancestor holds.
        ("aliased", BRANCHES, (2, 0, 2), [(2, 2)]),
        # v was a duplicate of n and is free; the page that was first becomes a duplicate, and u
        # lives on at position 2.
        ("aliased", [("12", "mn"), ("1234", "uvuw", 2)], (4, 0, 0), [(2, 2), (2, 2)]),
        # The same where it is named twice below.
        ("aliased", [("12", "mn"), ("12345", "uvuuw", 2)], (4, 0, 1), [(9, 4)]),
        # Eviction goes on until enough came back: the oldest leaf has five positions and one page.
        ("aliased", [("12345", "aaaaa", 1), ("678", "bcd")], (4, 0, 4), [(2, 4)]),
        # It stops when enough pages came back.
        ("aliased", [("123", "bcd"), ("45678", "aaaaa", 1)], (4, 0, 4), [(3, 3), (1, 1)]),
        # Exact publishing ends before the first shared position, and keeps what was there.
        ("exact", [("123456", "abcabd", 3)], (3, 0, 0), [(9, 3)]),
        ("exact", [("12", "ab"), ("1234", "abac", 2, 2)], (2, 0, 0), [(9, 2)]),
        ("exact", [("1234", "abcd")], (4, 0, 0), []),
    ],
)
def test_pages_are_counted_once(
    page: int, publish: str, runs: list, sizes: tuple[int, ...], evictions: list
) -> None:
    bench = Bench(page, publish)
    for run in runs:
        bench.leave(*run)
    assert bench.sizes == sizes
    assert bench.free == PAGES - sizes[0]
    assert sum(bench.allocator.references.values()) - len(bench.allocator.references) == sizes[2]
    for wanted, freed in evictions:
        assert bench.evict(wanted) == freed
    assert bench.free == PAGES - bench.sizes[0]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_either_core_gives_back_what_it_has_as_parts_of_the_row(page: int, core: str) -> None:
    """Of a row whose first page another position names too, and of one that the tree has in part."""
    bench = Bench(page, "exact", core)
    assert ("Rust" in type(bench.tree.tree_core).__name__) == (core == "rust")
    bench.leave("1234", "abcd")
    bench.leave("1234", "uvwu", 3)
    bench.leave("12567", "mnopn", 4)
    assert bench.sizes == (6, 0, 0) and bench.free == PAGES - 6
    assert not bench.allocator.references
    assert bench.matched("1234") == bench.matched("1256") == 4
    assert bench.evict(PAGES) == 6


@pytest.mark.parametrize(
    ("runs", "text", "matched", "exact"),
    [
        # Requests that want exact KV stop before the first shared position.
        ([("123456", "abcabd", 3)], "123456", 6, 3),
        # A follow-up turn that shares nothing itself continues from approximations.
        (TURNS, "1234567", 7, 2),
        # The tree already held an exact copy of what the request shared.
        ([("1234", "abcd"), ("12345", "uvuwx", 2)], "12345", 5, 4),
        # An opted-out request publishes up to the approximation, and freely elsewhere.
        ([("1234", "abac", 2), ("12345", "uvwxy", None, 0, True)], "12345", 4, 2),
        ([("1234", "abac", 2), ("1256", "uvwx", None, 0, True)], "1256", 4, 4),
        ([("1234", "abac", 2), ("1256", "uvwx", None, 0, True)], "1234", 4, 2),
    ],
)
def test_approximations_are_for_requests_that_share(
    aliased: Bench, runs: list, text: str, matched: int, exact: int
) -> None:
    for run in runs:
        aliased.leave(*run)
    assert aliased.matched(text) == matched
    # Splits keep where exact KV ends.
    for at in range(1, len(text) + 1):
        assert aliased.matched(text[:at]) == min(at, matched)
        assert aliased.matched(text[:at], exact_only=True) == min(at, exact)
    assert aliased.free == PAGES - aliased.sizes[0]


@pytest.mark.parametrize("how", ["evicted", "flushed"])
def test_a_forgotten_approximation(aliased: Bench, how: str) -> None:
    aliased.leave("1234", "abac", 2)
    if how == "evicted":
        aliased.evict(9)
    else:
        aliased.tree.reset()
        aliased.allocator.clear()
    assert aliased.sizes == (0, 0, 0)
    aliased.leave("1234", "mnop")
    assert aliased.matched("1234", exact_only=True) == 4

# SPDX-License-Identifier: Apache-2.0
"""Tests pages whose positions share one by one: pages put together from blocks, and references to pages."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.references import moved_references, named_pages
from sglang_reasoncache.sharing.blocks import Pages, Run, runs_of
from sglang_reasoncache.sharing.request import record_of
from tests.property.world import ENDS, Pair, Setup, World, allocator_of

PAGE = 4
BLOCKS = st.tuples(
    st.integers(0, 20), st.integers(0, 40), st.integers(1, 6), st.sampled_from((None, 7))
)


def spread(runs: tuple[Run, ...]) -> dict[int, int]:
    return {run.dst_start + i: run.src_start + i for run in runs for i in range(run.length)}


@settings(max_examples=400, deadline=None)
@given(st.lists(BLOCKS, max_size=30))
def test_a_page_is_whole_once_blocks_of_one_source_cover_it(
    blocks: list[tuple[int, int, int, int | None]],
) -> None:
    """The first source of a position counts. A page that reads another response reads one run of it."""
    pages = Pages(PAGE)
    covered = dict[tuple[int, int | None], dict[int, int]]()
    for dst, src, length, source in blocks:
        expected: list[dict[int, int]] = []
        for at in range(dst, dst + length):
            covered.setdefault((at // PAGE, source), {}).setdefault(at, at - dst + src)
        for number in sorted({at // PAGE for at in range(dst, dst + length)}):
            if len(covered[number, source]) == PAGE:
                read = dict(sorted(covered.pop((number, source)).items()))
                if source is None or len({at - of for at, of in read.items()}) == 1:
                    expected.append(read)
        found = pages.add(Run(dst, src, length), source)
        assert [spread(runs) for runs in found] == expected
        for runs in found:
            assert sum(run.length for run in runs) == PAGE
            assert runs == runs_of(runs[0].dst_start, np.array([*spread(runs).values()]))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 19), min_size=PAGE, max_size=PAGE)),
        max_size=4, unique_by=lambda each: each[0],
    ),
    st.integers(1, PAGE),
    st.sets(st.integers(0, 19)),
)  # fmt: skip
def test_references_are_the_pages_that_a_page_names(
    redirected: list[tuple[int, list[int]]], tail: int, located: set[int]
) -> None:
    """A row of five pages, the last one incomplete, of which some pages were redirected."""
    length = 4 * PAGE + tail
    slots = np.arange(PAGE, PAGE + 20)
    row = HostRow()
    for at in located:
        row.locate(at, [int(slots[at])])
    before: dict[int, int] = {}
    for number, sources in redirected:
        for at, source in zip(range(number * PAGE, (number + 1) * PAGE), sources, strict=True):
            for each in (at, source):
                row.locate(each, [int(slots[each])])
        for at, source in zip(range(number * PAGE, (number + 1) * PAGE), sources, strict=True):
            moves: list[Any] = []
            row.read(at, source, 1, row, moves)
            for move in moves:
                before.update({each: before.get(each, move.old) for each in move.positions})
    now = np.array([row.at(np.array([at]))[0] or slots[at] for at in range(20)])
    first = now.copy()
    first[list(before)] = list(before.values())
    lost, gained = moved_references(row, before, PAGE)
    counted = Counter(_named(now))
    counted.subtract(_named(first))
    counted.subtract(gained.tolist())
    counted.update(lost.tolist())
    assert not any(counted.values())
    known = row.between(0, length)
    holders, named, unknown = named_pages(known, PAGE)
    assert Counter([*named.tolist(), *(now[unknown * PAGE] // PAGE).tolist()]) == Counter(
        _named(now[:length])
    )
    assert set(holders.tolist()).isdisjoint(unknown.tolist())
    assert len({*holders.tolist(), *unknown.tolist()}) == 5


def _named(entries: np.ndarray) -> list[int]:
    return [
        page
        for at in range(0, len(entries), PAGE)
        for page in set((entries[at : at + PAGE] // PAGE).tolist())
    ]


def test_a_page_that_only_one_row_names_in_parts_is_freed_as_a_whole() -> None:
    """Two pages have one reference each, from one page of a row: SGLang's code would free the first only."""
    allocator = allocator_of(PAGE, 8 * PAGE)
    taken = allocator.alloc(2 * PAGE).numpy()
    own = allocator.alloc(PAGE)
    row = HostRow()
    row.locate(0, own.tolist())
    lender = HostRow()
    lender.locate(0, taken.tolist())
    moves: list[Any] = []
    row.read(0, 2, PAGE, lender, moves)
    old = {at: move.old for move in moves for at in move.positions}
    assert allocator.commit(allocator.prepare_moved([(row, old)])) == PAGE
    assert allocator.saved == PAGE
    with allocator.freed.of(lender):
        allocator.free_segment(torch.from_numpy(taken), start_pos=0)
    # The row now takes two pages for the tokens of one.
    assert not allocator.references and allocator.saved == -PAGE
    with allocator.freed.of(row):
        allocator.free_segment(torch.from_numpy(row.between(0, PAGE)), start_pos=0)
    assert allocator.available_size() == 8 * PAGE and allocator.saved == 0


@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("how", ENDS)
def test_a_page_reads_sources_at_any_offset(page: int, how: str) -> None:
    """The page is free at once, and the pages that it reads as long as it reads them."""
    world = World(Setup(page=page, block=2, slots=10 * page, when="short"))
    req = world.request("r", range(1, 1 + 2 * page))
    world.respond(req, range(100, 101 + 3 * page))
    world.controller.after_decode([req])
    before = world.row(req).copy()
    dst = 3 * page
    length = world.row(req).size
    sources = [(5 * i + 1) % (length - 2) for i in range(page // 2)]
    pairs = [Pair(dst + 2 * i, at) for i, at in enumerate(sources)]
    world.propose(req, *pairs[:-1])
    world.controller.after_decode([req])
    pipeline = world.controller.pipeline
    allocator = world.allocator
    assert pipeline.ledger.slots == 0 and not state_of(req).candidates
    world.propose(req, pairs[-1])
    world.controller.after_decode([req])
    assert pipeline.ledger.slots == page
    free = allocator.available_size()
    # SGLang asks for a page per request before it allocates.
    allocator.evict_to_free_tokens(world.tree, free + 1)
    assert allocator.available_size() == free and not pipeline.saved
    assert allocator.check_decode_capacity(num_tokens=free + page, tree_cache=world.tree)
    assert allocator.available_size() == free + page and pipeline.saved == page
    row = world.row(req)
    expected = [before[at + i] for at in sources for i in range(2)]
    assert row[dst : dst + page].tolist() == expected
    assert set((before[dst : dst + page] // page).tolist()) <= set(world.free_pages().tolist())
    world.end(req, how)
    world.tree.evict(EvictParams(num_tokens=world.total))
    assert allocator.available_size() == world.total and pipeline.saved == 0


def state_of(req: Any) -> Any:
    return record_of(req)

# SPDX-License-Identifier: Apache-2.0
"""Tests ``Redirector`` in SGLang's pools against plain lists of slots. Blocks that are redirected together
share all or none: if any step fails, rows, reference counts and free slots are as before."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.device.ranks import RankFailed, RanksTorn
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.sharing import redirect
from sglang_reasoncache.sharing.blocks import BlockProposal, Candidate, Run
from sglang_reasoncache.sharing.redirect import Redirection, Redirector
from sglang_reasoncache.sharing.request import known_record
from tests.property.world import Setup, World

pytestmark = pytest.mark.usefixtures("published_config")
BLOCK = 4
SETUPS = {1: Setup(page=1, block=BLOCK, slots=120), 4: Setup(page=4, block=BLOCK, slots=120)}
#: Responses begin at position 6 and end at position 30. Their positions from ``FIRST`` on are no page of
#: the tree.
FIRST = 8
WRITTEN = 30
#: The last block is not written to its end.
UNFINISHED = 28
#: Row and start of a block, row and start of its source. Starts are counted in blocks from ``FIRST`` on.
BLOCKS = st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 1), st.integers(0, 4))


class Rows:
    """Two requests of a :class:`World`, and lists of the slots that their rows must name."""

    def __init__(self, page: int) -> None:
        self.world = World(SETUPS[page])
        self.reqs = [self.world.start("0"), self.world.start("1", first=200)]
        self.slots: list[list[int]] = [self.world.row(req).tolist() for req in self.reqs]
        self.redirector: Redirector = self.world.controller.pipeline.redirector

    def host(self, number: int) -> HostRow:
        return self.redirector.row_of(self.reqs[number])

    def locate(self, number: int, start: int) -> None:
        end = min(start + BLOCK, WRITTEN)
        self.host(number).locate(start, self.slots[number][start:end])

    def block(self, to: int, dst: int, of: int, src: int) -> BlockProposal:
        """A block whose slots the host knows, and those of its source too."""
        self.locate(to, dst)
        self.locate(of, src)
        reqs = self.reqs
        candidate = Candidate((Run(dst, src, BLOCK),))
        return BlockProposal(reqs[to], candidate, self.host(to), reqs[of], self.host(of))

    def allows(self, to: int, dst: int, of: int, src: int, slots: list[list[int]]) -> bool:
        """Whether the plugin's rules may allow a block, if the rows name ``slots``."""
        going = slots[to][dst : dst + BLOCK]
        if (to == of and abs(dst - src) < BLOCK) or going == slots[of][src : src + BLOCK]:
            return False
        return self.host(to).in_other_rows.isdisjoint(going)

    def after(
        self, to: int, dst: int, of: int, src: int, slots: list[list[int]]
    ) -> list[list[int]]:
        """The slots that the rows name once the block shares."""
        slots = [list(row) for row in slots]
        for offset in range(BLOCK):
            old = slots[to][dst + offset]
            new = slots[of][src + offset]
            slots[to] = [new if slot == old else slot for slot in slots[to]]
        return slots

    def check(self) -> None:
        """Checks rows, reference counts and free slots."""
        world = self.world
        page = self.world.page
        uses: Counter[int] = Counter()
        for req, row in zip(self.reqs, self.slots, strict=True):
            assert world.row(req).tolist() == row
            uses.update(slot // page for slot in row[req.kv.cache_protected_len :: page])
        assert world.allocator.references == {at: count for at, count in uses.items() if count > 1}
        assert self.redirector.saved == page * (uses.total() - len(uses))
        for _, data in world.nodes():
            uses.update(slot // page for slot in data.value.tolist())
        pages = range(1, world.total // page + 1)
        assert sorted(world.free_pages().tolist()) == [at for at in pages if at not in uses]

    def kept(self) -> list[Any]:
        """What must be as before if redirecting fails."""
        allocator = self.world.allocator
        kept: list[Any] = [self.world.row_table.tolist(), dict(allocator.references)]
        kept += [allocator.references.extra, sorted(self.world.free_pages().tolist())]
        for number in range(2):
            row = self.host(number)
            kept += [row.between(0, WRITTEN).tolist(), row.saved, row.borrowed, row.first_shared]
            kept += [[sorted(row.readers(at)) for at in range(FIRST, WRITTEN)]]
            kept += [known_record(self.reqs[number]).redirected.copy()]
        return kept

    def end(self) -> None:
        for req in self.reqs:
            self.world.finish(req)
        self.world.assert_empty()


def failing(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("made up by a test")


def fail_read(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    """The host knows the slots of only two positions of the source."""
    with pytest.raises(AssertionError, match="a slot that is shared was located"):
        begun.add(rows.block(0, FIRST, 0, UNFINISHED))


def fail_upload(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    patch.setattr(redirect, "upload", failing)
    with pytest.raises(torch.OutOfMemoryError):
        begun.commit()


def fail_counting(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    patch.setattr(rows.world.allocator.references, "changed", failing)
    with pytest.raises(torch.OutOfMemoryError):
        begun.commit()


def fail_other_rank(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    """Another rank has failed before, so that the next reduction raises."""
    patch.setattr(rows.world.ranks, "alone", False)
    patch.setattr(rows.world.ranks, "_ended", True)
    with pytest.raises(RankFailed):
        begun.commit()


def fail_write(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    patch.setattr(rows.world.rows, "write", failing)
    with pytest.raises(torch.OutOfMemoryError):
        begun.commit()


def fail_free(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    """Freeing fails twice, when the rows are written already."""
    patch.setattr(rows.world.allocator, "_release_unreferenced", failing)
    with pytest.raises(torch.OutOfMemoryError):
        begun.commit()


def fail_after_agreeing(patch: pytest.MonkeyPatch, rows: Rows, begun: Redirection) -> None:
    """All ranks have agreed to write, so the others do. The scheduler of this one must end."""
    patch.setattr(rows.world.ranks, "alone", False)
    patch.setattr(rows.world.ranks, "agree", lambda: None)
    patch.setattr(rows.world.rows, "write", failing)
    disabled: list[str] = []
    contained = Containment(rows.world.ranks, disabled.append)
    with pytest.raises(RanksTorn, match="OutOfMemoryError: made up"):
        contained.together(begun.commit)
    with pytest.raises(RanksTorn), contained:
        contained.once_more(begun.commit)
    assert not disabled


Failure = Callable[[pytest.MonkeyPatch, Rows, Redirection], None]
FAILURES: list[Failure] = [
    fail_read,
    fail_upload,
    fail_counting,
    fail_other_rank,
    fail_write,
    fail_free,
    fail_after_agreeing,
]
TOGETHER = st.tuples(st.lists(BLOCKS, max_size=4), st.sampled_from([None, None, *FAILURES]))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((1, 4)), st.lists(TOGETHER, max_size=4))
def test_blocks_share_together_or_not_at_all(
    page: int, steps: list[tuple[list[tuple[int, int, int, int]], Failure | None]]
) -> None:
    """A block may read one that was redirected with it, and positions may be redirected twice at once."""
    rows = Rows(page)
    for starts, failure in steps:
        drawn = [(to, FIRST + dst * BLOCK, of, FIRST + src * BLOCK) for to, dst, of, src in starts]
        for to, dst, of, src in drawn:
            rows.locate(to, dst)
            rows.locate(of, src)
        rows.locate(0, FIRST)
        rows.locate(0, UNFINISHED)
        before = rows.kept()
        after = rows.slots
        free = rows.world.allocator.available_size()
        begun = rows.redirector.begin()
        added = []
        for where in drawn:
            if rows.allows(*where, after):
                added.append(rows.block(*where))
                begun.add(added[-1])
                after = rows.after(*where, after)
        if failure is not None and (added or failure is fail_read):
            with pytest.MonkeyPatch.context() as patch:
                failure(patch, rows, begun)
                begun.undo()
            assert rows.kept() == before
            rows.check()
            continue
        begun.commit()
        begun.count()
        rows.slots = after
        rows.check()
        assert rows.world.allocator.available_size() == free + begun.freed
        for number, req in enumerate(rows.reqs):
            done = [block.candidate for block in added if block.req is req]
            redirected = known_record(req).redirected
            assert redirected[len(redirected) - len(done) :] == done
            told = rows.host(number).between(0, WRITTEN)
            known = np.flatnonzero(told)
            assert told[known].tolist() == np.array(after[number])[known].tolist()
    rows.end()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("page", SETUPS)
def test_what_failed_can_be_done_again(
    page: int, failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block reads the third, and the first block the second: all three name one block's slots."""
    rows = Rows(page)
    chain = [(0, 12, 0, 8), (0, 8, 0, 24), (1, 16, 0, 24)]
    for to, dst, of, src in [*chain, (0, FIRST, 0, UNFINISHED)]:
        rows.locate(to, dst)
        rows.locate(of, src)
    before = rows.kept()
    begun = rows.redirector.begin()
    for where in chain:
        begun.add(rows.block(*where))
    assert begun.freed == 3 * BLOCK
    with monkeypatch.context() as patch:
        failure(patch, rows, begun)
        begun.undo()
    assert rows.kept() == before
    begun = rows.redirector.begin()
    for where in chain:
        begun.add(rows.block(*where))
        rows.slots = rows.after(*where, rows.slots)
    begun.commit()
    begun.count()
    rows.check()
    one, other = rows.slots
    assert one[8:12] == one[12:16] == one[24:28] == other[16:20]
    assert rows.redirector.saved == 3 * BLOCK and rows.redirector.within == 2 * BLOCK
    stats = rows.world.controller.stats
    assert (stats.blocks_shared, stats.blocks_shared_across) == (3, 1)
    assert (stats.slots_saved_total, stats.slots_saved_across_total) == (3 * BLOCK, BLOCK)
    rows.end()

# SPDX-License-Identifier: Apache-2.0
"""Tests ``HostRow`` against plain lists of slots: two rows that read their own and each other's slots."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_reasoncache.cache.host_row import EVICTED, UNKNOWN, HostRow, Moved, undo

LENGTH = 12
BLOCK = 3
AT = st.integers(0, LENGTH - BLOCK)
ROW = st.integers(0, 1)
#: Row and start of a block, row and start of its source, and whether the read is undone.
READ = st.tuples(ROW, AT, ROW, AT, st.booleans())
#: A row, and positions to evict from it.
UNSET = st.tuples(ROW, st.lists(st.integers(0, LENGTH - 1), max_size=3, unique=True))


@dataclass
class Plain:
    """A row as a list. ``own``: the slots that SGLang allocated. ``lent``: slots that the other row names, or
    has named."""

    own: list[int]
    slots: list[int]
    located: set[int] = field(default_factory=set)
    lent: set[int] = field(default_factory=set)
    borrowed: int = 0
    first_shared: int | None = None

    def locate(self, row: HostRow, start: int) -> None:
        """Tells the host the slots of a block, as they were before any block was redirected."""
        row.locate(start, self.own[start : start + BLOCK])
        self.located.update(range(start, start + BLOCK))

    def check(self, row: HostRow) -> None:
        held = [at for at, slot in enumerate(self.slots) if slot != EVICTED]
        gone = [at for at in range(LENGTH) if at not in held]
        told = [
            slot if slot == EVICTED or at in self.located else UNKNOWN
            for at, slot in enumerate(self.slots)
        ]
        assert row.between(0, LENGTH).tolist() == told
        assert row.between(LENGTH - 1, LENGTH + 500).tolist() == [told[-1]] + [UNKNOWN] * 500
        places = np.array([LENGTH - 1, 0, 10_000, 5])
        assert row.at(places).tolist() == [told[-1], told[0], UNKNOWN, told[5]]
        named = {self.slots[at] for at in held}
        assert row.saved == len(held) - len(named)
        assert row.borrowed == self.borrowed
        assert row.first_shared == self.first_shared
        assert row.held(LENGTH).tolist() == held
        assert row.evicted == len(gone)
        for start in (0, 4):
            assert row.evicted_from(start).tolist() == [at for at in gone if at >= start]
            assert row.any_evicted(start, start + 4) == any(start <= at < start + 4 for at in gone)
        first = [self.slots.index(self.slots[at]) for at in held]
        readers, worth = row.first_readers(np.array(held, dtype=np.int64), 1)
        assert (readers.tolist(), worth.tolist()) == (first, [1] * len(held))
        for at in held:
            alike = [other for other in held if self.slots[other] == self.slots[at]]
            assert sorted(row.readers(at)) == (alike if at in self.located else [at])
        self.lent &= named
        assert row.in_other_rows == self.lent
        for end in (0, 5, LENGTH):
            there = [at for at in held if self.slots[at] in self.lent and at < end]
            assert row.first_in_other_rows(end) == min(there, default=end)


#: After these, positions of one block name one slot.
ALIKE = [(0, 0, 0, 3, False), (0, 0, 0, 4, False)]


@settings(max_examples=600, deadline=None)
@example([*ALIKE, (0, 0, 1, 0, False)])
@example([*ALIKE, (0, 0, 1, 0, True), (0, 0, 1, 5, False)])
@given(st.lists(READ | UNSET, max_size=12))
def test_rows_are_lists_of_slots(
    steps: list[tuple[int, int, int, int, bool] | tuple[int, list[int]]],
) -> None:
    rows = [HostRow(), HostRow()]
    plain = []
    for number in range(2):
        own = [1 + number * LENGTH + at for at in range(LENGTH)]
        plain.append(Plain(own, list(own)))
    for step in steps:
        if len(step) == 2:
            number, positions = step
            rows[number].unset(np.array(positions, dtype=np.int64))
            for at in positions:
                plain[number].slots[at] = EVICTED
        else:
            _read(rows, plain, *step)
        for row, expected in zip(rows, plain, strict=True):
            expected.check(row)


def _read(
    rows: list[HostRow], plain: list[Plain], to: int, dst: int, of: int, src: int, undone: bool
) -> None:
    """Lets a block read another, unless the plugin's rules would refuse it."""
    mine = plain[to]
    theirs = plain[of]
    mine.locate(rows[to], dst)
    theirs.locate(rows[of], src)
    going = mine.slots[dst : dst + BLOCK]
    there = theirs.slots[src : src + BLOCK]
    overlaps = to == of and abs(dst - src) < BLOCK
    if overlaps or EVICTED in (*going, *there) or not mine.lent.isdisjoint(going):
        return
    moves: list[Moved] = []
    rows[to].read(dst, src, BLOCK, rows[of], moves)
    if to != of:
        theirs.lent.update(there)
    if undone:
        undo(moves)
        return
    for offset in range(BLOCK):
        old = mine.slots[dst + offset]
        # Positions of the source may be redirected with an earlier position of the block.
        new = theirs.slots[src + offset]
        moved = [at for at, slot in enumerate(mine.slots) if slot == old and old != new]
        assert sorted(moves[offset].positions) == moved
        if moved:
            mine.borrowed += to != of and new not in mine.slots
            for at in moved:
                mine.slots[at] = new
            first = min(moved)
            mine.first_shared = min(
                first, LENGTH if mine.first_shared is None else mine.first_shared
            )
        if to != of:
            mine.lent.add(new)


def test_a_read_that_fails_in_the_middle_is_undone() -> None:
    """The third position has no slot that the host knows. The moves so far are in ``moves``, to be undone."""
    row = HostRow()
    row.locate(0, range(1, 7))
    row.locate(8, (9, 10))
    moves: list[Moved] = []
    with pytest.raises(AssertionError, match="a slot that is shared was located"):
        row.read(1, 8, 3, row, moves)
    assert len(moves) == 2 and row.saved == 2
    undo(moves)
    assert row.between(0, 11).tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 9, 10, 0]
    assert (row.saved, row.first_shared) == (0, None)
    assert row.readers(8) == (8,) and row.readers(1) == (1,)


def test_every_row_has_a_number_of_its_own() -> None:
    assert HostRow().number < HostRow().number

# SPDX-License-Identifier: Apache-2.0
"""What the host knows of rows that read each other, against a plain list of slots a row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.cache.host_row import EVICTED, HostRow, Moved, undo

LENGTH, BLOCK = 12, 3
AT = st.integers(0, LENGTH - BLOCK)
ROW = st.integers(0, 1)
#: A block reads a block of the same row or another one, and that may be undone; or a position goes.
READ = st.tuples(ROW, AT, ROW, AT, st.booleans())
STEPS = st.lists(READ | st.integers(0, LENGTH - 1), max_size=12)


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_rows_name_what_they_read(steps: list[tuple[int, int, int, int, bool] | int]) -> None:
    rows = [HostRow(), HostRow()]
    plain = [[1 + number * LENGTH + at for at in range(LENGTH)] for number in range(2)]
    for row, slots in zip(rows, plain, strict=True):
        row.locate(0, slots)
    for step in steps:
        if isinstance(step, int):
            rows[0].unset(np.array([step]))
            plain[0][step] = EVICTED
        else:
            _read(rows, plain, *step)
        for number, (row, slots) in enumerate(zip(rows, plain, strict=True)):
            held = np.array(
                [at for at, slot in enumerate(slots) if slot != EVICTED], dtype=np.int64
            )
            distinct = {slots[at] for at in held}
            assert row.between(0, LENGTH).tolist() == slots
            assert row.saved == len(held) - len(distinct)
            assert row.held(LENGTH).tolist() == held.tolist()
            assert row.evicted == LENGTH - len(held)
            gone = [at for at in range(4, LENGTH) if slots[at] == EVICTED]
            assert row.evicted_from(4).tolist() == gone
            assert row.any_evicted(4, LENGTH) == bool(gone)
            assert row.first_readers(held).tolist() == [slots.index(slots[at]) for at in held]
            own = range(1 + number * LENGTH, 1 + (number + 1) * LENGTH)
            assert row.in_other_rows >= {slot for slot in distinct if slot not in own}


def _read(
    rows: list[HostRow], plain: list[list[int]], to: int, dst: int, of: int, src: int, undone: bool
) -> None:
    going, there = plain[to][dst : dst + BLOCK], plain[of][src : src + BLOCK]
    overlaps = to == of and abs(dst - src) < BLOCK
    if overlaps or EVICTED in (*going, *there) or not rows[to].in_other_rows.isdisjoint(going):
        return
    before = (rows[to].first_shared, rows[to].saved, rows[to].borrowed)
    moves: list[Moved] = []
    rows[to].read(dst, src, BLOCK, rows[of], moves)
    if undone:
        undo(moves)
        assert before == (rows[to].first_shared, rows[to].saved, rows[to].borrowed)
        return
    for offset in range(BLOCK):
        old, new = plain[to][dst + offset], plain[of][src + offset]
        plain[to] = [new if slot == old else slot for slot in plain[to]]

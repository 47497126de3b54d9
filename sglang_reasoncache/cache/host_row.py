# SPDX-License-Identifier: Apache-2.0
"""A partial copy, in host memory, of a request's row (its block table). Code that shares or frees slots, or
publishes a row (enters it into the prefix tree), reads this copy and so does not wait for the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang_reasoncache.cache.repair import RepairedRow

#: Values of entries that hold no slot id. Slot 0 is SGLang's padding slot, which no request gets.
EVICTED = -1
UNKNOWN = 0

_numbers = itertools.count()


class HostRow:
    """Holds for each position the id of its slot, ``EVICTED``, or ``UNKNOWN``.

    A position is ``UNKNOWN`` until :meth:`locate` records its slot or :meth:`unset` marks it as evicted.
    Only positions with a recorded slot may be given to :meth:`read`, so ``UNKNOWN`` positions share no slots.

    Attributes:
        number: Identifies this row in the process. A retracted request later gets a row with a new number.
        saved: Number of slots that this row saves by naming one slot at several of its positions.
        borrowed: Number of other requests' slots to which positions of this row were redirected.
        first_shared: The lowest position that was ever redirected; None if there is none.
        evicted: Number of evicted positions.
        repaired: How to undo, before the row is freed, what a repair of documents changed in the row. None if
            no token of a document was computed again.
        in_other_rows: Slots of this row that another request's row names, or has named. Positions that name
            these slots are not redirected, because redirecting them might free no slot.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.saved = 0
        self.borrowed = 0
        self.evicted = 0
        self.first_shared: int | None = None
        self.repaired: RepairedRow | None = None
        self.in_other_rows: set[int] = set()
        self._slots = np.zeros(0, dtype=np.int64)
        # Slot -> the positions of this row that name the slot. Every slot that several positions name has an
        # entry here, and so has every slot in ``in_other_rows``. Tuples of numbers, because Python's garbage
        # collector visits lists again and again.
        self._readers: dict[int, tuple[int, ...]] = {}

    def reserve(self, end: int) -> None:
        """Allocate memory for the positions below ``end``."""
        size = len(self._slots)
        if end > size:
            self._slots = np.pad(self._slots, (0, max(end, 2 * size, 256) - size))

    def locate(self, start: int, slots: Sequence[int]) -> None:
        """Record ``slots``, read from the device, as the entries of consecutive positions from ``start`` on. A
        position that is not ``UNKNOWN`` keeps its entry."""
        self.reserve(start + len(slots))
        known = self._slots[start : start + len(slots)]
        known[known == UNKNOWN] = np.asarray(slots, dtype=np.int64)[known == UNKNOWN]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """For each of ``positions``, int64 ``[n]``: slot, ``EVICTED`` or ``UNKNOWN``. Returns int64 ``[n]``."""
        entries = np.zeros(len(positions), dtype=np.int64)
        known = positions < len(self._slots)
        entries[known] = self._slots[positions[known]]
        return entries

    def between(self, start: int, end: int) -> np.ndarray:
        """The entries of positions ``[start, end)``, int64 ``[end - start]``; see :meth:`at`."""
        entries = np.zeros(end - start, dtype=np.int64)
        known = self._slots[start:end]
        entries[: len(known)] = known
        return entries

    def held(self, end: int) -> np.ndarray:
        """The positions below ``end`` that are not evicted: int64 ``[held]``, ascending."""
        return np.flatnonzero(self.between(0, end) != EVICTED)

    def evicted_from(self, start: int) -> np.ndarray:
        """The evicted positions from ``start`` on: int64 ``[n]``, ascending."""
        slots = self._slots[start:] if self.evicted else self._slots[:0]
        return start + np.flatnonzero(slots == EVICTED)

    def any_evicted(self, start: int, end: int) -> bool:
        """Whether a position of ``[start, end)`` was evicted."""
        return self.evicted > 0 and EVICTED in self._slots[start:end]

    def readers(self, position: int) -> Sequence[int]:
        """All positions that name the same slot as ``position``, including ``position``."""
        slot = int(self._slots[position]) if position < len(self._slots) else UNKNOWN
        return self._readers.get(slot, (position,))

    def first_readers(self, positions: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of ``positions`` (int64 ``[n]``, ascending) can be evicted only together.

        At page size 1 these are the positions that name one slot. Else they are all positions of the pages of
        positions that are linked: two are if they name slots of the same page.

        Returns two int64 ``[n]``: for each position the lowest one that goes with it (in a linked page: at the
        same place), and how many slots all that go together name. ``page``: tokens per page."""
        numbers, at = np.unique(positions // page, return_inverse=True)
        slots = self.at(positions)
        if page == 1:
            labels = np.where(slots == UNKNOWN, -1 - positions, slots)
            _, first, label = np.unique(labels, return_index=True, return_inverse=True)
            return positions[first][label], np.ones(len(positions), dtype=np.int64)
        known = slots > UNKNOWN
        linked = _Linked(len(numbers))
        named = (slots[known] // page).tolist()
        for link in set(zip(at[known].tolist(), named, strict=True)):
            linked.join(*link)
        first, named_by = linked.lowest_and_named()
        return numbers[first][at] * page + positions % page, named_by[at] * page

    def first_in_other_rows(self, end: int) -> int:
        """The lowest position below ``end`` whose slot another row names or named; ``end`` if there is none."""
        return min(
            (at for slot in self.in_other_rows for at in self._readers[slot] if at < end),
            default=end,
        )

    def first_named_twice(self, start: int) -> int | None:
        """The lowest position from ``start`` on whose slot another position of this row names. None if there is
        none."""
        return min(
            (
                at
                for positions in self._readers.values()
                if len(positions) > 1
                for at in positions
                if at >= start
            ),
            default=None,
        )

    def named_before_and_after(self, position: int) -> set[int]:
        """The slots that are named by positions before ``position`` and by others."""
        return {
            slot
            for slot, positions in self._readers.items()
            if min(positions) < position <= max(positions)
        }

    def read(self, dst: int, src: int, length: int, lender: HostRow, moves: list[Moved]) -> None:
        """Redirect positions ``[dst, dst + length)`` to the slots of positions ``[src, src + length)`` of
        ``lender``, which is this row or another request's. If other positions of this row name the slot of a
        redirected position, they are redirected with it.

        One entry per position is appended to ``moves``, right after that position was redirected. If this
        method raises, the caller must pass ``moves`` to :func:`undo`."""
        for at, source in zip(range(dst, dst + length), range(src, src + length), strict=True):
            slot = int(lender._slots[source])
            if lender is not self:
                lender._readers.setdefault(slot, (source,))
                lender.in_other_rows.add(slot)
            moves.append(self._redirect(at, slot, (source,) if lender is self else ()))
            if lender is not self:
                self.in_other_rows.add(slot)

    def _redirect(self, position: int, slot: int, sources: tuple[int, ...]) -> Moved:
        """Redirect ``position``, and all positions that name the same slot, to ``slot``. ``sources``
        holds the position of this row from which ``slot`` is read, or nothing if another row is read."""
        old = int(self._slots[position])
        assert old > UNKNOWN and slot > UNKNOWN, "a slot that is shared was located"
        positions = () if old == slot else self._readers.get(old, (position,))
        borrowed = bool(positions) and not sources and slot not in self._readers
        # Another position of the same block may have been redirected to ``old`` just now.
        lent = bool(positions) and old in self.in_other_rows
        moved = Moved(self, positions, old, slot, borrowed, lent, self.first_shared)
        if positions:
            self._readers.pop(old, None)
            self.in_other_rows.discard(old)
            self.saved += not borrowed
            self.borrowed += borrowed
            self._readers[slot] = self._readers.get(slot, sources) + positions
            self._slots[list(positions)] = slot
            first = min(positions)
            self.first_shared = first if moved.first is None else min(first, moved.first)
        return moved

    def unset(self, positions: np.ndarray) -> None:
        """Mark ``positions``, int64 ``[n]``, as evicted."""
        self.reserve(int(positions.max(initial=-1)) + 1)
        slots = self._slots[positions]
        for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
            there = self._readers.get(slot)
            if there is not None:
                there = tuple(other for other in there if other != position)
                self.saved -= bool(there)
                self._readers[slot] = there
                if not there:
                    del self._readers[slot]
                    self.in_other_rows.discard(slot)
        self._slots[positions] = EVICTED
        self.evicted += int(np.count_nonzero(slots != EVICTED))


class _Linked:
    """Groups of pages of positions, numbered from 0 to ``size - 1``, that name slots of the same pages."""

    def __init__(self, size: int) -> None:
        self._before = list(range(size))
        # A page -> a page of positions that names it.
        self._namer: dict[int, int] = {}

    def join(self, number: int, named: int) -> None:
        """Page ``number`` of positions names slots of the page ``named``."""
        low, high = sorted(
            (self._lowest(number), self._lowest(self._namer.setdefault(named, number)))
        )
        self._before[high] = low

    def _lowest(self, number: int) -> int:
        while self._before[number] != number:
            self._before[number] = number = self._before[self._before[number]]
        return number

    def lowest_and_named(self) -> tuple[np.ndarray, np.ndarray]:
        """For each page of positions the lowest one in its group, and how many pages the group names."""
        lowest = np.array(
            [self._lowest(number) for number in range(len(self._before))], dtype=np.int64
        )
        namers = [lowest[number] for number in self._namer.values()]
        named = np.bincount(np.array(namers, dtype=np.int64), minlength=len(lowest))
        # A page of which the host knows no slot names a page of its own.
        return lowest, np.maximum(named[lowest], 1)


class Moved(NamedTuple):
    """One change by :meth:`HostRow.read`: ``positions`` named the slot ``old`` and now name ``new``.

    ``positions`` is empty if ``old`` and ``new`` are the same. ``borrowed``: whether ``new`` belongs to another
    request and no position of this row named ``new`` before. ``lent``: whether another row names ``old``, which
    no position of this row names any more. ``first``: ``first_shared`` before the change."""

    row: HostRow
    positions: tuple[int, ...]
    old: int
    new: int
    borrowed: bool
    lent: bool
    first: int | None

    def undo(self) -> None:
        """Undo this change. Changes that were made after it must be undone first."""
        row = self.row
        if not self.positions:
            return
        there = row._readers[self.new]
        row._readers[self.new] = there[: len(there) - len(self.positions)]
        row.saved -= not self.borrowed
        row.borrowed -= self.borrowed
        if self.borrowed:
            del row._readers[self.new]
            row.in_other_rows.discard(self.new)
        if self.lent:
            row.in_other_rows.add(self.old)
        row._readers[self.old] = self.positions
        row._slots[list(self.positions)] = self.old
        row.first_shared = self.first


def undo(moves: Iterable[Moved]) -> None:
    """Undo ``moves``, which must be the most recent ones, listed in the order in which they were made."""
    for move in reversed(list(moves)):
        move.undo()

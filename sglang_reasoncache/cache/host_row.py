# SPDX-License-Identifier: Apache-2.0
"""What the host knows of one request's row, so that sharing, freeing and publishing wait for no device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

#: Entries that name no slot. 0 is SGLang's padding slot, which no request gets.
EVICTED, UNKNOWN = -1, 0

_numbers = itertools.count()


class HostRow:
    """Of every position the slot that its entry names, ``EVICTED``, or ``UNKNOWN``.

    The slot of an ``UNKNOWN`` position is named nowhere else. A slot becomes known before it is shared.

    Attributes:
        number: Unique per process: a request's next row has another one.
        shared: Positions less the slots that they name.
        foreign: Slots of other requests among them.
        first_shared: The lowest position that was ever redirected.
        lent: Slots that another request has had, too. They stay in their entries: moving frees none.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.shared = self.foreign = 0
        self.first_shared: int | None = None
        self.lent: set[int] = set()
        self._slots = np.zeros(0, dtype=np.int64)
        # Slot -> the positions that name it, for all slots that several do, and all that are lent.
        self._readers: dict[int, list[int]] = {}

    def reserve(self, end: int) -> None:
        """Have memory for positions before ``end``."""
        size = len(self._slots)
        if end > size:
            self._slots = np.pad(self._slots, (0, max(end, 2 * size, 256) - size))

    def locate(self, start: int, slots: Sequence[int]) -> None:
        """Consecutive positions that were ``UNKNOWN`` when the row was read name these slots."""
        self.reserve(start + len(slots))
        known = self._slots[start : start + len(slots)]
        known[known == UNKNOWN] = np.asarray(slots, dtype=np.int64)[known == UNKNOWN]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Slots, ``EVICTED`` or ``UNKNOWN``: int64, shaped as ``positions``, int64 ``[n]``."""
        found, known = np.zeros(len(positions), dtype=np.int64), positions < len(self._slots)
        found[known] = self._slots[positions[known]]
        return found

    def between(self, start: int, end: int) -> np.ndarray:
        """As :meth:`at`, of the positions of ``[start, end)``."""
        found, known = np.zeros(end - start, dtype=np.int64), self._slots[start:end]
        found[: len(known)] = known
        return found

    def readers(self, position: int) -> list[int]:
        """All positions that name the slot of ``position``, itself among them."""
        slot = int(self._slots[position]) if position < len(self._slots) else UNKNOWN
        return self._readers.get(slot, [position])

    def first_readers(self, positions: np.ndarray) -> np.ndarray:
        """For each of ``positions``, int64 ``[n]`` ascending, the first of them with the same slot."""
        slots = self.at(positions)
        labels = np.where(slots == UNKNOWN, -1 - positions, slots)
        _, first, label = np.unique(labels, return_index=True, return_inverse=True)
        return positions[first][label]

    def first_lent(self, end: int) -> int:
        """The lowest position before ``end`` whose slot is lent; ``end`` where there is none."""
        return min(
            (at for slot in self.lent for at in self._readers[slot] if at < end), default=end
        )

    def read(self, dst: int, src: int, length: int, lender: HostRow, moves: list[Moved]) -> None:
        """Have the positions from ``dst`` on name the slots of those from ``src`` on of ``lender``: this
        row, or another request's. All that name the same slots move with them. ``moves`` gets one entry
        a position, each when it is done: where this fails, :func:`undo` them."""
        for at, source in zip(range(dst, dst + length), range(src, src + length), strict=True):
            slot = int(lender._slots[source])
            if lender is not self:
                lender._readers.setdefault(slot, [source])
                lender.lent.add(slot)
            moves.append(self._redirect(at, slot, [source] if lender is self else []))
            if lender is not self:
                self.lent.add(slot)

    def _redirect(self, position: int, slot: int, sources: list[int]) -> Moved:
        """``sources``: positions of this row that are known to name ``slot``."""
        old = int(self._slots[position])
        assert old > UNKNOWN and slot > UNKNOWN, "a slot that is shared was located"
        positions = [] if old == slot else self._readers.get(old, [position])
        foreign = bool(positions) and not sources and slot not in self._readers
        moved = Moved(self, positions, old, slot, foreign, self.first_shared)
        if positions:
            self._readers.pop(old, None)
            there = self._readers.setdefault(slot, sources)
            self.shared += not foreign
            self.foreign += foreign
            there += positions
            self._slots[positions] = slot
            first = min(positions)
            self.first_shared = first if moved.first is None else min(first, moved.first)
        return moved

    def unset(self, positions: np.ndarray) -> None:
        """These positions, int64 ``[n]``, name no slot any more."""
        self.reserve(int(positions.max(initial=-1)) + 1)
        for position, slot in zip(positions.tolist(), self._slots[positions].tolist(), strict=True):
            there = self._readers.get(slot)
            if there is not None:
                there.remove(position)
                self.shared -= bool(there)
                if not there:
                    del self._readers[slot]
        self._slots[positions] = EVICTED


class Moved(NamedTuple):
    """What one step of :meth:`HostRow.read` did: ``positions`` named the slot ``old``, and name ``new``.
    ``foreign``: a slot of another request, which the row did not name before; ``first``: the row's
    ``first_shared`` before."""

    row: HostRow
    positions: list[int]
    old: int
    new: int
    foreign: bool
    first: int | None

    def undo(self) -> None:
        """To be called for the last change that is not undone yet."""
        row = self.row
        if not self.positions:
            return
        there = row._readers[self.new]
        del there[len(there) - len(self.positions) :]
        row.shared -= not self.foreign
        row.foreign -= self.foreign
        if self.foreign:
            del row._readers[self.new]
            row.lent.discard(self.new)
        row._readers[self.old] = self.positions
        row._slots[self.positions] = self.old
        row.first_shared = self.first


def undo(moves: Iterable[Moved]) -> None:
    """Of the last moves that were made, in their order."""
    for move in reversed(list(moves)):
        move.undo()

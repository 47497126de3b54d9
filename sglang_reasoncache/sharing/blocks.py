# SPDX-License-Identifier: Apache-2.0
"""Blocks that share, or may share later. At page sizes above 1 such a block is a page, put together here."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import numpy as np

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request

#: We keep and report at most this many characters of a request's id, because clients choose ids.
MOST_OF_ID = 256


class Run(NamedTuple):
    """Positions ``[dst_start, dst_start + length)`` that read the slots of as many positions from ``src_start``
    on, or may read them later."""

    dst_start: int
    src_start: int
    length: int

    @property
    def src_end(self) -> int:
        return self.src_start + self.length


class Pages:
    """Puts the whole pages of one response together from the blocks that the filter found, because only a page
    as a whole can be freed. Blocks begin and end anywhere, and their sources, too.

    Args:
        page: Tokens per page, above 1.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        # Number of a page and whose positions it would read -> the source of each of its positions, or -1.
        self._parts: dict[tuple[int, Hashable], np.ndarray] = {}

    def add(self, block: Run, source: Hashable = None) -> list[tuple[Run, ...]]:
        """Take a block. Returns the runs of each page that is now covered by blocks with the same ``source``.

        ``source``: identifies the other response that the block would read; None if it would read its own. A
        page of which another response holds the source reads a single run of it. Otherwise a few tokens of each
        of many pages might keep these pages from being free once the other response has ended."""
        done = []
        first = block.dst_start // self._page
        last = (block.dst_start + block.length - 1) // self._page
        for number in range(first, last + 1):
            start = number * self._page
            low = max(block.dst_start, start)
            high = min(block.dst_start + block.length, start + self._page)
            key = number, source
            if key not in self._parts:
                self._parts[key] = np.full(self._page, -1, dtype=np.int64)
            covered = self._parts[key]
            part = covered[low - start : high - start]
            at = np.arange(low, high) + (block.src_start - block.dst_start)
            # A hostile filter input must not give a position two sources.
            part[part < 0] = at[part < 0]
            if covered.min() >= 0:
                del self._parts[key]
                runs = runs_of(start, covered)
                if source is None or len(runs) == 1:
                    done.append(runs)
        return done


def runs_of(start: int, sources: np.ndarray) -> tuple[Run, ...]:
    """The longest runs of consecutive positions from ``start`` on that read consecutive positions. ``sources``:
    the position that each reads, int64 ``[n]``."""
    breaks = np.flatnonzero(np.diff(sources) != 1) + 1
    parts = np.split(sources, breaks)
    begins = [0, *breaks.tolist()]
    return tuple(
        Run(start + at, int(part[0]), len(part)) for at, part in zip(begins, parts, strict=True)
    )


@dataclass(eq=False)
class Candidate:
    """A block of a response that reads the KV slots of other positions (its source), or may read them later.

    Attributes:
        runs: What the block's positions read, in their order. One run, except at page sizes above 1: there the
            block is a page, whose source may be several runs.
        source: The request that the source belongs to; None if both belong to the same request.
        source_rid: SGLang's id of the request ``source``, cut to ``MOST_OF_ID`` characters.
        accepted: ``AdaptiveThreshold.epoch`` when the KV distance of the two was accepted; -1 if it was never
            accepted. During that epoch the distance is not judged again, even after a retraction.
        shared_at: How many positions had written KV when the block began to share; 0 if it never did. If a
            retraction had its KV computed again, the time after the retraction (before: ``recomputed`` of
            ``RequestRecord``).
        waits: Why the block was last refused and kept, to be asked about again; "" if it never was.
    """

    runs: tuple[Run, ...]
    source: ref[Request] | None = None
    source_rid: str = ""
    accepted: int = -1
    shared_at: int = 0
    waits: str = ""

    def __post_init__(self) -> None:
        self.source_rid = self.source_rid[:MOST_OF_ID]

    @property
    def dst_start(self) -> int:
        return self.runs[0].dst_start

    @property
    def length(self) -> int:
        """Number of tokens in the block."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True, eq=False)
class BlockProposal:
    """A proposal: positions ``[dst_start, dst_end)`` of ``req`` (the block, or *destination*) shall read the
    slots of as many positions of ``lender`` (the *source*, ``candidate.runs``).

    Positions are indexes into the prompt followed by the output. A position *names* a slot if the request's row
    (block table) holds the slot there. Other positions of ``req`` that name a slot of the destination are
    redirected too, so the slot becomes free. The source may come before or after the destination. The source's
    slots are looked up when the block shares.

    Attributes:
        lender: The request whose slots would be read: ``req`` itself or another request.
        row, lender_row: The rows of ``req`` and ``lender`` when this proposal was made. The block is refused if
            either request no longer has that row.
    """

    req: Request
    candidate: Candidate
    row: HostRow | None
    lender: Request
    lender_row: HostRow | None

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.candidate.runs

    @property
    def dst_start(self) -> int:
        return self.candidate.dst_start

    @property
    def length(self) -> int:
        return self.candidate.length

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.length

    @property
    def src_start(self) -> int:
        """The lowest position of the source."""
        return min(run.src_start for run in self.runs)

    @property
    def src_end(self) -> int:
        """The position behind the highest one of the source."""
        return max(run.src_end for run in self.runs)

    def sources(self) -> Iterator[int]:
        """The position that each position of the block would read, in order."""
        for run in self.runs:
            yield from range(run.src_start, run.src_end)

    @property
    def is_across(self) -> bool:
        """Whether the block would read slots of a request other than ``req``."""
        return self.lender is not self.req

    @property
    def rows(self) -> tuple[HostRow, HostRow]:
        """``row`` and ``lender_row`` of a block that the rules allowed, so neither is None."""
        assert self.row is not None and self.lender_row is not None, "refused before"
        return self.row, self.lender_row

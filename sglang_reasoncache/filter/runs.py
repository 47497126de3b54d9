# SPDX-License-Identifier: Apache-2.0
"""Finds blocks whose tokens occur earlier in the response, or in another response to the same prompt.
A block may begin in one step and end in the next, if no token lies between the two steps."""

from __future__ import annotations

from array import array

from sglang_reasoncache.filter.matcher import AcrossPair, BlockPair, FilterCounters, Matcher
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig

_MODULUS, _BASE = (1 << 61) - 1, 1_000_003_579
#: A request or group remembers at most this many windows (see :class:`RunMatcher`), which take 15 MB. At this
#: limit all of them are forgotten, and new windows are collected.
_MAX_RUNS = 1 << 17
#: States of a token. ``_READS``: its block reads another block; ``_IS_READ``: another block reads its block.
_READS, _IS_READ = 1, 2


class RunGroup:
    """Responses to one prompt.

    Of the blocks with equal windows (:class:`RunMatcher`), one is the *copy*, and the others may read it. A
    copy that is read never reads another block itself, so its KV is always in slots of its own response."""

    def __init__(self) -> None:
        self.members: dict[int, RunMatcher] = {}
        # Hash of a window -> member and offset of the copy. A copy that cannot be read any more is replaced.
        self.copies: dict[int, tuple[int, int]] = {}


class RunMatcher(Matcher):
    """Finds blocks of one response whose tokens occur earlier in this response or elsewhere in its group.

    When a passage repeats, its first tokens have the least context in common with the earlier occurrence, so
    sharing their KV does the most damage. A block is therefore paired only if its *window* repeats: the block
    and the tokens before it, ``min_run`` tokens in all. A rolling hash finds equal windows, which are
    then compared token by token. A token costs O(1) time and 120 bytes, in a group up to 240 bytes.
    An offset is a position minus ``start``, the position of the first output token. In direction ``oldest``
    the later of two equal blocks reads the earlier; in ``newest`` the earlier reads the later.
    """

    def __init__(self, config: FilterConfig, start: int) -> None:
        self._block, self._page, self._min_age = config.block, config.page_size, config.min_age
        self._keeps_first = config.direction == "oldest"
        self._start = start
        # Token at each offset, or -1 outside steps; hash of all tokens before that offset, back to the last -1.
        self._tokens, self._hashes = array("q"), array("q", [0])
        # Number of tokens that a window has before its block.
        self._lead = max(0, config.min_run - self._block)
        self._power = pow(_BASE, self._lead + self._block, _MODULUS)
        # Hash of a window -> offset of a block with this window: the first in direction oldest, else the last.
        self._runs: dict[int, int] = {}
        # ``_reads``: offset of a block -> offset of the block it reads. ``_fate``: each token's state, or 0.
        self._reads: dict[int, int] = {}
        self._fate = bytearray()
        self._begin(0)
        self._member = -1
        self._group: RunGroup | None = None
        # ``_old``: offset of the next block to look up in the group. ``_followed``: the source's member in
        # the last pair found in the group, and the source's offset minus the reader's offset.
        self._old = self._at
        self._followed = -1, 0

    def join(self, member: int, group: RunGroup | None) -> None:
        """Join ``group`` under the id ``member``. If ``group`` is None, leave the current group. Its members
        then no longer find blocks of this response."""
        if self._group is not None:
            del self._group.members[self._member]
        self._member, self._group = member, group
        if group is not None:
            group.members[member] = self

    def propose(self, step: Step) -> list[BlockPair]:
        self._append(step)
        pairs, block = [], self._block
        while self._at + block <= len(self._tokens):
            at = self._at
            earlier = self._earlier(at)
            if earlier is None or not self._take(earlier):
                self._at += self._page
                continue
            self._distance = at - earlier
            pairs.append(BlockPair(self._start + at, self._start + earlier))
            self._at += block
        self.counters = FilterCounters(candidates=len(pairs))
        return pairs

    def _begin(self, offset: int) -> None:
        """Let no window begin before ``offset``."""
        first = offset + self._lead
        # ``_at``: offset of the next block to look up; ``_remembered``: of the next block to put in ``_runs``.
        # ``_distance``: tokens from the earlier to the later block of the last pair; 0 until a pair is found.
        self._at = self._remembered = first + -(self._start + first) % self._page
        self._distance = 0

    def _take(self, earlier: int) -> bool:
        """Mark the block that reads. In direction oldest it is the block at ``_at``. In direction newest it is
        the last block of the chain that begins at ``earlier`` and follows ``_reads`` (see :class:`AgeRule`).
        Returns False, and marks nothing, if this last block overlaps a block that reads or is read."""
        if self._keeps_first:
            self._mark(self._at, _READS)
            return True
        last = earlier
        while last in self._reads:
            last = self._reads[last]
        if any(self._fate[last : last + self._block]):
            return False
        self._mark(last, _READS)
        self._reads[earlier] = self._reads[last] = self._at
        return True

    def _mark(self, at: int, fate: int) -> None:
        self._fate[at : at + self._block] = bytes((fate,)) * self._block

    def across(self) -> list[AcrossPair]:
        """Look up in the group each block that ``min_age`` tokens now follow. Returns the pairs, ascending.
        A block without an equal block becomes a copy. Does nothing while the group has one member."""
        group, pairs, page = self._group, list[AcrossPair](), self._page
        if group is None or len(group.members) < 2:
            return pairs
        while self._old + self._block <= len(self._tokens) - self._min_age:
            at = self._old
            self._old += page
            fate = self._fate[at : at + self._block]
            window = self._window(at)
            if _READS in fate or -1 in window:
                continue
            source, start = self._copy(group, at, window)
            if source is None:
                if len(group.copies) >= _MAX_RUNS:
                    group.copies.clear()
                group.copies[self._hash(at)] = self._member, at
            elif not any(fate) and (source is not self or at - start >= self._block):
                self._mark(at, _READS)
                source._mark(start, _IS_READ)
                self._followed = source._member, start - at
                pairs.append(AcrossPair(self._start + at, source._start + start, source._member))
                self._old = at + self._block
        return pairs

    def _copy(self, group: RunGroup, at: int, window: array[int]) -> tuple[RunMatcher | None, int]:
        """Member and offset of a block that has ``window``, the window of the block at ``at``. The block to
        which ``_followed`` points is tried first, then the copy. The member is None if neither can be read."""
        last, distance = self._followed
        anywhere = group.copies.get(self._hash(at), (-1, 0))
        for member, start in ((last, at + distance), anywhere):
            source = group.members.get(member)
            if source is not None and source._lends(start, window):
                return source, start
        return None, 0

    def _lends(self, at: int, window: array[int]) -> bool:
        """Whether the block at ``at`` can be read: it has this ``window``, is old enough and reads no block."""
        return (
            self._lead <= at < self._old
            and _READS not in self._fate[at : at + self._block]
            and self._window(at) == window
        )

    def _append(self, step: Step) -> None:
        offset = step.start - self._start
        gap = offset - len(self._tokens)
        if gap:
            # Tokens between two steps are never paired, and no window contains them.
            self._remember(len(self._tokens) - self._block)
            self._tokens.extend([-1] * gap)
            self._hashes.extend([0] * gap)
            self._begin(offset)
        rolling = self._hashes[-1]
        for token in step.token_ids:
            rolling = (rolling * _BASE + token + 1) % _MODULUS
            self._hashes.append(rolling)
        self._tokens.extend(step.token_ids)
        self._fate.extend(bytes(len(self._tokens) - len(self._fate)))

    def _window(self, at: int) -> array[int]:
        return self._tokens[at - self._lead : at + self._block]

    def _hash(self, at: int) -> int:
        hashes = self._hashes
        return (hashes[at + self._block] - hashes[at - self._lead] * self._power) % _MODULUS

    def _remember(self, last: int) -> None:
        """Enter the windows of blocks up to offset ``last`` into ``_runs``. Later blocks are not entered
        yet, because they overlap the block that is looked up next."""
        for at in range(self._remembered, last + 1, self._page):
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            if self._keeps_first:
                self._runs.setdefault(self._hash(at), at)
            else:
                self._runs[self._hash(at)] = at
            self._remembered = at + self._page

    def _earlier(self, at: int) -> int | None:
        """Offset of an earlier block with the same window as the block at ``at``. The block
        ``_distance`` tokens earlier is tried first, then the block in ``_runs``. None if neither matches."""
        behind = at - self._distance
        if self._distance and self._window(behind) == self._window(at):
            return behind
        self._remember(at - self._block)
        found = self._runs.get(self._hash(at))
        same = found is not None and self._window(found) == self._window(at)
        return found if same else None

# SPDX-License-Identifier: Apache-2.0
"""Finds blocks whose tokens occur earlier in the response, or in another response to the same prompt.
A block may begin in one step and end in the next, if no token lies between the two steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sglang_reasoncache.filter.matcher import AcrossPair, BlockPair, FilterCounters, Matcher
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig

_MODULUS = (1 << 61) - 1
_BASE = 1_000_003_579
#: A request or group remembers at most this many windows (see :class:`RunMatcher`), which take 15 MB. At this
#: limit all of them are forgotten, and new windows are collected.
_MAX_RUNS = 1 << 17
#: Roles of a token. ``_READS``: its block reads another block; ``_IS_READ``: another block reads its block.
_READS = 1
_IS_READ = 2


class RunGroup:
    """Responses to one prompt.

    Of the blocks with equal windows (:class:`RunMatcher`), one is the *copy*, and the others may read it. A
    copy that is read never reads another block itself, so its KV is always in slots of its own response."""

    def __init__(self) -> None:
        self.members: dict[int, RunMatcher] = {}
        # Hash of a window -> member and offset of the copy. A copy that cannot be read any more is replaced.
        self.copies: dict[int, tuple[int, int]] = {}


class PromptRuns:
    """The windows (:class:`RunMatcher`) of a prompt, of which the last ``_MAX_RUNS`` are remembered.

    Args:
        tokens: The prompt's tokens.
        context: Number of tokens that a window has before its block.
        block: Tokens of a block.
    """

    def __init__(self, tokens: Sequence[int], context: int, block: int) -> None:
        self._tokens = array("q", tokens)
        self._context = context
        self._block = block
        # Hash of a window -> position of the last block with this window.
        self._runs: dict[int, int] = {}
        first = max(len(tokens) - _MAX_RUNS, context)
        hashes = array("q", [0])
        power = pow(_BASE, context + block, _MODULUS)
        for end, token in enumerate(self._tokens[first - context :], first - context + 1):
            hashes.append((hashes[-1] * _BASE + token + 1) % _MODULUS)
            start = end - block
            if start >= first:
                before = hashes[-1 - context - block] * power
                self._runs[(hashes[-1] - before) % _MODULUS] = start

    def find(self, number: int, window: array[int], goes_on: int) -> int | None:
        """Position of a block that has ``window``, whose hash is ``number``. The block at ``goes_on`` is tried
        first. None if there is none."""
        for start in (goes_on, self._runs.get(number, -1)):
            begin = start - self._context
            if begin >= 0 and self._tokens[begin : start + self._block] == window:
                return start
        return None


class RunMatcher(Matcher):
    """Finds blocks of one response whose tokens occur earlier in this response or elsewhere in its group.

    When a passage repeats, its first tokens have the least context in common with the earlier occurrence, so
    sharing their KV does the most damage. A block is therefore paired only if its *window* repeats: the block
    and the tokens before it, ``min_run`` tokens in all. A rolling hash finds equal windows, which are
    then compared token by token. A token costs 120 bytes, in a group up to 240, and O(log n) operations on
    average, n being the length of the response.
    An offset is a position minus ``start``, the position of the first output token. In direction ``oldest``
    the later of two equal blocks reads the earlier; in ``newest`` the earlier reads the later.
    """

    def __init__(self, config: FilterConfig, start: int, prompt: Sequence[int] = ()) -> None:
        """``prompt``: the prompt's tokens if blocks of the response may read them."""
        self._block = config.block
        self._min_age = config.min_age
        self._keeps_first = config.direction == "oldest"
        self._start = start
        # Token at each offset, or -1 outside steps.
        self._tokens = array("q")
        # For each offset: hash of all tokens before it, back to the last -1.
        self._hashes = array("q", [0])
        # Number of tokens that a window has before its block.
        self._context = max(0, config.min_run - self._block)
        self._power = pow(_BASE, self._context + self._block, _MODULUS)
        # Hash of a window -> offset of a block with this window: the first in direction oldest, else the last.
        self._runs: dict[int, int] = {}
        # In direction newest: offset of a block that reads -> offset of a later block of its chain.
        self._reads: dict[int, int] = {}
        # Each token's role, or 0.
        self._roles = bytearray()
        self._begin(0)
        self._member = -1
        self._group: RunGroup | None = None
        # Offset of the next block to look up in the group, and in the prompt.
        self._next_in_group = self._next_quoted = self._next
        self._prompt: PromptRuns | None = None
        if prompt:
            self._prompt = PromptRuns(prompt, self._context, self._block)
        # Where in the prompt the passage goes on that the last pair found there belongs to; -1 before.
        self._quote_goes_on = -1
        # Of the last pair found in the group: the source's member, and its offset minus the reader's offset.
        self._followed_member = -1
        self._followed_distance = 0

    def join(self, member: int, group: RunGroup | None) -> None:
        """Join ``group`` under the id ``member``. If ``group`` is None, leave the current group. Its members
        then no longer find blocks of this response."""
        if self._group is not None:
            del self._group.members[self._member]
        self._member = member
        self._group = group
        if group is not None:
            group.members[member] = self

    def propose(self, step: Step) -> list[BlockPair]:
        self._append(step)
        pairs = []
        while self._next + self._block <= len(self._tokens):
            later = self._next
            earlier = self._earlier(later)
            if earlier is None or not self._take(later, earlier):
                self._next += 1
                continue
            self._distance = later - earlier
            pairs.append(BlockPair(self._start + later, self._start + earlier))
            self._next += self._block
        self.counters = FilterCounters(candidates=len(pairs))
        return pairs

    def _begin(self, offset: int) -> None:
        """Let no window begin before ``offset``."""
        # Offset of the next block to look up.
        self._next = offset + self._context
        # Offset of the next block to put in ``_runs``.
        self._next_run = self._next
        # Tokens from the earlier to the later block of the last pair; 0 until a pair is found.
        self._distance = 0

    def _take(self, later: int, earlier: int) -> bool:
        """Mark the block that reads. In direction oldest it is the block at ``later``. In direction newest it
        is the last block of the chain that begins at ``earlier`` and follows ``_reads`` (see :class:`AgeRule`).
        Returns False, and marks nothing, if this last block overlaps a block that reads or is read."""
        if self._keeps_first:
            self._mark(later, _READS)
            return True
        last = self._last(earlier)
        if any(self._roles[last : last + self._block]):
            return False
        self._mark(last, _READS)
        self._reads[last] = later
        return True

    def _last(self, start: int) -> int:
        """Offset of the last block in the chain that begins at ``start``. The blocks passed on the way then
        point to this block, so a chain is walked only once, however often it is looked up."""
        passed = []
        while (later := self._reads.get(start)) is not None:
            passed.append(start)
            start = later
        for block in passed:
            self._reads[block] = start
        return start

    def _mark(self, start: int, role: int) -> None:
        self._roles[start : start + self._block] = bytes((role,)) * self._block

    def across(self) -> list[AcrossPair]:
        """Look up in the group each block that ``min_age`` tokens now follow. Returns the pairs, ascending.
        A block without an equal block becomes a copy. Does nothing while the group has one member."""
        pairs: list[AcrossPair] = []
        group = self._group
        if group is None or len(group.members) < 2:
            return pairs
        while self._next_in_group + self._block <= len(self._tokens) - self._min_age:
            reader = self._next_in_group
            self._next_in_group += 1
            roles = self._roles[reader : reader + self._block]
            window = self._window(reader)
            if _READS in roles or -1 in window:
                continue
            source, start = self._copy(group, reader, window)
            if source is None:
                if len(group.copies) >= _MAX_RUNS:
                    group.copies.clear()
                group.copies[self._hash(reader)] = self._member, reader
            elif not any(roles) and (source is not self or reader - start >= self._block):
                self._mark(reader, _READS)
                source._mark(start, _IS_READ)
                self._followed_member = source._member
                self._followed_distance = start - reader
                pairs.append(
                    AcrossPair(self._start + reader, source._start + start, source._member)
                )
                self._next_in_group = reader + self._block
        return pairs

    def quoted(self) -> list[BlockPair]:
        """Look up in the prompt each block that ``min_age`` tokens now follow and that reads no block and is
        read by no other response. Blocks of this response that read the block then read the prompt's."""
        pairs: list[BlockPair] = []
        if self._prompt is None:
            return pairs
        while self._next_quoted + self._block <= len(self._tokens) - self._min_age:
            reader = self._next_quoted
            self._next_quoted += 1
            window = self._window(reader)
            goes_on = self._quote_goes_on
            self._quote_goes_on = -1
            if -1 in window or any(self._roles[reader : reader + self._block]):
                continue
            source = self._prompt.find(self._hash(reader), window, goes_on)
            if source is None:
                continue
            self._mark(reader, _READS)
            self._quote_goes_on = source + self._block
            pairs.append(BlockPair(self._start + reader, source))
            self._next_quoted = reader + self._block
        return pairs

    def _copy(
        self, group: RunGroup, reader: int, window: array[int]
    ) -> tuple[RunMatcher | None, int]:
        """Member and offset of a block that has ``window``, the window of the block at ``reader``. The block
        that continues the last pair found in the group is tried first, then the copy. The member is None if
        neither can be read."""
        continued = self._followed_member, reader + self._followed_distance
        copy = group.copies.get(self._hash(reader), (-1, 0))
        for member, start in (continued, copy):
            source = group.members.get(member)
            if source is not None and source._lends(start, window):
                return source, start
        return None, 0

    def _lends(self, start: int, window: array[int]) -> bool:
        """Whether the block at ``start`` can be read: it has this ``window``, is old enough and reads no
        block."""
        return (
            self._context <= start < self._next_in_group
            and _READS not in self._roles[start : start + self._block]
            and self._window(start) == window
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
        self._roles.extend(bytes(len(self._tokens) - len(self._roles)))

    def _window(self, start: int) -> array[int]:
        return self._tokens[start - self._context : start + self._block]

    def _hash(self, start: int) -> int:
        hashes = self._hashes
        before = hashes[start - self._context] * self._power
        return (hashes[start + self._block] - before) % _MODULUS

    def _remember(self, last: int) -> None:
        """Enter the windows of blocks up to offset ``last`` into ``_runs``. Later blocks are not entered
        yet, because they overlap the block that is looked up next."""
        for start in range(self._next_run, last + 1):
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            if self._keeps_first:
                self._runs.setdefault(self._hash(start), start)
            else:
                self._runs[self._hash(start)] = start
            self._next_run = start + 1

    def _earlier(self, later: int) -> int | None:
        """Offset of an earlier block with the same window as the block at ``later``. The block ``_distance``
        tokens earlier is tried first, then the block in ``_runs``. None if neither matches."""
        continued = later - self._distance
        if self._distance and self._window(continued) == self._window(later):
            return continued
        self._remember(later - self._block)
        earlier = self._runs.get(self._hash(later))
        same = earlier is not None and self._window(earlier) == self._window(later)
        return earlier if same else None

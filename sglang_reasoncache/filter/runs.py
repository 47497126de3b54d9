# SPDX-License-Identifier: Apache-2.0
"""Finds blocks whose tokens stand earlier in the response, wherever steps begin, or in another
response to the same prompt."""

from __future__ import annotations

from array import array

from sglang_reasoncache.filter.align import AcrossPair, BlockPair
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig

_MODULUS, _BASE = (1 << 61) - 1, 1_000_003_579
#: Runs remembered for one request, and for one group: 15 MB. Beyond, all are forgotten and
#: collected anew.
_MAX_RUNS = 1 << 17
#: What became of a token: its block reads another one, or another one reads its block.
_READS, _IS_READ = 1, 2


class RunGroup:
    """Responses to the same prompt, and one copy of each of their old runs, which all others read.

    A block reads that copy or is it, never both, so no slot is passed on.
    """

    def __init__(self) -> None:
        self.members: dict[int, RunMatcher] = {}
        # Hash of a run -> the member and offset of the copy. What a member left behind is replaced.
        self.copies: dict[int, tuple[int, int]] = {}


class RunMatcher:
    """Equal runs of one response, grown as far as they go. Not thread safe.

    A token costs O(1): its block is looked up by a rolling hash, and what is found is compared
    token by token. Takes 120 bytes a token, and as much in its group.
    """

    def __init__(self, config: FilterConfig, start: int) -> None:
        self._block, self._page, self._min_age = config.block, config.page_size, config.min_age
        self._keeps_first = config.direction == "oldest"
        self._start = start
        # By position less ``start``: tokens, and the hash of all before.
        self._tokens, self._hashes = array("q"), array("q", [0])
        self._least = max(config.min_run, self._block)
        self._power = pow(_BASE, self._least, _MODULUS)
        # Hash of a block -> offset of its first or newest run.
        self._runs: dict[int, int] = {}
        # Offsets of blocks that read later ones; of each offset what became of it.
        self._readers: set[int] = set()
        self._fate = bytearray()
        # Offsets of the next block to look up and to remember; how far back the last one was found.
        self._at = self._remembered = -start % self._page
        self._distance = 0
        self._member = -1
        self._group: RunGroup | None = None
        # Offset of the next block to look up in the group; the member that the last one was found
        # in, and how far from here.
        self._old = self._at
        self._followed = -1, 0

    def join(self, member: int, group: RunGroup | None) -> None:
        """Become ``member`` of a group, or leave it: what it has is nobody's source any more."""
        if self._group is not None:
            del self._group.members[self._member]
        self._member, self._group = member, group
        if group is not None:
            group.members[member] = self

    def propose(self, step: Step) -> list[BlockPair]:
        """Blocks that end in ``step``, ascending, with earlier ones of the same tokens."""
        self._append(step)
        pairs, block = [], self._block
        while self._at + block <= len(self._tokens):
            at = self._at
            earlier = self._earlier(at)
            if earlier is None and at + self._least > len(self._tokens):
                break
            if earlier is None or not self._take(earlier):
                self._at += self._page
                continue
            self._distance = at - earlier
            pairs.append(BlockPair(self._start + at, self._start + earlier))
            self._at += block
        return pairs

    def _take(self, earlier: int) -> bool:
        """Whether a block may read: alone, or as often as it likes, but not a part of another."""
        if self._keeps_first:
            self._mark(self._at, _READS)
        elif earlier not in self._readers:
            if any(self._fate[earlier : earlier + self._block]):
                return False
            self._readers.add(earlier)
            self._mark(earlier, _READS)
        return True

    def _mark(self, at: int, fate: int) -> None:
        self._fate[at : at + self._block] = bytes((fate,)) * self._block

    def across(self) -> list[AcrossPair]:
        """Blocks that became old, ascending, with equal ones of the group; what it lacks is there
        for the others from now on. Nothing while there are no others."""
        group, pairs, page = self._group, list[AcrossPair](), self._page
        if group is None or len(group.members) < 2:
            return pairs
        while self._old + self._least <= len(self._tokens) - self._min_age:
            at = self._old
            self._old += page
            fate = self._fate[at : at + self._block]
            if _READS in fate or -1 in self._tokens[at : at + self._least]:
                continue
            source, start = self._copy(group, at)
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

    def _copy(self, group: RunGroup, at: int) -> tuple[RunMatcher | None, int]:
        """Who has the block at ``at``, and where: behind the last pair's, or ``min_run`` tokens
        anywhere."""
        member, distance = self._followed
        behind = member, at + distance, self._block
        anywhere = *group.copies.get(self._hash(at), (-1, 0)), self._least
        for member, start, length in (behind, anywhere):
            source = group.members.get(member)
            if source is not None and source._lends(start, self._tokens[at : at + length]):
                return source, start
        return None, 0

    def _lends(self, at: int, tokens: array[int]) -> bool:
        """Whether ``tokens`` are those at ``at``, old and not read from elsewhere."""
        return (
            0 <= at < self._old
            and _READS not in self._fate[at : at + self._block]
            and self._tokens[at : at + len(tokens)] == tokens
        )

    def _append(self, step: Step) -> None:
        offset = step.start - self._start
        gap = offset - len(self._tokens)
        if gap:
            # Tokens in between take no part; no run crosses them.
            self._remember(len(self._tokens) - self._least)
            self._tokens.extend([-1] * gap)
            self._hashes.extend([0] * gap)
            self._at = self._remembered = offset + -step.start % self._page
            self._distance = 0
        rolling = self._hashes[-1]
        for token in step.token_ids:
            rolling = (rolling * _BASE + token + 1) % _MODULUS
            self._hashes.append(rolling)
        self._tokens.extend(step.token_ids)
        self._fate.extend(bytes(len(self._tokens) - len(self._fate)))

    def _hash(self, at: int) -> int:
        hashes = self._hashes
        return (hashes[at + self._least] - hashes[at] * self._power) % _MODULUS

    def _remember(self, last: int) -> None:
        """Runs up to offset ``last``: a block may not equal one that it overlaps."""
        for at in range(self._remembered, last + 1, self._page):
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            if self._keeps_first:
                self._runs.setdefault(self._hash(at), at)
            else:
                self._runs[self._hash(at)] = at
            self._remembered = at + self._page

    def _earlier(self, at: int) -> int | None:
        """Where the tokens at ``at`` stand: behind the last pair's, or ``min_run`` of them
        anywhere."""
        tokens, block, least = self._tokens, self._block, self._least
        if self._distance:
            earlier = at - self._distance
            if tokens[earlier : earlier + block] == tokens[at : at + block]:
                return earlier
        if at + least > len(tokens):
            return None
        self._remember(at - least)
        found = self._runs.get(self._hash(at))
        same = found is not None and tokens[found : found + least] == tokens[at : at + least]
        return found if same else None

# SPDX-License-Identifier: Apache-2.0
"""Finds blocks whose tokens stand earlier in the response, wherever steps begin."""

from __future__ import annotations

from array import array

from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig

_MODULUS, _BASE = (1 << 61) - 1, 1_000_003_579
#: Runs remembered for one request: 15 MB. Beyond, all are forgotten and collected anew.
_MAX_RUNS = 1 << 17


class RunMatcher:
    """Blocks of one response that stand earlier in it, each with the tokens before it. Not thread
    safe.

    The first tokens of a repeat have the least context in common; sharing them does most of the
    damage. So a block is paired where it and what is before it, ``min_run`` tokens in all, repeat.
    A token costs O(1): a window of so many is looked up by a rolling hash, and what is found is
    compared token by token. Takes 120 bytes a token.
    """

    def __init__(self, config: FilterConfig, start: int) -> None:
        self._block, self._page = config.block, config.page_size
        self._keeps_first = config.direction == "oldest"
        self._start = start
        # By position less ``start``: tokens, and the hash of all before.
        self._tokens, self._hashes = array("q"), array("q", [0])
        # Tokens before a block that must repeat as well.
        self._lead = max(0, config.min_run - self._block)
        self._power = pow(_BASE, self._lead + self._block, _MODULUS)
        # Hash of a window -> offset of its first or newest block.
        self._runs: dict[int, int] = {}
        # Offsets of blocks that read later ones, and a byte for each offset in one of them.
        self._readers: set[int] = set()
        self._read = bytearray()
        self._begin(0)

    def propose(self, step: Step) -> list[BlockPair]:
        """Blocks that end in ``step``, ascending, with earlier ones of the same tokens."""
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
        return pairs

    def _begin(self, offset: int) -> None:
        """No window begins before ``offset``."""
        first = offset + self._lead
        # Offsets of the next block to look up and to remember; how far back the last one was found.
        self._at = self._remembered = first + -(self._start + first) % self._page
        self._distance = 0

    def _take(self, earlier: int) -> bool:
        """Whether a block may read: alone, or as often as it likes, but not a part of another."""
        end = earlier + self._block
        if self._keeps_first or earlier in self._readers:
            return True
        if 1 in self._read[earlier:end]:
            return False
        self._readers.add(earlier)
        self._read[earlier:end] = b"\1" * self._block
        return True

    def _append(self, step: Step) -> None:
        offset = step.start - self._start
        gap = offset - len(self._tokens)
        if gap:
            # Tokens in between take no part; no window crosses them.
            self._remember(len(self._tokens) - self._block)
            self._tokens.extend([-1] * gap)
            self._hashes.extend([0] * gap)
            self._begin(offset)
        rolling = self._hashes[-1]
        for token in step.token_ids:
            rolling = (rolling * _BASE + token + 1) % _MODULUS
            self._hashes.append(rolling)
        self._tokens.extend(step.token_ids)
        self._read.extend(bytes(len(self._tokens) - len(self._read)))

    def _window(self, at: int) -> array[int]:
        return self._tokens[at - self._lead : at + self._block]

    def _hash(self, at: int) -> int:
        hashes = self._hashes
        return (hashes[at + self._block] - hashes[at - self._lead] * self._power) % _MODULUS

    def _remember(self, last: int) -> None:
        """Blocks up to offset ``last``: one may not equal another that it overlaps."""
        for at in range(self._remembered, last + 1, self._page):
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            if self._keeps_first:
                self._runs.setdefault(self._hash(at), at)
            else:
                self._runs[self._hash(at)] = at
            self._remembered = at + self._page

    def _earlier(self, at: int) -> int | None:
        """Where the block at ``at`` stands with what is before it: behind the last pair's, or
        anywhere."""
        window = self._window(at)
        if self._distance and self._window(at - self._distance) == window:
            return at - self._distance
        self._remember(at - self._block)
        found = self._runs.get(self._hash(at))
        return found if found is not None and self._window(found) == window else None

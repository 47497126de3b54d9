# SPDX-License-Identifier: Apache-2.0
"""A node of the prefix cache whose positions may alias (``continuations.py``); a prefix that ends in one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.references import named_pages

#: ``extra_key`` and ``cache_salt`` of SGLang's keys: requests that differ in these share no prefix.
Namespace = tuple[str | None, str | None]


def _first(array: np.ndarray, length: int) -> np.ndarray:
    """The first ``length`` elements, copied if they are less than half of what they are a view of."""
    first = array[:length]
    return (
        first.copy() if first.base is not None and first.base.nbytes > 2 * first.nbytes else first
    )


class Path(NamedTuple):
    """A path of the tree that a continuation goes on with. ``digest``: of its tokens. ``node``: SGLang's id of
    the node where it ends."""

    namespace: Namespace
    digest: bytes
    node: Any


class Counted(NamedTuple):
    """Pages that some leading positions of a continuation name.

    Attributes:
        owned: Number of slots of the pages that only this continuation names.
        lent: The lent pages, int64 ``[n]`` in host memory, once for each reference (``references.py``) to them.
        borrowed: How many references there are to borrowed pages.
    """

    owned: int
    lent: np.ndarray
    borrowed: int


class Continuation:
    """KV of consecutive positions behind a path of the tree, or behind a part of another continuation.

    A page may be named several times here, and a position may name any slot of a page. Elsewhere it is named by
    rows of requests that pin the continuation, in the part that the cache owns. If the page is *lent*, other
    continuations and other rows name it, too. If it is *borrowed*, it belongs to what this one goes on with,
    which is not evicted before it.

    Attributes:
        path: The path of the tree that this one goes on with. None if it goes on with ``parent``.
        parent: The continuation that this one goes on with. None if it goes on with ``path``.
        start: Position of the first token.
        tokens: int64 ``[n]`` in host memory.
        slots: int64 ``[n]`` on the device.
        known: For each position the slot if several positions may name it, else 0. int64 ``[n]`` in host
            memory.
        exact: Number of leading positions whose KV is exact and read where it was computed.
        head: The tokens of the first page, as bytes. No prompt with other tokens there can read any of it.
        counted: What all positions name.
        pins: Number of running requests that read it or a continuation behind it.
        pinned: Number of leading positions that these requests read. The others can be evicted.
        counted_pinned: What these positions name.
        ending: int64 ``[n]`` on the device: with state layers, the slot in SGLang's pool of states of the state
            after the last position; with a window pool, the slots of the last window, whose peers in that pool
            are kept. None if it was evicted, or if the model has neither.
        needs_ending: Whether the model has either.
        readers: Number of running requests that need ``ending``.
        children: The continuations that go on with a part of this one.
    """

    def __init__(
        self,
        before: Path | Continuation,
        start: int,
        tokens: np.ndarray,
        slots: torch.Tensor,
        known: np.ndarray,
        exact: int,
        lent: np.ndarray,
        borrowed: np.ndarray,
        page: int,
        ending: torch.Tensor | None = None,
    ) -> None:
        """``lent``: slots that others name or named. ``borrowed``: slots of what this one goes on with. Both
        int64 ``[n]`` in host memory."""
        self.path = before if isinstance(before, Path) else None
        self.parent = None if isinstance(before, Path) else before
        self.start = start
        self.tokens = tokens
        self.slots = slots
        self.known = known
        self.exact = exact
        self.head = tokens[:page].tobytes()
        # Number of leading positions -> how many running requests read so many.
        self._reading: Counter[int] = Counter()
        self.children = Branches(page)
        self.ending = ending
        self.needs_ending = ending is not None
        self.readers = 0
        self._page = page
        self._lent = lent
        self._borrowed = borrowed
        self.keep(len(tokens))
        self._pin()

    def keep(self, length: int) -> None:
        """Keep only the first ``length`` tokens. What was evicted must not stay in memory: sessions keep
        requests that ended, and these keep what they read."""
        self.tokens = _first(self.tokens, length)
        self.known = _first(self.known, length)
        self.slots = self.slots[:length]
        if self.slots.untyped_storage().nbytes() > 2 * self.slots.nbytes:
            self.slots = self.slots.clone()
        self.exact = min(self.exact, length)
        self.counted = self._count(length)

    def _count(self, length: int) -> Counted:
        """What the first ``length`` positions name."""
        _, named, alone = named_pages(self.known[:length], self._page)
        is_lent = np.isin(named, self._lent // self._page)
        is_borrowed = np.isin(named, self._borrowed // self._page)
        owned = np.unique(named[~is_lent & ~is_borrowed])
        return Counted(
            owned=int(self._page * (len(alone) + len(owned))),
            lent=named[is_lent],
            borrowed=int(np.count_nonzero(is_borrowed)),
        )

    def read(self, length: int, change: int) -> None:
        """``change`` more running requests read the first ``length`` positions."""
        self._reading[length] += change
        if not self._reading[length]:
            del self._reading[length]
        if self._longest != self.pinned:
            self._pin()

    @property
    def pins(self) -> int:
        return self._reading.total()

    @property
    def has_unread(self) -> bool:
        """Whether it has positions that no running request reads. False once it was evicted."""
        return self.pinned < len(self)

    @property
    def _longest(self) -> int:
        """Number of leading positions that running requests read. What needs its ending is read as a whole."""
        longest = max(self._reading, default=0)
        return len(self) if longest and self.needs_ending else longest

    def _pin(self) -> None:
        """Count what running requests read."""
        self.pinned = self._longest
        self.counted_pinned = self._count(self.pinned) if self.has_unread else self.counted

    def takes(self, start: int, is_short: bool) -> bool:
        """Whether the one request that reads this one may append what it computed from ``start`` on. With a
        whole ending that is kept beside this one, so that prompts can go on behind both. ``is_short``: whether
        it is shorter than a window, so that its window begins here."""
        can = self.ending is not None if is_short else not self.needs_ending
        return can and self.end == start and self.pins == 1 and not self.children

    def extend(self, tail: Continuation) -> torch.Tensor:
        """Append a continuation that goes on with all of this one, if this one :meth:`takes` it. Returns the
        slots that the last window has passed."""
        passed = self.slots[:0]
        ending = self.ending
        # First what may fail: no memory may be left on the device.
        slots = torch.cat((self.slots, tail.slots))
        if ending is not None and tail.ending is not None:
            joined = torch.cat((ending, tail.ending))
            passed = joined[: len(tail.ending)]
            ending = joined[len(tail.ending) :]
        self.slots = slots
        self.ending = ending
        # What the rest borrows of this one is named twice here, unless nothing is known of its slot.
        mine = named_pages(self.known, self._page)[1]
        borrowed = tail._borrowed[~np.isin(tail._borrowed // self._page, mine)]
        self._borrowed = np.concatenate((self._borrowed, borrowed))
        if self.exact == len(self.tokens):
            self.exact += tail.exact
        self.tokens = np.concatenate((self.tokens, tail.tokens))
        self.known = np.concatenate((self.known, tail.known))
        self._lent = np.concatenate((self._lent, tail._lent))
        self.keep(len(self.tokens))
        self._pin()
        return passed

    @property
    def ends_a_prefix(self) -> bool:
        """Whether a prompt can go on behind the last position."""
        return not self.needs_ending or self.ending is not None

    @property
    def serves_nobody(self) -> bool:
        """Whether its ending was evicted, and no request and no other continuation needs it."""
        return not self.ends_a_prefix and not self.pins and not self.children

    @property
    def digest(self) -> bytes:
        """Of the tokens of :attr:`path`; empty if there is none."""
        return b"" if self.path is None else self.path.digest

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def usable(self, tokens: np.ndarray, exact: bool) -> int:
        """Number of leading positions that a prompt with these ``tokens`` can read. ``exact``: whether only
        exact KV may be read."""
        length = self.common(tokens)
        if exact:
            length = min(length, self.exact // self._page * self._page)
        return 0 if self.needs_ending and length < len(self) else length

    def common(self, tokens: np.ndarray) -> int:
        """Number of leading tokens, in whole pages, that equal those of ``tokens``, a whole prompt."""
        there = tokens[self.start : self.end]
        differs = np.flatnonzero(self.tokens[: len(there)] != there)
        equal = int(differs[0]) if len(differs) else len(there)
        return equal // self._page * self._page


class _Index(NamedTuple):
    """Where continuations begin: ``starts``, int64 ``[n]``, ascending; the first token behind each, int64
    ``[n]``; the tokens of the page there, and the continuations that have it, by digest."""

    starts: np.ndarray
    first_tokens: np.ndarray
    entries: list[tuple[bytes, dict[bytes, list[Continuation]]]]


class Branches:
    """The continuations of one continuation, or of all paths in a namespace. ``page``: tokens per page."""

    def __init__(self, page: int) -> None:
        self._page = page
        # Start -> tokens of the first page -> digest -> continuations.
        self._by_start: dict[int, dict[bytes, dict[bytes, list[Continuation]]]] = {}
        # See :meth:`_index_now`. None once it is out of date.
        self._index: _Index | None = None

    def __bool__(self) -> bool:
        return bool(self._by_start)

    def __iter__(self) -> Iterator[Continuation]:
        for by_head in self._by_start.values():
            for by_digest in by_head.values():
                for alike in by_digest.values():
                    yield from alike

    def add(self, node: Continuation) -> None:
        self._index = None
        by_head = self._by_start.setdefault(node.start, {})
        by_head.setdefault(node.head, {}).setdefault(node.digest, []).append(node)

    def remove(self, node: Continuation) -> None:
        by_head = self._by_start[node.start]
        by_digest = by_head[node.head]
        by_digest[node.digest].remove(node)
        # An entry without continuations would cost each look-up time.
        if not by_digest[node.digest]:
            del by_digest[node.digest]
        if not by_digest:
            self._index = None
            del by_head[node.head]
        if not by_head:
            del self._by_start[node.start]

    def alike(self, node: Continuation) -> Sequence[Continuation]:
        """The continuations that begin where ``node`` does, with the same page."""
        by_head = self._by_start.get(node.start, {})
        return by_head.get(node.head, {}).get(node.digest, ())

    def beginning(
        self, tokens: np.ndarray, most: int
    ) -> Iterator[tuple[int, Mapping[bytes, Sequence[Continuation]]]]:
        """Each start up to ``most``, ascending, with the continuations that have a prompt's page there, by
        digest. ``tokens``: of the whole prompt, int64 ``[n]``."""
        if not self._by_start:
            return
        index = self._index_now()
        count = np.searchsorted(index.starts, min(most + 1, len(tokens)))
        starts = index.starts[:count]
        for at in np.flatnonzero(tokens[starts] == index.first_tokens[:count]).tolist():
            head, by_digest = index.entries[at]
            start = int(starts[at])
            if tokens[start : start + self._page].tobytes() == head:
                yield start, by_digest

    def _index_now(self) -> _Index:
        """All starts, so that a look-up takes no time for each of them. SGLang looks waiting requests up again
        and again between two changes."""
        if self._index is None:
            entries = sorted(
                (
                    (start, head, by_digest)
                    for start, by_head in self._by_start.items()
                    for head, by_digest in by_head.items()
                ),
                key=operator.itemgetter(0),
            )
            self._index = _Index(
                np.array([start for start, _, _ in entries], dtype=np.int64),
                np.array([np.frombuffer(head, np.int64)[0] for _, head, _ in entries], np.int64),
                [(head, by_digest) for _, head, by_digest in entries],
            )
        return self._index


class Part(NamedTuple):
    """The first ``length`` positions of ``node``."""

    node: Continuation
    length: int

    @property
    def end(self) -> int:
        return self.node.start + self.length


class Continued(int):
    """A prefix that ends in a continuation, used where SGLang expects the id of a tree node. As an integer it
    is the id of the node that the first continuation goes on with: what the tree has behind that node is not
    read, and so not locked.

    Attributes:
        parts: What follows on the path of the tree, in order. The last part is not empty.
        length: Number of tokens of the whole prefix.
        first_approximate: The first position whose KV is approximate. None if all is exact.
    """

    parts: tuple[Part, ...]

    def __new__(cls, parts: Sequence[Part]) -> Continued:
        path = parts[0].node.path
        assert path is not None, "a continued prefix begins on a path of the tree"
        made = super().__new__(cls, path.node)
        made.parts = tuple(parts)
        return made

    @property
    def start(self) -> int:
        """Number of tokens that the path of the tree holds."""
        return self.parts[0].node.start

    @property
    def length(self) -> int:
        return self.parts[-1].end

    @property
    def ending(self) -> torch.Tensor | None:
        """See :class:`Continuation`."""
        return self.parts[-1].node.ending

    @property
    def first_approximate(self) -> int | None:
        for node, length in self.parts:
            if node.exact < length:
                return node.start + node.exact
        return None

    def slots(self, path: torch.Tensor) -> torch.Tensor:
        """The slots of the whole prefix, int64 ``[length]``. ``path``: those of the path of the tree."""
        return torch.cat([path[: self.start], *(node.slots[:n] for node, n in self.parts)])


def and_children(node: Continuation) -> list[Continuation]:
    """A continuation, then all that go on with it, each after the one that it goes on with."""
    nodes = [node]
    for each in nodes:
        nodes += each.children
    return nodes


def and_parents(node: Continuation | None) -> Iterator[Continuation]:
    while node is not None:
        yield node
        node = node.parent

# SPDX-License-Identifier: Apache-2.0
"""Keeps what finished requests shared in the prefix cache, as nodes that alias: their positions may name a slot
twice, and their KV is approximate.

SGLang's tree cores hold exact KV only and count every position as one slot. So a finished response enters the
core up to its first shared position, and the rest becomes a :class:`Continuation` here. A later prompt that
goes on with the same tokens reads both: an agent that keeps its reasoning does not compute it again.

If a model has state layers (such as Mamba), or windows in a KV pool of their own, a continuation also has an
*ending*: what these layers need to go on behind its last position. It then serves only prompts that repeat all
its tokens."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.lent_pages import Holder, LentPages
from sglang_reasoncache.cache.references import named_pages

#: At least one token in so many of a continuation is evicted at once.
_LEAST_EVICTED = 8
#: The fewest tokens of a continuation, and the most continuations that begin at one place with one token. A
#: hostile client must not make look-ups slow.
LEAST_TOKENS = 16
MOST_ALIKE = 16

#: ``extra_key`` and ``cache_salt`` of SGLang's keys: requests that differ in these share no prefix.
Namespace = tuple[str | None, str | None]
#: Takes away one reference for each of ``slots``, of which ``known`` is known (:class:`Continuation`), and
#: frees ``ending``, if it is not None. Returns how many slots became free.
Free = Callable[[torch.Tensor, np.ndarray, torch.Tensor | None], int]


class Path(NamedTuple):
    """A path of the tree that a continuation goes on with. ``digest``: of its tokens. ``node``: SGLang's id of
    the node where it ends."""

    namespace: Namespace
    digest: bytes
    node: Any


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
        head: The first token.
        owned: Number of slots of the pages that only this continuation names.
        lent: The lent pages, int64 ``[n]`` in host memory, once for each reference (``references.py``) to them.
        borrowed: How many references it has to borrowed pages.
        pins: Number of running requests that read it or a continuation behind it.
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
        self.head = int(tokens[0])
        self.pins = 0
        self.children = Branches()
        self.ending = ending
        self.needs_ending = ending is not None
        self.readers = 0
        self._page = page
        self._lent = lent
        self._borrowed = borrowed
        self.keep(len(tokens))

    def keep(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        self.tokens = self.tokens[:length]
        self.slots = self.slots[:length]
        self.known = self.known[:length]
        self.exact = min(self.exact, length)
        _, named, alone = named_pages(self.known, self._page)
        is_lent = np.isin(named, self._lent // self._page)
        is_borrowed = np.isin(named, self._borrowed // self._page)
        owned = np.unique(named[~is_lent & ~is_borrowed])
        self.lent = named[is_lent]
        self.borrowed = int(np.count_nonzero(is_borrowed))
        self.owned = int(self._page * (len(alone) + len(owned)))

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


class Branches:
    """The continuations of one continuation, or of all paths in a namespace."""

    def __init__(self) -> None:
        # Start -> first token -> digest -> continuations.
        self._by_start: dict[int, dict[int, dict[bytes, list[Continuation]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_start)

    def __iter__(self) -> Iterator[Continuation]:
        for by_head in self._by_start.values():
            for by_digest in by_head.values():
                for alike in by_digest.values():
                    yield from alike

    def add(self, node: Continuation) -> None:
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
            del by_head[node.head]
        if not by_head:
            del self._by_start[node.start]

    def alike(self, node: Continuation) -> Sequence[Continuation]:
        """The continuations that begin where ``node`` does, with the same token."""
        by_head = self._by_start.get(node.start, {})
        return by_head.get(node.head, {}).get(node.digest, ())

    def beginning(
        self, tokens: np.ndarray, most: int
    ) -> Iterator[tuple[int, Mapping[bytes, Sequence[Continuation]]]]:
        """Each start up to ``most``, ascending, with the continuations that have a prompt's token there, by
        digest. ``tokens``: of the whole prompt."""
        for start in sorted(each for each in self._by_start if each <= most and each < len(tokens)):
            by_digest = self._by_start[start].get(int(tokens[start]))
            if by_digest is not None:
                yield start, by_digest


class Part(NamedTuple):
    """The first ``length`` positions of ``node``."""

    node: Continuation
    length: int

    @property
    def end(self) -> int:
        return self.node.start + self.length


class Continued(int):
    """A prefix that ends in a continuation, used where SGLang expects the id of a tree node. As an integer it
    is the id of the node where the path of the tree ends.

    Attributes:
        parts: What follows on the path of the tree, in order. The last part is not empty.
        length: Number of tokens of the whole prefix.
        first_approximate: The first position whose KV is approximate. None if all is exact.
    """

    parts: tuple[Part, ...]

    def __new__(cls, node: int, parts: Sequence[Part]) -> Continued:
        made = super().__new__(cls, node)
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


class Continuations:
    """The continuations of a scheduler's prefix cache: a radix tree in host memory. All ranks make the same
    calls.

    Attributes:
        lent: The pages that others name, too.
        borrowed: How many times continuations name a page of what they go on with.
        evictable_endings: Size of the endings that :meth:`evict_endings` can free: the number of states, or of
            slots of the window pool.
        protected_endings: Size of the endings that running requests need.

    Args:
        page: Tokens per page.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self.lent = LentPages()
        self.borrowed = 0
        # Slots of continuations that are not lent: of those that no request reads, and of the others.
        self._free = self._pinned = 0
        self.evictable_endings = self.protected_endings = 0
        # Number of positions.
        self._positions = 0
        # All continuations, the least recently used first. Each comes after all that go on with it.
        self._used: OrderedDict[Continuation, None] = OrderedDict()
        self._roots: dict[Namespace, Branches] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[Continuation]:
        return iter(self._used)

    @property
    def evictable(self) -> int:
        """Number of slots that :meth:`evict` can free."""
        return self._free + self._page * self.lent.held[Holder.NOBODY]

    @property
    def protected(self) -> int:
        """Number of slots of pinned continuations."""
        return self._pinned + self._page * self.lent.held[Holder.PINNED]

    @property
    def aliased(self) -> int:
        """Number of positions that take no slot: another position, or the row of a running request, names their
        slot. As many slots does the cache save."""
        return self._positions - self.evictable - self.protected

    # -- look up ---------------------------------------------------------------------

    def match(self, key: Any, held: int, exact: bool, found: int = 0) -> tuple[Part, ...]:
        """What goes on with a path of the tree and makes the cached prefix of a prompt longer than the tree has
        it.

        Args:
            key: SGLang's key of the prompt.
            held: Number of the prompt's tokens whose KV the tree has in the pool.
            exact: Whether only exact KV may be read.
            found: Length of the prefix that SGLang found. It is longer than ``held`` if more is on the host,
                and shorter if a state is missing.
        """
        roots = self._roots.get(_namespace(key))
        if roots is None:
            return ()
        tokens = np.asarray(key.token_ids, dtype=np.int64)[: len(key)]
        best: tuple[Part, ...] = ()
        longest = found
        hashed = 0
        digest = _new_digest()
        for start, by_digest in roots.beginning(tokens, held):
            # Each token is hashed once, however many starts a hostile client made.
            digest.update(tokens[hashed:start].tobytes())
            hashed = start
            parts = self._along(by_digest.get(digest.digest(), ()), tokens, exact)
            if parts and parts[-1].end > longest:
                best = parts
                longest = parts[-1].end
        for node, _ in reversed(best):
            self._used.move_to_end(node)
        return best

    def _along(
        self, candidates: Sequence[Continuation], tokens: np.ndarray, exact: bool
    ) -> tuple[Part, ...]:
        """The match that begins with one of ``candidates`` and goes on with the longest, up to the last place
        where a prompt can go on: where an ending is needed, it must be there."""
        parts: list[Part] = []
        best: tuple[Part, ...] = ()
        while candidates:
            next_parts = [Part(each, each.usable(tokens, exact)) for each in candidates]
            for part in next_parts:
                reached = best[-1].end if best else 0
                if part.length and part.end > reached and part.node.ends_a_prefix:
                    best = (*_up_to(parts, part.node.start), part)
            longest = max(next_parts, key=lambda part: part.end)
            if not longest.length or (parts and longest.end <= parts[-1].end):
                break
            parts = [*_up_to(parts, longest.node.start), longest]
            candidates = [
                each
                for _, by_digest in longest.node.children.beginning(tokens, longest.end)
                for alike in by_digest.values()
                for each in alike
            ]
        return best

    # -- change ----------------------------------------------------------------------

    def add(
        self,
        key: Any,
        prefix: Continued | None,
        node: Any,
        start: int,
        slots: torch.Tensor,
        known: np.ndarray,
        exact: int,
        lent: np.ndarray,
        borrowed: np.ndarray,
        references: Mapping[int, int],
        ending: torch.Tensor | None = None,
        needed: int = 1,
        release: Callable[[torch.Tensor], None] | None = None,
    ) -> bool:
        """Keep the last positions of a finished request. Returns False, and keeps nothing, if they are there,
        if there are too few of them, or too many like them.

        Args:
            key: SGLang's key of all tokens up to the last one to keep, which ends a page.
            prefix: The request's cached prefix, if it ended in a continuation, which is pinned.
            node: SGLang's id of the node where the request's path in the tree ends.
            start: Position of the first token to keep, which begins a page.
            slots, known, exact, lent, borrowed, ending: See :class:`Continuation`.
            needed: Size of a whole ending. If ``ending`` is smaller, the rest is what ``prefix`` ends with.
            release: Frees the part of an ending that a short turn has passed.
            references: Page -> number of references, if it is not 1.
        """
        tokens = np.array(key.token_ids, dtype=np.int64)
        parts = () if prefix is None else prefix.parts
        parent = next((node for node, _ in reversed(parts) if node.start < start), None)
        path = Path(_namespace(key), _digest(tokens[:start]), node)
        # A page that siblings lent each other stays lent, whoever borrows it.
        is_lent = np.isin(borrowed // self._page, list(self.lent))
        made = Continuation(
            path if parent is None else parent,
            start,
            tokens[start:].copy(),
            slots,
            known,
            exact,
            np.concatenate((lent, borrowed[is_lent])),
            borrowed[~is_lent],
            self._page,
            ending,
        )
        branches = self._branches(made)
        alike = branches.alike(made)
        if (
            len(made) < LEAST_TOKENS
            or len(alike) >= MOST_ALIKE
            or any(_serves(each, made, tokens) for each in alike)
        ):
            return False
        is_short = ending is not None and len(ending) < needed
        extends = parent is not None and parent.takes(start, is_short)
        if is_short and not extends:
            return False
        if parent is not None and extends:
            owned = parent.owned
            before = Counter(parent.lent.tolist())
            borrowed_before = parent.borrowed
            passed = parent.extend(made)
            self.borrowed += parent.borrowed - borrowed_before
            if release is not None:
                release(passed)
            self._pinned += parent.owned - owned
            added = Counter(parent.lent.tolist()) - before
            self.lent.add(added.elements(), references, pinned=True)
        else:
            if parent is None:
                self._roots[path.namespace] = branches
            branches.add(made)
            self._used[made] = None
            self._free += made.owned
            self.evictable_endings += _size(ending)
            self.borrowed += made.borrowed
            self.lent.add(made.lent.tolist(), references, pinned=False)
        self._positions += len(made)
        for each in _and_parents(parent):
            self._used.move_to_end(each)
        return True

    def _branches(self, node: Continuation) -> Branches:
        """Where ``node`` belongs."""
        if node.parent is not None:
            return node.parent.children
        assert node.path is not None
        return self._roots.get(node.path.namespace) or Branches()

    def pin(self, parts: Sequence[Part]) -> bool:
        """Keep ``parts`` from being evicted, and their ending, for a request that reads them. Returns whether
        there is an ending: the caller calls :meth:`unread` then, at the latest before :meth:`unpin`."""
        for node, length in parts:
            assert node in self._used and length <= len(node), "a continuation was evicted"
            if not node.pins:
                self._free -= node.owned
                self._pinned += node.owned
                self.lent.pin(node.lent.tolist(), True)
            node.pins += 1
        return self._read_ending(parts[-1].node, 1)

    def _read_ending(self, node: Continuation, change: int) -> bool:
        """``change`` more running requests need the ending of ``node``. False if there is none."""
        if node.ending is None:
            return False
        was_read = node.readers > 0
        node.readers += change
        newly_read = _size(node.ending) * ((node.readers > 0) - was_read)
        self.evictable_endings -= newly_read
        self.protected_endings += newly_read
        return True

    def unread(self, parts: Sequence[Part]) -> None:
        """The request that pinned ``parts`` needs their ending no longer."""
        self._read_ending(parts[-1].node, -1)

    def unpin(self, parts: Sequence[Part]) -> None:
        for node, _ in parts:
            node.pins -= 1
            if not node.pins:
                self._free += node.owned
                self._pinned -= node.owned
                self.lent.pin(node.lent.tolist(), False)

    def evict(self, wanted: int, free: Free) -> int:
        """Free at least ``wanted`` slots, or all that are evictable. Returns how many. The last tokens of the
        least recently used continuation go first."""
        freed = 0
        while freed < wanted and self.evictable:
            node = next(each for each in self._used if not each.pins)
            freed += self._shorten(node, wanted - freed, free)
        return freed

    def evict_endings(self, wanted: int, free: Free) -> int:
        """Free endings of size ``wanted`` at least, or all that are evictable, of the least recently used
        conversation first, its oldest turns before its newest: a next turn needs only the newest. Returns how
        many slots became free: a continuation without its ending serves nobody, unless others go on with it."""
        freed = 0
        left = max(self.evictable_endings - wanted, 0)
        while self.evictable_endings > left:
            newest = next(
                each for each in self._used if each.ending is not None and not each.readers
            )
            node = [
                each
                for each in _and_parents(newest)
                if each.ending is not None and not each.readers
            ][-1]
            if node.pins or node.children:
                freed += free(node.slots[:0], node.known[:0], self._take_ending(node))
            else:
                freed += self._shorten(node, len(node), free)
        return freed

    def drop(self, is_there: Callable[[Any], bool], free: Free) -> int:
        """Free the continuations whose path the tree evicted. Returns how many slots became free.

        ``is_there``: whether the tree has the path that ends in a node.
        """
        gone = [
            node
            for node in self._used
            if node.path is not None and not node.pins and not is_there(node.path.node)
        ]
        freed = 0
        for root in gone:
            for node in reversed(and_children(root)):
                # One that lost its ending goes with the last that goes on with it.
                if node in self._used:
                    freed += self._shorten(node, len(node), free)
        return freed

    def _shorten(self, node: Continuation, wanted: int, free: Free) -> int:
        """Free the last ``wanted`` tokens of a continuation, and what then serves nobody. Returns how many
        slots became free."""
        freed = self._cut(node, wanted, free)
        parent = node.parent
        while parent is not None and parent.serves_nobody:
            freed += self._cut(parent, len(parent), free)
            parent = parent.parent
        return freed

    def _cut(self, node: Continuation, wanted: int, free: Free) -> int:
        length = max(wanted, len(node) // _LEAST_EVICTED, self._page)
        if node.needs_ending:
            length = len(node)
        kept = max(len(node) - length, 0) // self._page * self._page
        slots = node.slots[kept:]
        known = node.known[kept:]
        owned = node.owned
        lent = node.lent
        self.borrowed -= node.borrowed
        node.keep(kept)
        self.borrowed += node.borrowed
        self._free -= owned - node.owned
        self._positions -= len(known)
        self.lent.remove(lent[len(node.lent) :].tolist())
        if not kept:
            self._remove(node)
        return free(slots, known, self._take_ending(node))

    def _take_ending(self, node: Continuation) -> torch.Tensor | None:
        """The ending of a continuation, which keeps it no longer. No running request needs it."""
        ending = node.ending
        node.ending = None
        self.evictable_endings -= _size(ending)
        return ending

    def _remove(self, node: Continuation) -> None:
        assert not node.children, "a continuation is evicted after those that go on with it"
        del self._used[node]
        branches = self._branches(node)
        branches.remove(node)
        if node.path is not None and not branches:
            del self._roots[node.path.namespace]


def _size(ending: torch.Tensor | None) -> int:
    return 0 if ending is None else len(ending)


def _up_to(parts: Sequence[Part], end: int) -> list[Part]:
    """``parts``, the last one cut at position ``end``."""
    return [*parts[:-1], *(Part(node, end - node.start) for node, _ in parts[-1:])]


def _serves(there: Continuation, made: Continuation, tokens: np.ndarray) -> bool:
    """Whether ``there``, which begins where ``made`` does, serves all prompts that ``made`` would serve.
    ``tokens``: those of the path, then those of ``made``."""
    if made.needs_ending:
        return there.ends_a_prefix and there.end == made.end == there.start + there.common(tokens)
    return there.start + there.common(tokens) >= len(tokens)


def _namespace(key: Any) -> Namespace:
    return key.extra_key, key.cache_salt


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _digest(tokens: np.ndarray) -> bytes:
    digest = _new_digest()
    digest.update(tokens.tobytes())
    found: bytes = digest.digest()
    return found


def and_children(node: Continuation) -> list[Continuation]:
    """A continuation, then all that go on with it, each after the one that it goes on with."""
    found = [node]
    for each in found:
        found += each.children
    return found


def _and_parents(node: Continuation | None) -> Iterator[Continuation]:
    while node is not None:
        yield node
        node = node.parent

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
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.continuation import (
    Branches,
    Continuation,
    Continued,
    Counted,
    Namespace,
    Part,
    Path,
    and_children,
    and_parents,
)
from sglang_reasoncache.cache.lent_pages import Holder, LentPages

#: At least one token in so many of a continuation is evicted at once.
_LEAST_EVICTED = 8
#: So many continuations are chosen at once to be evicted.
_VICTIMS = 16
#: The fewest tokens of a continuation, and the most continuations that begin at one place with one page. A
#: hostile client must not make look-ups slow.
LEAST_TOKENS = 16
MOST_ALIKE = 16
#: So many digests of a prompt's beginnings are kept.
_MOST_DIGESTS = 4096
#: Of the places where a prompt could leave a path, or a continuation, so many are followed, the last ones.
_MOST_FOLLOWED = 64
#: Takes away one reference for each of ``slots``, of which ``known`` is known (:class:`Continuation`), and
#: frees ``ending``, if it is not None. Returns how many slots became free.
Free = Callable[[torch.Tensor, np.ndarray, torch.Tensor | None], int]


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
        # Slots of continuations that are not lent: of the parts that no request reads, and of the others.
        self._free = self._pinned = 0
        self.evictable_endings = self.protected_endings = 0
        # Number of positions.
        self._positions = 0
        # All continuations, the least recently used first. Each comes after all that go on with it.
        self._used: OrderedDict[Continuation, None] = OrderedDict()
        self._roots: dict[Namespace, Branches] = {}
        # Those that go on with a path of the tree, by SGLang's id of the node where it ends. Then the ids of
        # those nodes that the tree tried to evict.
        self._on_path: dict[int, dict[Continuation, None]] = {}
        self._leaving: dict[int, None] = {}

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
        """Number of slots of the parts of continuations that running requests read."""
        return self._pinned + self._page * self.lent.held[Holder.PINNED]

    @property
    def aliased(self) -> int:
        """Number of positions that take no slot: another position, or the row of a running request, names their
        slot. As many slots does the cache save."""
        return self._positions - self.evictable - self.protected

    # -- look up ---------------------------------------------------------------------

    def match(
        self,
        key: Any,
        held: int,
        exact: bool,
        matched: int = 0,
        digests: dict[int, bytes] | None = None,
    ) -> tuple[Part, ...]:
        """What goes on with a path of the tree and makes the cached prefix of a prompt longer than the tree has
        it.

        Args:
            key: SGLang's key of the prompt.
            held: Number of the prompt's tokens whose KV the tree has in the pool.
            exact: Whether only exact KV may be read.
            matched: Length of the prefix that SGLang found. It is longer than ``held`` if more is on the host,
                and shorter if a state is missing.
            digests: Number of leading tokens of the prompt -> digest of these, as far as earlier calls for the
                same prompt computed them. This call adds its own. SGLang looks waiting requests up again and
                again.
        """
        roots = self._roots.get(_namespace(key))
        if roots is None:
            return ()
        tokens = np.asarray(key.token_ids, dtype=np.int64)[: len(key)]
        best: tuple[Part, ...] = ()
        longest = matched
        digests = {} if digests is None else digests
        beginning = list(roots.beginning(tokens, held))
        _add_digests(digests, tokens, [start for start, _ in beginning])
        # A hostile client must not make look-ups slow: of many paths the longest are followed.
        followed: deque[Sequence[Continuation]] = deque(maxlen=_MOST_FOLLOWED)
        for start, by_digest in beginning:
            alike = by_digest.get(digests[start])
            if alike is not None:
                followed.append(alike)
        for alike in followed:
            parts = self._along(alike, tokens, exact)
            if parts and parts[-1].end > longest:
                best = parts
                longest = parts[-1].end
        return best

    def has(self, parts: Sequence[Part], tokens: np.ndarray, exact: bool) -> bool:
        """Whether all of ``parts``, which a request with these ``tokens`` read before, are still cached, and a
        request that has the states and windows of later positions can go on behind them. A continuation may
        have lost its end since, and have been extended with other tokens. ``exact``: whether only exact KV may
        be read."""
        return all(
            node in self._used and not node.needs_ending and length <= node.usable(tokens, exact)
            for node, length in parts
        )

    def use(self, parts: Sequence[Part]) -> None:
        """A prompt reads ``parts``, which are the most recently used ones now."""
        for node, _ in reversed(parts):
            self._used.move_to_end(node)

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
            ][-_MOST_FOLLOWED:]
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
        is_lent = self.lent.has(borrowed // self._page)
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
            before = parent.counted
            pinned = parent.counted_pinned
            passed = parent.extend(made)
            self.borrowed += parent.counted.borrowed - before.borrowed
            if release is not None:
                release(passed)
            self._free += parent.counted.owned - before.owned
            self.lent.add(_added(before.lent, parent.counted.lent), references)
            self._pinned_instead(pinned, parent.counted_pinned)
        else:
            if parent is None:
                self._roots[path.namespace] = branches
                self._on_path.setdefault(int(path.node), {})[made] = None
            branches.add(made)
            self._used[made] = None
            self._free += made.counted.owned
            self.evictable_endings += _size(ending)
            self.borrowed += made.counted.borrowed
            self.lent.add(made.counted.lent, references)
        self._positions += len(made)
        for each in and_parents(parent):
            self._used.move_to_end(each)
        return True

    def drop_contained(self, free: Free) -> None:
        """Free the continuations that the one which :meth:`add` has just kept behind a path contains: one, say,
        that its request read before it was retracted. They would keep their slots as long as the path is in
        use, and serve nobody."""
        made = next(reversed(self._used))
        for each in list(self._branches(made).alike(made)):
            is_contained = len(each) < len(made) and np.array_equal(
                each.tokens, made.tokens[: len(each)]
            )
            is_needed = each.pins or each.children or each.needs_ending
            if is_contained and not is_needed and each.exact <= made.exact:
                self._shorten(each, len(each), free)

    def _branches(self, node: Continuation) -> Branches:
        """Where ``node`` belongs."""
        if node.parent is not None:
            return node.parent.children
        assert node.path is not None
        return self._roots.get(node.path.namespace) or Branches(self._page)

    def pin(self, parts: Sequence[Part]) -> bool:
        """Keep ``parts`` from being evicted, and their ending, for a request that reads them. What a
        continuation has behind its part can be evicted: the request may need the slots. Returns whether there
        is an ending: the caller calls :meth:`unread` then, at the latest before :meth:`unpin`."""
        for node, length in parts:
            assert node in self._used and length <= len(node), "a continuation was evicted"
            self._read(node, length, 1)
        return self._read_ending(parts[-1].node, 1)

    def _read(self, node: Continuation, length: int, change: int) -> None:
        """``change`` more running requests read the first ``length`` positions of ``node``."""
        before = node.counted_pinned
        node.read(length, change)
        if node.counted_pinned is not before:
            self._pinned_instead(before, node.counted_pinned)

    def _pinned_instead(self, before: Counted, now: Counted) -> None:
        """Running requests now read other positions of a continuation."""
        self._free -= now.owned - before.owned
        self._pinned += now.owned - before.owned
        self.lent.pin(before.lent, False)
        self.lent.pin(now.lent, True)

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
        for node, length in parts:
            self._read(node, length, -1)

    def evict(self, wanted: int, free: Free) -> int:
        """Free at least ``wanted`` slots, or all that are evictable. Returns how many. The last tokens of the
        least recently used continuation go first."""
        freed = 0
        while freed < wanted and self.evictable:
            unread = (node for node in self._used if node.has_unread)
            victims = list(itertools.islice(unread, _VICTIMS))
            if not victims:
                break
            for node in victims:
                # The last that goes on with one may take it along.
                while freed < wanted and self.evictable and node.has_unread:
                    freed += self._shorten(node, wanted - freed, free)
        return freed

    def least_evicted(self) -> int:
        """How many tokens :meth:`evict` takes at least of the next continuation. 0 if requests read all."""
        node = next((each for each in self._used if each.has_unread), None)
        return 0 if node is None else self._least_of(node)

    def _least_of(self, node: Continuation) -> int:
        return len(node) if node.needs_ending else max(len(node) // _LEAST_EVICTED, self._page)

    def evict_endings(self, wanted: int, free: Free) -> int:
        """Free endings of size ``wanted`` at least, or all that are evictable, of the least recently used
        conversation first, its oldest turns before its newest: a next turn needs only the newest. Returns how
        many slots became free: a continuation without its ending serves nobody, unless others go on with it."""
        freed = 0
        left = max(self.evictable_endings - wanted, 0)
        if self.evictable_endings <= left:
            return 0
        for newest in list(self._used):
            if self.evictable_endings <= left:
                break
            if newest.ending is None or newest.readers:
                continue
            for node in reversed(list(and_parents(newest))):
                if self.evictable_endings <= left:
                    break
                if node.ending is None or node.readers:
                    continue
                if node.pins or node.children:
                    freed += free(node.slots[:0], node.known[:0], self._take_ending(node))
                else:
                    freed += self._shorten(node, len(node), free)
        return freed

    def leaves(self, node: int) -> None:
        """The tree is about to evict a node, or to try to. Paths may end there."""
        if node in self._on_path:
            self._leaving[node] = None

    def drop(self, is_there: Callable[[int], bool], free: Free) -> int:
        """Free the continuations whose path the tree evicted. Returns how many slots became free. Only what
        :meth:`leaves` named is looked at: once the pool is full, SGLang evicts at each decode step.

        Args:
            is_there: Whether the tree has the path that ends in a node.
        """
        freed = 0
        for path in [each for each in self._leaving if not is_there(each)]:
            for root in [each for each in self._on_path[path] if not each.pins]:
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
        length = len(node) if node.needs_ending else max(wanted, self._least_of(node))
        kept = max(max(len(node) - length, 0) // self._page * self._page, node.pinned)
        slots = node.slots[kept:]
        known = node.known[kept:]
        before = node.counted
        node.keep(kept)
        self.borrowed -= before.borrowed - node.counted.borrowed
        self._free -= before.owned - node.counted.owned
        self._positions -= len(known)
        self.lent.remove(before.lent[len(node.counted.lent) :])
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
        if node.path is None:
            return
        if not branches:
            del self._roots[node.path.namespace]
        path = int(node.path.node)
        del self._on_path[path][node]
        if not self._on_path[path]:
            del self._on_path[path]
            self._leaving.pop(path, None)


def _size(ending: torch.Tensor | None) -> int:
    return 0 if ending is None else len(ending)


def _added(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """What ``after`` has more often than ``before``, as often as that. All int64 ``[n]``."""
    values, counts = np.unique(after, return_counts=True)
    had, times = np.unique(before, return_counts=True)
    counts[np.isin(values, had)] -= times[np.isin(had, values)]
    return np.repeat(values, np.maximum(counts, 0))


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


def _add_digests(digests: dict[int, bytes], tokens: np.ndarray, starts: Sequence[int]) -> None:
    """Add the digest of the tokens before each of ``starts``, ascending. Each token is hashed once at most."""
    if digests.keys() >= set(starts):
        return
    if len(digests) > _MOST_DIGESTS:
        digests.clear()
    hashed = 0
    digest = _new_digest()
    for start in starts:
        digest.update(tokens[hashed:start].tobytes())
        hashed = start
        digests[start] = digest.digest()


def _digest(tokens: np.ndarray) -> bytes:
    digest = _new_digest()
    digest.update(tokens.tobytes())
    value: bytes = digest.digest()
    return value

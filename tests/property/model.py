# SPDX-License-Identifier: Apache-2.0
"""A Python model of what the KV cache must hold, and checks of the real KV cache. A *content* is a number that
stands for the KV of a slot. A position *shows* the content of its slot. The model knows what each position must
show and, if a content was computed from exact KV only (nothing shared or evicted), for which token sequence."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_reasoncache.sharing.request import record_of
from sglang_reasoncache.sharing.rules import MAX_READERS
from tests.property.world import NOTHING, Eviction, Pair, World

#: Stands for the content of an evicted position.
EVICTED = -2


class Path:
    """A token sequence. The sequences form a trie, so that equal sequences are one object."""

    def __init__(self, salt: str | None, tokens: tuple[int, ...] = ()) -> None:
        self.salt = salt
        self.tokens = tokens
        self._steps: dict[int, Path] = {}

    def step(self, token: int) -> Path:
        if token not in self._steps:
            self._steps[token] = Path(self.salt, (*self.tokens, token))
        return self._steps[token]

    def along(self, tokens: Iterable[int]) -> list[Path]:
        """For each of ``tokens``, the sequence that ends with this token."""
        return list(itertools.accumulate(tokens, Path.step, initial=self))[1:]


#: Contents of a page's positions, in order.
Page = tuple[int, ...]


class Unit(NamedTuple):
    """What shares as a whole: a block, at page sizes above 1 a page. ``sources``: the position that each of its
    positions reads."""

    dst_start: int
    sources: tuple[int, ...]

    @property
    def positions(self) -> range:
        return range(self.dst_start, self.dst_start + len(self.sources))


@dataclass(eq=False)
class Track:
    """A request and what its row (block table) must show."""

    req: Req
    opted_out: bool
    #: For each position of prompt and output, the token sequence that ends there.
    paths: list[Path]
    #: Content of every written position of the row. ``exact``: no block shares and no position was evicted.
    shows: list[int] = field(default_factory=list)
    #: Evicted position -> content that the position would show if it had not been evicted.
    gone: dict[int, int] = field(default_factory=dict)
    exact: bool = True
    #: ``blocks``: units that share. ``ledger``: units that can share later. ``candidates`` survive retraction.
    candidates: list[Unit] = field(default_factory=list)
    blocks: list[Unit] = field(default_factory=list)
    ledger: list[Unit] = field(default_factory=list)
    #: At page sizes above 1: number of a page -> source of each of its positions that a block covers so far.
    covered: dict[int, dict[int, int]] = field(default_factory=dict)
    #: Position -> label. Positions with equal labels name the same slot once all blocks in ``ledger`` share.
    labels: dict[int, int] = field(default_factory=dict)
    #: True from a retraction until the candidates may share again in the new row.
    returned: bool = False
    #: Positions that were evicted before a retraction and must be evicted again.
    evicted_again: set[int] = field(default_factory=set)
    #: The lowest position at which the next proposed block may start.
    frontier: int = 0
    #: Length at which the prefill in progress ends.
    target: int = 0
    #: Contents, and for each page of positions the pages that are linked to it (``Memory._linked``).
    linked: tuple[list[int], dict[int, set[int]]] | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.req.origin_input_ids, *self.req.output_ids]

    @property
    def decoding(self) -> bool:
        return len(self.req.output_ids) > 0 and len(self.shows) >= self.target

    @property
    def evicted(self) -> list[int]:
        return [at for at, content in enumerate(self.shows) if content == EVICTED]


class Memory:
    """The model of one :class:`World`."""

    def __init__(self, world: World, block: int) -> None:
        self.world = world
        self.block = block
        #: Number of positions that share as a whole.
        self.unit = block if world.page == 1 else world.page
        #: Number of tokens that the tree's key of some positions has behind them.
        self.beyond = int(world.setup.pairs)
        self._roots: dict[str | None, Path] = {}
        #: For each content, its token sequence, or None if the row was not exact. Content 0 is never used.
        self._exact_for: list[Path | None] = [None]
        self.running: list[Track] = []
        #: Token sequence of a page's key, from the root on -> the page's contents, for every page in the tree.
        self.tree: dict[Path, Page] = {}
        #: Pages that may have been added to the tree since the last call of :meth:`observe`.
        self.publishable: dict[Path, list[Page]] = {}

    def root(self, salt: str | None) -> Path:
        """The empty sequence for requests with this ``cache_salt``."""
        return self._roots.setdefault(salt, Path(salt))

    def matched(self, track: Track) -> None:
        """Notes that a prefix match filled the start of the row with pages of the tree."""
        pages = self.keys(track.paths[: track.req.prefix_len + self.beyond])
        track.shows = [content for path in pages for content in self.tree[path]]
        track.gone = {}

    def keys(self, paths: list[Path]) -> list[Path]:
        """The token sequences of the keys of all whole pages. ``paths``: for each token the sequence that ends
        with it."""
        page = self.world.page
        return paths[page - 1 + self.beyond :: page]

    def _pages(self, track: Track, up_to: int) -> Iterator[tuple[Path, Page]]:
        """For each whole page of the row below ``up_to``: the token sequence of its key and the contents."""
        page = self.world.page
        paths = self.keys(track.paths[: up_to + self.beyond])
        for end, path in zip(range(page, up_to + 1, page), paths, strict=True):
            yield path, tuple(track.shows[end - page : end])

    def computed(self, track: Track, slots: np.ndarray) -> None:
        """Notes that a forward wrote the next ``len(slots)`` positions, and writes their contents."""
        first = len(self._exact_for)
        start = len(track.shows)
        paths = track.paths[start : start + len(slots)]
        assert len(paths) == len(slots)
        self._exact_for += paths if track.exact else [None] * len(paths)
        new = list(range(first, first + len(paths)))
        self.world.write(slots, new)
        track.shows += new

    def whole(self, track: Track, found: Iterable[Pair]) -> list[Unit]:
        """What the blocks that the filter found make whole."""
        page = self.world.page
        done = []
        for dst, src in found:
            if page == 1:
                done.append(Unit(dst, tuple(range(src, src + self.block))))
                continue
            for at in range(dst, dst + self.block):
                track.covered.setdefault(at // page, {}).setdefault(at, at - dst + src)
            for number in range(dst // page, (dst + self.block - 1) // page + 1):
                if len(track.covered[number]) == page:
                    sources = track.covered.pop(number)
                    done.append(Unit(number * page, tuple(sources[at] for at in sorted(sources))))
        return done

    def proposed(self, track: Track, block: Unit) -> None:
        """Notes a unit that may share: it shares or enters the ledger, unless earlier ones forbid both."""
        track.candidates.remove(block)
        shows = track.shows
        pairs = list(zip(block.positions, block.sources, strict=True))
        labels = dict(track.labels)
        counts = Counter(labels.values())
        if max(max(1, counts[labels.get(dst, dst)]) for dst, _ in pairs) > MAX_READERS:
            return
        if all(shows[dst] == shows[src] for dst, src in pairs):
            return
        for dst, src in pairs:
            low, high = (labels.setdefault(at, at) for at in (dst, src))
            if low == high:
                return
            labels = {at: high if label == low else label for at, label in labels.items()}
        track.labels = labels
        track.candidates.append(block)
        track.ledger.append(block)
        if self.world.controller.pipeline.at_once:
            self.shared(track, block)

    def shared(self, track: Track, block: Unit) -> None:
        """Notes that a block of the ledger shares."""
        track.ledger.remove(block)
        own = range(track.req.kv.cache_protected_len, len(track.shows))
        for dst, src in zip(block.positions, block.sources, strict=True):
            old = track.shows[dst]
            new = track.shows[src]
            # All positions that named the old slot, except the tree's, name the new slot now.
            for at in own:
                if track.shows[at] == old:
                    track.shows[at] = new
            track.gone = {at: new if it == old else it for at, it in track.gone.items()}
        track.blocks.append(block)
        track.exact = False

    def reclaimed(self) -> None:
        """Reads from the requests' states which blocks of the ledger share by now. This cannot be predicted."""
        if self.world.controller.pipeline.at_once:
            return
        for track in self.running:
            state = record_of(track.req)
            for block in state.redirected[len(track.blocks) :] if state else ():
                sources = [at for run in block.runs for at in range(run.src_start, run.src_end)]
                self.shared(track, Unit(block.dst_start, tuple(sources)))

    def retracted(self, track: Track) -> None:
        """Notes that a retraction freed the row."""
        track.blocks = []
        track.ledger = []
        track.labels = {}
        track.shows = []
        track.exact = True
        track.target = 0
        track.returned = True

    def may_share(self, track: Track, block: Unit) -> bool:
        """Whether unit and source are written and unevicted, and the unit is not the tree's."""
        both = [*block.positions, *block.sources]
        return (
            max(both) < len(track.shows)
            and not any(track.shows[at] == EVICTED for at in both)
            and block.dst_start >= track.req.kv.cache_protected_len
        )

    def evict(self, track: Track, evictions: Iterable[Eviction]) -> None:
        """Evicts again the positions that were evicted before a retraction. Then evicts each page that
        ``evictions`` cover, except pages of the tree, evicted pages, the page of the newest position, and
        pages that are linked to a page that stays (at page size 1: name a slot of a position that stays)."""
        protected = track.req.kv.cache_protected_len
        page = self.world.page
        lowest = protected
        if not self.world.setup.prompts:
            lowest = max(lowest, len(track.req.origin_input_ids) // page * page)
        end = (len(track.shows) - 1) // page * page
        again = {at for at in track.evicted_again if at < end}
        track.evicted_again -= again
        self._evicted(track, {at for at in again if at >= protected})
        asked = {at for start, length in evictions for at in range(start, start + length)}
        chosen: set[int] = set()
        for at in range(0, end, page):
            whole = range(at, at + page)
            if at >= lowest and asked.issuperset(whole):
                chosen.update(whole)
        # A position that names a slot of one that stays would free nothing.
        stay = {shown for at, shown in enumerate(track.shows) if at not in chosen}
        self._evicted(track, {at for at in chosen if page > 1 or track.shows[at] not in stay})
        track.exact = track.exact and EVICTED not in track.shows

    def _evicted(self, track: Track, positions: set[int]) -> None:
        page = self.world.page
        going = {at for at in positions if track.shows[at] != EVICTED}
        if page > 1:
            going = {
                at for at in going if self._linked(track, at // page) <= {i // page for i in going}
            }
        for at in going:
            track.gone[at] = track.shows[at]
            track.shows[at] = EVICTED
        for block in list(track.ledger):
            if not self.may_share(track, block):
                track.ledger.remove(block)
                track.candidates.remove(block)

    def _linked(self, track: Track, number: int) -> set[int]:
        """The pages of positions that name slots of the same pages as page ``number``, directly or not."""
        if track.linked is None or track.linked[0] != track.shows:
            track.linked = list(track.shows), {}
            page = self.world.page
            holders: dict[int, set[int]] = {}
            for at, content in enumerate(track.shows):
                if content != EVICTED:
                    holders.setdefault(content, set()).add(at // page)
            groups = {each: {each} for each in range(len(track.shows) // page + 1)}
            for some in holders.values():
                first, *others = (groups[each] for each in some)
                for group in others:
                    if group is not first:
                        first |= group
                        for each in group:
                            groups[each] = first
            track.linked = list(track.shows), groups
        return track.linked[1][number]

    def claim(self, track: Track, block: Unit) -> bool:
        """Makes the unit a candidate and returns True, unless its destination overlaps another candidate's."""
        if any(abs(block.dst_start - other.dst_start) < self.unit for other in track.candidates):
            return False
        track.candidates.append(block)
        return True

    def publish(self, track: Track, up_to: int) -> None:
        """Notes that SGLang may now publish (add to the tree) the row's whole pages below ``up_to``."""
        for path, page in self._pages(track, up_to):
            self.publishable.setdefault(path, []).append(page)

    def repointed(self, track: Track) -> None:
        """Notes that publishing put the tree's page into the row where the tree had one for the same tokens."""
        pages = self._pages(track, track.req.kv.cache_protected_len)
        shown = [content for path, own in pages for content in self.tree.get(path, own)]
        track.shows[: len(shown)] = shown

    def published(self, track: Track, up_to: int) -> None:
        """Checks that the row's whole pages below ``up_to`` were in the tree at the last :meth:`observe`."""
        for path, _ in self._pages(track, up_to):
            assert path in self.tree, f"the page that ends at {len(path.tokens)} was not published"

    def observe(self) -> None:
        """Walk tree and rows, and compare everything with the model."""
        world = self.world
        self.reclaimed()
        allocator = world.allocator
        tree = world.tree
        page = world.page
        stored = world.contents()
        locks: Counter[int] = Counter()
        for track in self.running:
            node = tree.resolve_node_handle(track.req.lock.node)
            while node is not tree.root_node:
                locks[id(node)] += 1
                node = node.parent
        found: dict[Path, Page] = {}
        named: list[np.ndarray] = []
        evictable = protected = 0
        stack = [
            (child, self.root(child.key.cache_salt)) for child in tree.root_node.children.values()
        ]
        while stack:
            node, path = stack.pop()
            data = node.component_data[ComponentType.FULL]
            slots = data.value.numpy()
            assert len(slots) == len(node.key) > 0
            paths = path.along(node.key.token_ids)
            contents = stored[slots].tolist()
            path = paths[len(slots) - 1]
            for start, key in zip(range(0, len(slots), page), self.keys(paths), strict=True):
                found[key] = tuple(contents[start : start + page])
            for at, content in zip(paths[: len(slots)], contents, strict=True):
                assert self._exact_for[content] is at, "an approximation in the tree"
            named.append(self._page_ids(slots))
            assert data.lock_ref == locks[id(node)], "a lock count is wrong"
            protected += len(slots) * (data.lock_ref > 0)
            evictable += len(slots) * (data.lock_ref == 0)
            stack += [(child, path) for child in node.children.values()]
        of_tree = np.concatenate([*named, np.zeros(0, np.int64)])
        assert len(np.unique(of_tree)) == len(of_tree), "the tree holds a page twice"
        # Every new or changed page of the tree was published by a request.
        for path, page_contents in found.items():
            if self.tree.get(path) != page_contents:
                assert page_contents in self.publishable.get(path, ()), (
                    f"nobody published {page_contents}, the tree's page that ends at {len(path.tokens)}"
                )
        self.tree = found
        self.publishable = {}
        assert tree.evictable_size() == evictable
        assert tree.protected_size() == protected

        private = num_evicted = expected_live = 0
        for track in self.running:
            kv = track.req.kv
            row = world.row(track.req)
            written = row[: len(track.shows)]
            shown = np.where(written < 0, EVICTED, stored[written])
            assert shown.tolist() == track.shows, f"the row of {track.req.rid} shows wrong content"
            assert tree.reads_shifted([track.req]) or not world.has_shifted(track.req)
            assert not tree.reads_shifted([track.req]) or track.blocks
            evicted_now = tree.evicted_of([track.req])
            assert evicted_now is not None and any(evicted_now) == (EVICTED in track.shows)
            mine = row[kv.cache_protected_len :]
            named.append(self._named(mine))
            private += kv_private_tokens(kv, page)
            self._check_first_readers(track, row)
            num_evicted += len(track.evicted)
            if track.evicted:
                # Saved slots: the pages left in ``mine``, minus the pages that only these name.
                held = int(np.count_nonzero(mine[::page] >= 0))
                prefix = row[: kv.cache_protected_len] // page
                own = set(self._named(mine).tolist()) - set(prefix.tolist())
                expected_live += (held - len(own)) * page
            else:
                expected_live += len(track.blocks) * self.unit
        self._check_pages(named)

        ledger = world.controller.pipeline.ledger
        promised = sum(len(track.ledger) for track in self.running)
        assert ledger.slots == promised * self.unit
        live = world.controller.pipeline.saved
        extra = sum(allocator.references.values()) - len(allocator.references)
        assert live == (extra - allocator.references.several) * page
        assert live == expected_live
        assert world.controller.report.slots_saved == live + num_evicted
        books = (allocator.available_size(), evictable, protected, private, -live, -num_evicted)
        assert sum(books) == world.total, f"{books} do not add up to {world.total}"

    def _check_first_readers(self, track: Track, row: np.ndarray) -> None:
        """Checks what policies are told about positions of the row that can be evicted only together."""
        req = track.req
        page = self.world.page
        state = record_of(req)
        if state is None:
            return
        held = np.flatnonzero(row >= 0)
        known = self.world.allocator.row_of(req.kv.req_pool_idx)
        first, worth = known.first_readers(held, page)
        if page > 1:
            pages = dict(zip((held // page).tolist(), (first // page).tolist(), strict=True))
            assert (first % page == held % page).all()
            for number in range(len(track.shows) // page):
                if number in pages:
                    group = self._linked(track, number)
                    assert group == {each for each, at in pages.items() if at == pages[number]}
                    assert pages[number] == min(group)
                    named = {
                        int(slot) // page for slot in row[held[np.isin(held // page, list(group))]]
                    }
                    assert worth[held // page == number].tolist() == [len(named) * page] * page
            assert known.saved == page * (len(pages) - len(set((row[held] // page).tolist())))
            return
        assert (worth == 1).all()
        # The number of different slots must be right, because it decides whether a policy runs.
        assert len(np.unique(first)) == len(row) - known.evicted - known.saved
        _, by_slot = np.unique(row[held], return_inverse=True)
        _, by_place = np.unique(first, return_inverse=True)
        both = np.unique(np.stack((by_slot, by_place)), axis=1)
        assert both.shape[1] == len(set(by_place.tolist())), "one place, two slots"
        assert both.shape[1] == len(set(by_slot.tolist())), "one slot, two places"

    def _page_ids(self, slots: np.ndarray) -> np.ndarray:
        """The ids of the pages in ``slots`` (entries of a row or tree node). The last page may be partial."""
        page = self.world.page
        if page == 1:
            return slots[slots >= 0]
        first = slots[::page]
        within = np.arange(len(slots)) % page
        starts = np.repeat(first, page)[: len(slots)]
        assert (slots == np.where(starts < 0, -1, starts + within)).all()
        first = first[first >= 0]
        assert (first % page == 0).all(), "a page does not start where its run does"
        return first // page

    def _named(self, entries: np.ndarray) -> np.ndarray:
        """The ids of the pages that entries of a row name, once for each page of entries that names them."""
        page = self.world.page
        found = [np.unique(entries[at : at + page] // page) for at in range(0, len(entries), page)]
        both = np.concatenate([*found, np.zeros(0, np.int64)]).astype(np.int64)
        return both[both >= 0]

    def _check_pages(self, named: list[np.ndarray]) -> None:
        """Checks that each page is either listed once as free, or named as often as the allocator counts."""
        world = self.world
        num_pages = world.total // world.page
        pages = np.concatenate([*named, np.zeros(0, np.int64)]).astype(np.int64)
        uses = np.bincount(pages, minlength=num_pages + 1)
        free = world.free_pages()
        frees = np.bincount(free, minlength=num_pages + 1)
        assert uses[0] == frees[0] == 0, "the padding page is in use"
        assert len(uses) == len(frees) == num_pages + 1
        assert ((uses > 0) != (frees > 0))[1:].all(), "a page is both free and in use, or neither"
        assert (frees <= 1).all(), "a page is free twice"
        many = np.flatnonzero(uses > 1)
        recounted = dict(zip(many.tolist(), uses[many].tolist(), strict=True))
        assert world.allocator.references == recounted, "reference counts differ"
        # Overwrite free slots, so that a later check fails if a row names a free slot.
        slots = (free[:, None] * world.page + np.arange(world.page)).ravel()
        world.write(slots, [NOTHING] * len(slots))

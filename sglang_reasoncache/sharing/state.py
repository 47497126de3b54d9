# SPDX-License-Identifier: Apache-2.0
"""What reasoncache stores about one request, in an attribute of SGLang's request object."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import finalize, ref

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import RowState
from sglang_reasoncache.filter.process import FilterProcess

_ATTRIBUTE = "_reasoncache_state"
#: We keep and report at most this many characters of a request's id, because clients choose ids.
MOST_OF_ID = 256
#: ``HostRow.number`` and a position.
Key = tuple[int, int]


@dataclass(eq=False)
class Candidate:
    """A block of a response that reads the KV slots of another block (its source), or may read them later.

    Attributes:
        dst_start, src_start: First positions of the block and of its source.
        source: The request that the source belongs to; None if both blocks belong to the same request.
        source_rid: SGLang's id of the request ``source``, cut to ``MOST_OF_ID`` characters.
        accepted: ``AdaptiveThreshold.epoch`` when the KV distance of the two blocks was accepted; -1 if it was
            never accepted. During that epoch the distance is not judged again, even after a retraction.
        shared_at: How many positions had written KV when the block last began to share; 0 if it never did.
    """

    dst_start: int
    src_start: int
    source: ref[Request] | None = None
    source_rid: str = ""
    accepted: int = -1
    shared_at: int = 0

    def __post_init__(self) -> None:
        self.source_rid = self.source_rid[:MOST_OF_ID]


class Merges:
    """Disjoint sets of positions. All positions of a set will map to one slot once all accepted blocks share.

    Accepting a block joins the set of each of its positions with the set of the position at the same place in
    the source. If the two positions of such a pair are in one set already, the block is refused. So every
    accepted block frees one slot per position, in whatever order blocks share, as ``Ledger.slots`` assumes.
    """

    def __init__(self) -> None:
        # The set of a position, by row number and position. All positions of a set refer to the same object.
        # A position without an entry is alone in its set.
        self._sets: dict[int, dict[int, set[Key]]] = {}

    def _set(self, key: Key) -> set[Key]:
        number, position = key
        return self._sets.get(number, {}).get(position, {key})

    def _label(self, key: Key) -> Hashable:
        """A label that is the same for all positions of a set, and differs from the labels of other sets."""
        number, position = key
        found = self._sets.get(number, {}).get(position)
        return key if found is None else id(found)

    def size(self, key: Key) -> int:
        """How many positions, ``key`` included, will map to the slot of ``key``."""
        return len(self._set(key))

    def is_across(self, key: Key) -> bool:
        """Whether a position of another request will map to the same slot as ``key``."""
        return any(number != key[0] for number, _ in self._set(key))

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """For every ``i``, join the set of ``dst[i]`` with the set of ``src[i]``. Returns False and changes
        nothing if a pair's two positions are in one set already, or would be after joining earlier pairs."""
        joined: dict[Hashable, Hashable] = {}
        pairs = list(zip(dst, src, strict=True))
        for one, other in pairs:
            low, high = self._label(one), self._label(other)
            while low in joined:
                low = joined[low]
            while high in joined:
                high = joined[high]
            if low == high:
                return False
            joined[low] = high
        for one, other in pairs:
            few, many = sorted((self._set(one), self._set(other)), key=len)
            many |= few
            for number, position in (*few, one, other):
                self._sets.setdefault(number, {})[position] = many
        return True

    def remove(self, number: int) -> None:
        """Forget the positions of the freed row ``number``. Positions of other rows stay in their sets."""
        for position, positions in self._sets.pop(number, {}).items():
            positions.discard((number, position))


class PromptGroup:
    """Requests with equal prompts. A group exists while a request refers to it. ``number``: its filter id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.merges = Merges()


class Followed:
    """Registers a request with the filter (the process that looks for similar blocks) until :meth:`close`.

    If ``group`` is not None, the request is a member of this group, except from a retraction until a poll (see
    ``Controller``) finds the request's prefill done again.

    SGLang does not call our code when it drops a request that is aborted while waiting to be scheduled again.
    When such a request is garbage-collected, perhaps in another thread, its id is appended to ``orphans``. The
    thread that feeds the filter then tells the filter to forget the request.
    """

    def __init__(
        self,
        req: Request,
        process: FilterProcess,
        inside: bool,
        orphans: deque[int],
        group: PromptGroup | None = None,
    ) -> None:
        self._process, self.group = process, group
        self.id = process.open(len(req.origin_input_ids), inside)
        self._dropped = finalize(req, orphans.append, self.id)
        self._dropped.atexit = False
        self.join(True)

    def join(self, yes: bool) -> None:
        """Join the group if ``yes`` (the prefill is done), otherwise leave it (the request lost its row)."""
        if self.group is not None and self._dropped.alive:
            self._process.join(self.id, self.group.number if yes else -1)

    def close(self) -> None:
        """Have the filter forget the request. Only the thread that feeds the filter calls this."""
        if self._dropped.detach():
            self._process.close(self.id)

    def abandon(self) -> None:
        """Give up the registration without telling the filter, because the filter process has ended."""
        self._dropped.detach()


@dataclass
class RequestState(RowState):
    """What sharing and eviction store about one request.

    Attributes:
        followed: The request's registration with the filter. None if the request does not take part, sharing
            is off, or the filter process was restarted or given up.
        takes_part: Whether we may change the request's block table (:func:`takes_part`, ``custom_params.py``).
        fed: Number of output tokens handed to the filter.
        row: Our copy of the request's row (block table). None until a poll finds the request's prefill done,
            and again from a retraction until the next such poll.
        candidates: Blocks that share or may share later, by ``dst_start``. A retraction does not remove them.
        pending: Candidates that wait for their KV distance to be measured, because this row or the source's
            row is missing, a sliding window still covers the block, or SGLang has enough slots.
        redirected: Candidates that share now, in the order in which they began to share.
        merges: The :class:`Merges` of the request's group, or of the request alone if it has no group.
    """

    followed: Followed | None = None
    takes_part: bool = True
    fed: int = 0
    row: HostRow | None = None
    candidates: dict[int, Candidate] = field(default_factory=dict)
    pending: list[Candidate] = field(default_factory=list)
    redirected: list[Candidate] = field(default_factory=list)
    merges: Merges = field(default_factory=Merges)

    def claim(self, candidate: Candidate, length: int) -> bool:
        """Add ``candidate`` to ``candidates``. Returns False, without adding it, if its block overlaps
        another candidate's block. ``length``: tokens per block."""
        start = candidate.dst_start
        if any(at in self.candidates for at in range(start - length + 1, start + length)):
            return False
        self.candidates[start] = candidate
        return True

    def forget_row(self, row: HostRow) -> None:
        # ``self.row`` is cleared first, because the call below may fail.
        self.row = None
        super().forget_row(row)
        self.redirected = []
        self.pending = list(self.candidates.values())


def state_of(req: Request) -> RequestState | None:
    """The state attached to SGLang's request. None if no poll has seen the request yet."""
    return getattr(req, _ATTRIBUTE, None)


def attach(req: Request, state: RequestState) -> RequestState:
    setattr(req, _ATTRIBUTE, state)
    return state


def is_running(req: Request) -> bool:
    return not req.finished() and not req.is_retracted and req.kv.holds_kv


def has_row(req: Request) -> bool:
    """Whether the request runs and its state has a ``row``. A retracted request has none until a poll finds its
    prefill done again; before that, some positions may have no slots."""
    state = state_of(req)
    return state is not None and state.row is not None and is_running(req)

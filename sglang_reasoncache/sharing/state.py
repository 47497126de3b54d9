# SPDX-License-Identifier: Apache-2.0
"""What sharing stores about one request, as an attribute of SGLang's request."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import finalize, ref

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import RowState
from sglang_reasoncache.filter.process import FilterProcess

_ATTRIBUTE = "_reasoncache_state"
#: ``HostRow.number`` and a position.
Key = tuple[int, int]


@dataclass(eq=False)
class Candidate:
    """A block of a response that reads another block's slots, or may do so later; kept after a retraction.

    Attributes:
        dst_start, src_start: First positions of the block and of its source.
        source: The request whose block is the source; None if the source is in the same request.
        source_rid: SGLang's id of ``source``.
        accepted: ``AdaptiveThreshold.epoch`` when the distance was accepted, or -1. During that epoch the
            distance is not judged again, even after a retraction.
        shared_at: Written positions of the request when the block last began to share; 0 if it never did.
    """

    dst_start: int
    src_start: int
    source: ref[Request] | None = None
    source_rid: str = ""
    accepted: int = -1
    shared_at: int = 0


class Merges:
    """Disjoint sets of positions. A set's positions will name the same slot once all accepted blocks share.

    Accepting a block joins each position's set with the set of the position to read. A block is refused if two
    such sets are the same already. So every accepted block frees one slot per position, in whatever order
    blocks share, and ``Ledger.slots`` is exact.
    """

    def __init__(self) -> None:
        # Row number -> position -> its set. All positions of a set map to the same object. A position
        # without an entry is alone in its set.
        self._sets: dict[int, dict[int, set[Key]]] = {}

    def _set(self, key: Key) -> set[Key]:
        number, position = key
        return self._sets.get(number, {}).get(position, {key})

    def _label(self, key: Key) -> Hashable:
        """A label that is the same for all positions of a set, and differs from those of other sets."""
        number, position = key
        found = self._sets.get(number, {}).get(position)
        return key if found is None else id(found)

    def size(self, key: Key) -> int:
        """How many positions will name the slot of ``key``."""
        return len(self._set(key))

    def is_across(self, key: Key) -> bool:
        """Whether positions of several requests will name the slot of ``key``."""
        return any(number != key[0] for number, _ in self._set(key))

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """Join the sets of ``dst[i]`` and ``src[i]``, pair after pair. Returns False and changes nothing if the
        two positions of a pair are in the same set already."""
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
        """Forget the positions of row ``number``, which is gone. Positions of other rows stay in their sets."""
        for position, positions in self._sets.pop(number, {}).items():
            positions.discard((number, position))


class PromptGroup:
    """Requests with equal prompts. A group lives as long as any of them. ``number``: unique in a process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.merges = Merges()


class Followed:
    """A request that the filter follows, until :meth:`close`.

    If ``group`` is not None, the request is a member of the group while its row is complete.

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
        """Join the group (``yes``) once the row is complete, or leave the group once the row is gone."""
        if self.group is not None and self._dropped.alive:
            self._process.join(self.id, self.group.number if yes else -1)

    def close(self) -> None:
        """Have the filter forget the request. Only the thread that feeds the filter calls this."""
        if self._dropped.detach():
            self._process.close(self.id)

    def abandon(self) -> None:
        """Never close the request: the filter process that followed the request has ended."""
        self._dropped.detach()


@dataclass
class RequestState(RowState):
    """What sharing and eviction store about one request.

    Attributes:
        followed: The filter's handle of the request. None if the filter does not follow the request, because
            the request opted out, nothing is shared, or the filter process was restarted.
        takes_part: False if our code never touches the row, because the request opted out or is of a kind that
            cannot share (:func:`takes_part`).
        fed: Output tokens handed to the filter.
        row: The host's copy of the row (block table). None until a poll sees that the whole row was computed,
            and again from a retraction until the next such poll.
        candidates: ``dst_start`` -> block that shares or may share later. Candidates outlive a retraction.
        pending: Candidates that wait to be measured, because this row or the source's row is missing, or
            because SGLang has enough slots.
        redirected: Candidates that share in this row, in the order in which they began.
        merges: Sets of the positions of the group's rows, or of the request's row if it has no group.
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
        """Add ``candidate`` to ``candidates``. Returns False, without adding, if another candidate has some of
        its positions. ``length``: tokens of a block."""
        start = candidate.dst_start
        if any(at in self.candidates for at in range(start - length + 1, start + length)):
            return False
        self.candidates[start] = candidate
        return True

    def forget_row(self, row: HostRow) -> None:
        # This comes first, because the call below may fail.
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
    """Whether the request runs and a poll has seen its row complete. Between a retraction and that poll, some
    positions may not even have slots."""
    state = state_of(req)
    return state is not None and state.row is not None and is_running(req)

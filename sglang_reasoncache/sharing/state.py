# SPDX-License-Identifier: Apache-2.0
"""What one request carries through sharing. Lives on the request, ends with it."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ref

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import RowState
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.sharing.merges import Merges

_ATTRIBUTE = "_reasoncache_state"
#: Key in the OpenAI API's ``custom_params`` that switches sharing off for a request.
OPT_OUT_KEY = "reasoncache"
#: How a client writes its value, in any case.
_SPELLINGS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(eq=False)
class Candidate:
    """A block of a response that can read the slots of an equal one, as long as the request lives.

    Attributes:
        source: The request whose block that is; None: the same.
        source_rid: Its id.
        accepted: Its distance was judged; that stands after a retraction.
        written: Positions that had their KV when it began to share; 0 before it did.
    """

    dst_start: int
    src_start: int
    source: ref[Request] | None = None
    source_rid: str = ""
    accepted: bool = False
    written: int = 0


class PromptGroup:
    """Requests with the same prompt, while any of them lives; ``number`` is no other one's, ever."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.merges = Merges()


class Followed:
    """A request in a step engine, from opening to :meth:`close`.

    While its row is complete it is in its ``group``, if it has one.

    A request that is aborted while it waits to be scheduled again just disappears. The end of
    this object then leaves its id in ``orphans``, for the thread that feeds the engine to
    close: the garbage collector may run in any thread.
    """

    _engine: FilterProcess | None = None

    def __init__(
        self,
        engine: FilterProcess,
        start_position: int,
        inside: bool,
        orphans: deque[int],
        group: PromptGroup | None = None,
    ) -> None:
        self._orphans, self.group = orphans, group
        self.id = engine.open(start_position, inside)
        self._engine = engine
        self.join(True)

    def join(self, yes: bool) -> None:
        """The row is complete, or (no) is gone."""
        if self.group is not None and self._engine is not None:
            self._engine.join(self.id, self.group.number if yes else -1)

    def close(self) -> None:
        """Called by the thread that feeds the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(self.id)

    def abandon(self) -> None:
        """The engine has lost the request already."""
        self._engine = None

    def __del__(self) -> None:
        if self._engine is not None:
            self._orphans.append(self.id)


@dataclass
class RequestState(RowState):
    """Owned by the controller.

    Attributes:
        followed: The request in the step engine; None when it opted out, or nothing shares.
        takes_part: False when it opted out: its row is never touched.
        fed: Output tokens already handed to the engine.
        number: No other request's, ever.
        row: Counts the rows this request has had.
        recomputed: The row was computed again after a retraction, and no poll has seen it yet.
        candidates: Blocks that may share, or do, by ``dst_start``; they outlive a retraction.
        pending: Those of them that wait to be measured: for a row, their own or their source's, or
            until SGLang may be short of slots.
        shared: Those that share in this row, in order.
        across: Slots that another request had, too, with their numbers in ``slot_aliases``
            (``copied``). They stay where they are: moving would free none.
        foreign: Slots of other requests that it read in place of its own.
        claimed: Starts of all blocks that passed the rules, ascending; they do not overlap.
        first_shared: Lowest redirected position, None while there is none.
        copied: Which positions hold the same KV, each in its own slot (``apply=copy``).
        merges: Of its group's positions, or its own; those of earlier rows stay in it.
    """

    followed: Followed | None = None
    takes_part: bool = True
    fed: int = 0
    number: int = field(default_factory=itertools.count().__next__)
    row: int = 0
    recomputed: bool = False
    candidates: dict[int, Candidate] = field(default_factory=dict)
    pending: list[Candidate] = field(default_factory=list)
    shared: list[Candidate] = field(default_factory=list)
    across: dict[int, int] = field(default_factory=dict)
    foreign: int = 0
    claimed: list[int] = field(default_factory=list)
    first_shared: int | None = None
    copied: SlotAliases = field(default_factory=SlotAliases)
    merges: Merges = field(default_factory=Merges)

    def claim(self, start: int, length: int) -> bool:
        """Keep positions for one block; False where another one, of the same length, overlaps."""
        at = bisect.bisect_right(self.claimed, start - length)
        if at < len(self.claimed) and self.claimed[at] < start + length:
            return False
        self.claimed.insert(at, start)
        return True

    def mark_shared(self, positions: Iterable[int]) -> None:
        known = () if self.first_shared is None else (self.first_shared,)
        self.first_shared = min((*known, *positions), default=None)

    def forget_row(self) -> None:
        # First what cannot fail.
        self.row += 1
        self.recomputed = True
        self.first_shared = None
        super().forget_row()
        self.copied, self.across, self.foreign = SlotAliases(), {}, 0
        self.shared = []
        self.pending = list(self.candidates.values())


def state_of(req: Request) -> RequestState | None:
    """State attached to SGLang's request, None before its first decode step."""
    return getattr(req, _ATTRIBUTE, None)


def attach(req: Request, state: RequestState) -> RequestState:
    setattr(req, _ATTRIBUTE, state)
    return state


def is_running(req: Request) -> bool:
    return not req.finished() and not req.is_retracted and req.kv.holds_kv


def has_row(req: Request) -> bool:
    """Whether a request runs with a row that was looked at since it was last recomputed. One that is
    being recomputed may not even have slots yet."""
    state = state_of(req)
    return state is not None and not state.recomputed and is_running(req)


def asks_to_share(custom_params: object) -> bool:
    """What a request's ``custom_params`` say; True where they say nothing. Raises ValueError for
    what is neither yes nor no."""
    if not isinstance(custom_params, dict | None):
        raise ValueError(f"custom_params must be an object, got a {type(custom_params).__name__}")
    value = (custom_params or {}).get(OPT_OUT_KEY)
    if value is None:
        return True
    found = _SPELLINGS.get(value.lower()) if isinstance(value, str) else None
    if isinstance(value, int) and value in (0, 1):
        found = bool(value)
    if found is None:
        raise ValueError(f"custom_params: {OPT_OUT_KEY} must be true or false, got {value!r:.80}")
    return found


def allows(req: Request) -> bool:
    """False when the request opted out: it keeps its row, and reads no approximations. So is
    what no frontend refused; see ``plugin/hooks.py``."""
    try:
        return asks_to_share(getattr(req.sampling_params, "custom_params", None))
    except Exception:  # such as RecursionError: its repr is part of the message
        return False


def takes_part(req: Request) -> bool:
    """Whether a request's row may be touched at all."""
    return (
        allows(req)
        and req.beam_group is None
        and req.multimodal_inputs is None
        and req.input_embeds is None
    )

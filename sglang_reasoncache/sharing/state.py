# SPDX-License-Identifier: Apache-2.0
"""What one request carries through sharing. Lives on the request, ends with it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from weakref import ref

from sglang_reasoncache.cache.host_row import HostRow
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
    """Requests with the same prompt, while any of them lives. ``number``: unique per process."""

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
        row: Its row, once a poll has seen that all of it was computed; None until then, and again after
            a retraction.
        candidates: Blocks that may share, or do, by ``dst_start``; they outlive a retraction.
        pending: Those of them that wait to be measured: for a row, their own or their source's, or
            until SGLang may be short of slots.
        shared: Those that share in this row, in order.
        merges: Of its group's positions, or its own; those of earlier rows stay in it.
    """

    followed: Followed | None = None
    takes_part: bool = True
    fed: int = 0
    row: HostRow | None = None
    candidates: dict[int, Candidate] = field(default_factory=dict)
    pending: list[Candidate] = field(default_factory=list)
    shared: list[Candidate] = field(default_factory=list)
    merges: Merges = field(default_factory=Merges)

    def claim(self, candidate: Candidate, length: int) -> bool:
        """Make it one of ``candidates``; False where another one has some of its positions."""
        start = candidate.dst_start
        if any(at in self.candidates for at in range(start - length + 1, start + length)):
            return False
        self.candidates[start] = candidate
        return True

    def forget_row(self) -> None:
        # First what cannot fail.
        self.row = None
        super().forget_row()
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
    """Whether a request runs with a row that a poll has seen whole. Of one that is being computed again
    some positions may not even have slots."""
    state = state_of(req)
    return state is not None and state.row is not None and is_running(req)


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

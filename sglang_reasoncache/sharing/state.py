# SPDX-License-Identifier: Apache-2.0
"""What one request carries through sharing. Lives on the request, ends with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ATTRIBUTE = "_reasoncache_state"


@dataclass
class RequestState:
    """Mutable, owned by the controller.

    Attributes:
        filter: The request's stage-1 filter; None when the request opted out.
        fed: Output tokens already handed to ``filter``.
        attempt: ``retraction_count`` the row state below belongs to.
        shared: Accepted ``(dst_start, src_start)`` blocks, in order. Kept over
            a retraction, after which they are applied again.
        live_positions: Row positions that refer to a slot owned elsewhere.
        first_shared: Lowest redirected position, None while there is none.
    """

    filter: Any | None
    fed: int = 0
    attempt: int = 0
    shared: list[tuple[int, int]] = field(default_factory=list)
    live_positions: int = 0
    first_shared: int | None = None

    def mark_shared(self, position: int) -> None:
        if self.first_shared is None or position < self.first_shared:
            self.first_shared = position

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.live_positions = 0
        self.first_shared = None


def state_of(req: Any) -> RequestState | None:
    """State attached to SGLang's request, None before its first decode step."""
    return getattr(req, _ATTRIBUTE, None)


def attach(req: Any, state: RequestState) -> RequestState:
    setattr(req, _ATTRIBUTE, state)
    return state

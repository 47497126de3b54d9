# SPDX-License-Identifier: Apache-2.0
"""Lets admission count on slots that sharing will free: a forecast, and a budget that uses the forecast."""

from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.compat.types import PrefixTree, SlotAllocator

#: The forecast ignores running requests while they have fewer output tokens than this number in total.
_LEAST_RUNNING = 512


class SharingBudget(compat.PrefillBudget):
    """SGLang's ``PrefillBudget`` with two additions.

    Slots that running requests can free by sharing (``shareable``) count as free. SGLang's reservation for
    future output (``total_offset - current_offset``) is multiplied by ``1 - credit`` (``credit`` < 1).

    Slots for future output need not be free yet: if they are missing later, SGLang retracts requests. Slots for
    a prompt's next chunk must be free or evictable now, because a failed allocation would end the scheduler.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        tree_cache: PrefixTree,
        *,
        shareable: int,
        credit: float,
        **kwargs: int,
    ) -> None:
        super().__init__(allocator, tree_cache, **kwargs)
        self._shareable, self._kept = shareable, 1.0 - credit

    @property
    def remaining_total(self) -> float:
        future = max(self.total_offset - self.current_offset, 0)
        return self.remaining_current - future * self._kept

    @property
    def remaining_current(self) -> int:
        return self._there() + self._shareable

    def _there(self) -> int:
        """Number of free or evictable slots, minus those that this batch takes. Ignores ``shareable``."""
        left: int = self._available_and_evictable() - self.current_offset
        return left

    def _reclaim(self, tokens: int) -> bool:
        """Have requests share if slots are missing. Returns whether ``tokens`` slots are free or evictable."""
        free, short = self.allocator.free_size(), tokens - self._there()
        if short > 0 and self._shareable:
            self.allocator.reclaim_to(free + short)
            self._shareable = max(self._shareable - self.allocator.free_size() + free, 0)
        return tokens <= self._there()

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **others: int
    ) -> tuple[bool, int | None]:
        now = min(self.ceil_paged_tokens(extend_input_len), total_tokens)
        needed = now + (total_tokens - now) * self._kept
        asked: Any = dict(extend_input_len=extend_input_len, chunk_limit=chunk_limit, **others)
        fits, chunk_limit = super().check_prefill(total_tokens=needed, **asked)
        chunk = now if chunk_limit is None else min(now, self.ceil_paged_tokens(chunk_limit))
        return (True, chunk_limit) if fits and self._reclaim(chunk) else self._refuse()

    def prepare_load_back(
        self, *, full_tokens: int, max_new_tokens: int, **_unused: int | None
    ) -> bool:
        """Whether there are slots for the tokens to load from the host and to prefill, but not for output:
        ``full_tokens - max_new_tokens``. ``credit`` is not applied, because a load allocates slots at once."""
        return (
            self._reclaim(self.ceil_paged_tokens(full_tokens - max_new_tokens)) or self._refuse()[0]
        )

    def _refuse(self) -> tuple[bool, None]:
        if self.allocator.controller is not None:
            self.allocator.controller.pipeline.request_waits()
        return False, None

    def can_allocate_prefill(
        self, *, paged_input: int, chunk_limit: int | None, **unused: int
    ) -> bool:
        fits = super().can_allocate_prefill(
            paged_input=paged_input, chunk_limit=chunk_limit, **unused
        )
        return fits and self._reclaim(paged_input)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        wanted: int | None = super().available_chunk_tokens(chunk_limit)
        if wanted is None or self.remaining_total <= 0 or self._reclaim(wanted):
            return wanted
        return min(wanted, self._there()) if self._there() > 0 else self._without_slots(chunk_limit)

    def _without_slots(self, chunk_limit: int) -> int | None:
        """What ``available_chunk_tokens`` of SGLang's budget returns when no slot is left."""
        return chunk_limit


class WindowSharingBudget(SharingBudget, compat.SWAPrefillBudget):
    """A :class:`SharingBudget` for two pools: the full pool, whose slots can be shared, and the window pool."""

    def _without_slots(self, chunk_limit: int) -> None:
        return None


class SharingForecast:
    """Forecasts which fraction of output positions will need no slot.

    The forecast is the higher of two fractions. The first is measured on finished requests; the weight of each
    fades exponentially over ``horizon`` later output tokens. The second is measured on running requests, to
    include long responses before they finish. ``limit``: the highest possible forecast, in [0, 1).
    """

    def __init__(self, limit: float, horizon: float = 20_000.0) -> None:
        self._limit, self._horizon = limit, horizon
        self._shared = self._tokens = self._running = 0.0

    def observe(self, shared: float, tokens: int) -> None:
        """Count a finished request: ``shared`` of its ``tokens`` output positions needed no slot, or would have
        needed none if its blocks had shared."""
        if tokens <= 0:
            return
        fade = max(0.0, 1.0 - tokens / self._horizon)
        self._shared = self._shared * fade + shared
        self._tokens = self._tokens * fade + tokens

    def poll(self, shared: float, tokens: int) -> None:
        """Set the fraction among running requests: ``shared`` of their ``tokens`` output positions need no
        slot, or would need none if their blocks shared."""
        self._running = shared / tokens if tokens >= _LEAST_RUNNING else 0.0

    @property
    def credit(self) -> float:
        """The fraction of future output for which admission need not reserve slots, in [0, ``limit``]."""
        finished = self._shared / self._tokens if self._tokens else 0.0
        return min(max(finished, self._running), self._limit)

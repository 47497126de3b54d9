# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang's admission count on slots that sharing will free."""

from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.owner import Promise, SlotOwner
from sglang_reasoncache.compat.types import PrefixTree, SlotAllocator

#: A pass reclaims at most this many slots for a prompt, because no request decodes meanwhile (some 16 us a
#: slot). A prompt that needs more is admitted in a later pass.
MOST_AT_ONCE = 8192


class SharingBudget(compat.PrefillBudget):
    """SGLang's ``PrefillBudget`` with two additions.

    Slots that running requests can free by sharing (``shareable``) count as free. SGLang's reservation for
    future output (``total_offset - current_offset``) is cut to ``ahead`` tokens for each request that runs or
    was admitted in this pass, but at least to the fraction ``kept`` of it.

    Slots for future output need not be free yet: if they are missing later, SGLang retracts requests. All slots
    of a prompt must be free or evictable when it is admitted. A failed allocation would end the scheduler, and
    requests whose blocks count as ``shareable`` may leave between two chunks. Running requests may decode
    between two chunks (``--enable-mixed-chunk``, ``--prefill-decode-interval``), so a slot is reserved for each
    of these tokens, at most as many as SGLang would reserve: a chunk that is put off keeps the slots of its
    prompt, and SGLang ends the last running request that finds none.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        tree_cache: PrefixTree,
        *,
        promise: Promise,
        owner: SlotOwner,
        **kwargs: int,
    ) -> None:
        super().__init__(allocator, tree_cache, **kwargs)
        self._owner = owner
        self._shareable = promise.shareable
        self._promise = promise
        # Number of requests that have a row or were admitted in this pass.
        rows = tree_cache.req_to_token_pool
        self._requests = rows.size - rows.available_size()
        # Whether the chunk of an admitted prompt was put off, or cut. Then this pass admits nothing else:
        # SGLang would count the chunk as computed together with the admitted prompts, and if it cut one of
        # these, too, it would end the scheduler.
        self._put_off = False
        # Whether slots were reclaimed in this pass.
        self._reclaimed = False
        # Number of tokens of the prompt that was checked last, without those that the host has.
        self._prompt = 0
        # Number of requests that decode together with the prompts of this pass (``--enable-mixed-chunk``).
        self._mixed: int = kwargs.get("num_mixed_decode_tokens", 0)

    @property
    def load_back_needs_full_tokens(self) -> bool:
        """Whether SGLang is to tell :meth:`prepare_load_back` how many tokens the host's copy adds: it else
        tells how many the host has, even if only a window or a state of theirs is missing. Without a host tier
        the copy is one of ours (``swap.py``), of which SGLang knows nothing."""
        return getattr(self.tree_cache, "cache_controller", None) is not None

    @property
    def remaining_total(self) -> float:
        future = max(self.total_offset - self.current_offset, 0)
        return self.remaining_current - self._promise.reserved(future, self._requests)

    @property
    def remaining_current(self) -> int:
        return self._there() + self._shareable

    def _there(self) -> int:
        """Number of free or evictable slots, minus those that this batch takes. Ignores ``shareable``."""
        left: int = self._available_and_evictable() - self.current_offset
        return left

    def _reclaim(self, tokens: int) -> bool:
        """Have requests share if slots are missing. Returns whether ``tokens`` slots are free or evictable."""
        short = tokens - self._there()
        if short > 0 and self._shareable:
            free = self.allocator.free_size()
            self.allocator.reclaim_to(free + min(short, MOST_AT_ONCE), evicts=False)
            freed = self.allocator.free_size() - free
            self._shareable = max(self._shareable - freed, 0)
            self._reclaimed = self._reclaimed or freed > 0
        return tokens <= self._there()

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **others: int
    ) -> tuple[bool, int | None]:
        """Whether to admit a prompt. The slots of all its chunks are reclaimed now (see the class)."""
        now = min(self.ceil_paged_tokens(extend_input_len), total_tokens)
        needed = now + self._promise.reserved(total_tokens - now, 1)
        if chunk_limit is not None:
            needed += self._decoded_between_chunks(
                extend_input_len, chunk_limit, total_tokens - now
            )
        fits, chunk_limit = super().check_prefill(
            extend_input_len=extend_input_len,
            total_tokens=needed,
            chunk_limit=chunk_limit,
            **others,
        )
        self._prompt = now
        fits = fits and not self._put_off and self._reclaim(now)
        return (True, chunk_limit) if fits else self._refuse()

    def _decoded_between_chunks(self, tokens: int, chunk_limit: int, output: int) -> float:
        """Slots that running requests may take between the chunks of a prompt of ``tokens``, beyond those that
        are reserved. ``chunk_limit``: what other prompts leave of this pass for its first chunk. ``output``:
        what SGLang would reserve for the prompt's own output, which running requests may take meanwhile: SGLang
        cannot retract the prompt between two chunks, and ends the last running request instead."""
        schedule = compat.get_schedule()
        steps = max(schedule.prefill_decode_interval or 0, min(self._mixed, 1))
        chunk = max((schedule.chunked_prefill_size or 0) - self._mixed, chunk_limit, 1)
        pauses = -(-tokens // chunk) - 1
        if not steps or pauses <= 0:
            return 0
        future = max(self.total_offset - self.current_offset, 0)
        reserved = self._promise.reserved(future, self._requests)
        reserved += self._promise.reserved(output, 1)
        # SGLang has slots for two steps ahead. With speculation, a step gives a request several tokens, and
        # the request holds the slots ahead whatever it is given.
        ahead = compat.get_alloc_reserve_per_decode()
        most = ahead // 2
        # A request takes whole pages, one more if it begins in the middle of a page.
        each = self.ceil_paged_tokens(pauses * steps * most) + (self.page_size > 1) * self.page_size
        decoded = min(future + output, each * self._requests)
        return max(decoded + (most > 1) * ahead * self._requests - reserved, 0)

    def prepare_load_back(
        self, *, full_tokens: int, extend_input_len: int, max_new_tokens: int, **_unused: int | None
    ) -> bool:
        """Whether there are slots for the tokens to load from the host and for the whole prompt behind them,
        and beside other requests for what is reserved for all output. ``full_tokens`` counts only the prompt's
        first chunk, which has ``extend_input_len`` tokens, and ``max_new_tokens`` of output."""
        later = max(self._prompt - extend_input_len, 0)
        needed = self.ceil_paged_tokens(full_tokens - max_new_tokens + later)
        # :meth:`check_prefill` took the tokens that the host has for output, and reserved little for them.
        left = self.remaining_total - self._promise.reserved(max_new_tokens, 1)
        fits = not self._requests or needed <= left
        return (fits and self._reclaim(needed)) or self._refuse()[0]

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        is_chunked_continuation: bool = False,
        **others: Any,
    ) -> None:
        """Account for an admitted prompt, or for a chunk of one."""
        self._requests += not is_chunked_continuation
        others |= dict(is_chunked_continuation=is_chunked_continuation)
        super().reserve(extend_input_len, max_new_tokens, **others)

    def _refuse(self) -> tuple[bool, None]:
        self._owner.request_waits(again=self._reclaimed)
        return False, None

    def can_allocate_prefill(self, *, paged_input: int, **others: int | None) -> bool:
        """Whether to admit a prompt of a request with ``ignore_eos`` if the prefix cache is off."""
        fits = super().can_allocate_prefill(paged_input=paged_input, **others)
        return (fits and not self._put_off and self._reclaim(paged_input)) or self._refuse()[0]

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        available: int | None = super().available_chunk_tokens(chunk_limit)
        if available is None:
            self._put_chunk_off()
        return available

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        """How many tokens the next chunk of an admitted prompt may have, at most ``chunk_limit``. None puts the
        chunk off until a later pass, because no slot is left: running requests will finish or be retracted.
        (SGLang's budget for a single pool returns ``chunk_limit`` then, and the allocation may fail.)"""
        limit: int | None = super().fit_chunk(
            extend_input_len=extend_input_len,
            max_new_tokens=max_new_tokens,
            chunk_limit=chunk_limit,
        )
        if limit is None or self._reclaim(self.ceil_paged_tokens(min(extend_input_len, limit))):
            return limit
        there = self._there() // self.page_size * self.page_size
        if there > 0:
            self._put_off = True
            return min(limit, there)
        self._put_chunk_off()
        return None

    def _put_chunk_off(self) -> None:
        self._put_off = True
        self._refuse()


class WindowSharingBudget(SharingBudget, compat.SWAPrefillBudget):
    """A :class:`SharingBudget` for two pools: the full pool, whose slots can be shared, and the window pool."""

# SPDX-License-Identifier: Apache-2.0
"""Tests admission with a *credit*: the fraction of future output for which admission reserves no slots."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_reasoncache.cache.admission import SharingBudget
from sglang_reasoncache.cache.owner import NO_OWNER, Promise
from sglang_reasoncache.sharing.forecast import SharingForecast
from tests.property.world import allocator_of

FREE = 800
EVICTABLE = 200


class _Tree:
    """A prefix cache with 200 evictable slots."""

    evictable_size = staticmethod(lambda: EVICTABLE)
    supports_mamba = staticmethod(lambda: False)


def budget(credit: float | None, page: int = 1, mixed: int = 0) -> Any:
    """A prefill budget over 800 free slots: ours, or SGLang's if ``credit`` is None."""
    pool = allocator_of(page, FREE)
    if credit is None:
        return PrefillBudget(pool, _Tree(), num_mixed_decode_tokens=mixed)
    promise = Promise(shareable=0, credit=credit)
    return SharingBudget(
        pool, _Tree(), promise=promise, owner=NO_OWNER, num_mixed_decode_tokens=mixed
    )


def fits(made: PrefillBudget, prompt: int, output: int) -> bool:
    """Whether the budget ``made`` admits a request with ``prompt`` and ``output`` tokens."""
    verdict, limit = made.check_prefill(
        extend_input_len=prompt, total_tokens=prompt + output, max_new_tokens=output,
        input_tokens=prompt, swa_host_hit_length=0, chunk_limit=7,
    )  # fmt: skip
    assert limit == (7 if verdict else None)
    return verdict


LENGTHS = st.integers(0, 400)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from((0.0, 0.25, 0.5, 0.75)),
    st.sampled_from((1, 16)),
    st.sampled_from((0, 13, 970, 990)),
    st.lists(st.tuples(LENGTHS, LENGTHS), max_size=3),
    st.integers(-50, 500),
    st.tuples(st.integers(1, 40), st.integers(0, 60))
    | st.tuples(st.integers(1, 1000), st.integers(0, 1500)),
)
def test_only_output_to_come_is_discounted(
    credit: float, page: int, mixed: int, reserved: Any, rest: int, asked: tuple[int, int]
) -> None:
    """A request needs slots for its prompt, rounded up to pages, and for ``1 - credit`` of its other tokens.
    ``rest``: output of running requests, which SGLang adds to ``total_offset``. If ``total_offset`` is below
    ``current_offset``, no output is reserved. If credit is 0 and ``rest`` >= 0, both budgets are the same."""
    made, stock = budget(credit, page, mixed), budget(None, page, mixed)
    for each in (made, stock):
        for prompt, output in reserved:
            each.reserve(prompt, output)
        each.total_offset += rest
    assert (made.total_offset, made.current_offset) == (stock.total_offset, stock.current_offset)
    left = FREE + EVICTABLE - made.current_offset
    total = left - max(made.total_offset - made.current_offset, 0) * (1 - credit)
    assert (made.remaining_current, made.remaining_total) == (left, total)
    now = min(-(-asked[0] // page) * page, sum(asked))
    assert fits(made, *asked) == (now + (sum(asked) - now) * (1 - credit) < total)
    if credit == 0 and rest >= 0:
        assert fits(stock, *asked) == fits(made, *asked)
        assert (stock.remaining_current, stock.remaining_total) == (left, total)
        assert stock.has_capacity() == made.has_capacity()
        assert stock.available_chunk_tokens(512) == made.available_chunk_tokens(512)


ENDED, RUNNING = SharingForecast.observe, SharingForecast.poll
_RUNNING = [(RUNNING, 100, 500, 0.0), (RUNNING, 256, 1024, 0.25), (ENDED, 400, 1000, 0.4)]
_RUNNING += [(RUNNING, 500, 1000, 0.5), (RUNNING, 0, 0, 0.4)]
_FADED = [0.4 * 0.9**n * (1 - 0.9**50) / (1 - 0.9 ** (50 + n)) for n in range(1, 51)]


@pytest.mark.parametrize(
    ("limit", "horizon", "seen"),
    [
        # A request without output does not change the credit.
        (0.5, 1000, [(ENDED, 0, 0, 0.0)]),
        # The credit is shared / all tokens. The second request multiplies the first's counts by 1 - 300/1000.
        (0.9, 1000, [(ENDED, 30, 100, 0.3), (ENDED, 10, 300, (21 + 10) / (70 + 300))]),
        # Running requests count if they have 512 tokens or more and share a larger part than finished ones.
        (0.9, 20_000, _RUNNING),
        # The credit follows a change: each request multiplies the weights of earlier ones by 0.9.
        (0.9, 1000, [*[(ENDED, 40, 100, 0.4)] * 50, *((ENDED, 0, 100, at) for at in _FADED)]),
        (0.4, 20_000, [(ENDED, 90, 100, 0.4)]),
        (0.0, 20_000, [(ENDED, 50, 100, 0.0)]),
        # A request with more tokens than ``horizon`` sets the weight of all earlier requests to 0.
        (0.9, 1000, [(ENDED, 900, 1000, 0.9), (ENDED, 100, 2000, 0.05)]),
    ],
)
def test_forecast(
    limit: float, horizon: float, seen: list[tuple[Callable[..., None], int, int, float]]
) -> None:
    """``limit``: the highest credit. ``seen``: (method, shared tokens, all tokens, credit after the call)."""
    forecast = SharingForecast(limit, horizon)
    assert forecast.credit == 0.0
    for tell, shared, tokens, credit in seen:
        tell(forecast, shared, tokens)
        assert forecast.credit == pytest.approx(credit)


def test_a_load_from_the_host_is_not_discounted() -> None:
    """Loading KV from the host takes slots at once. The credit, which is for later output, does not apply."""

    def loads(tokens: int) -> bool:
        told = dict(full_tokens=tokens + 300, extend_input_len=300, max_new_tokens=300)
        asked: Any = budget(credit=0.75)
        return asked.prepare_load_back(**told, swa_host_hit_length=0, chunk_limit=None)

    assert loads(FREE + EVICTABLE) and not loads(FREE + EVICTABLE + 1)

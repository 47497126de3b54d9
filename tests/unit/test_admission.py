# SPDX-License-Identifier: Apache-2.0
"""Tests how many slots admission reserves for the future output of requests."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_reasoncache.cache.admission import SharingBudget
from sglang_reasoncache.cache.owner import NO_OWNER, Promise
from tests.property.world import allocator_of

pytestmark = pytest.mark.usefixtures("published_config")

FREE = 800
EVICTABLE = 200
RUNNING = 3  # requests that have a row


class _Rows:
    size = 8
    available_size = staticmethod(lambda: 8 - RUNNING)


class _Tree:
    """A prefix cache with 200 evictable slots."""

    evictable_size = staticmethod(lambda: EVICTABLE)
    supports_mamba = staticmethod(lambda: False)
    req_to_token_pool = _Rows()


def budget(ahead: float | None, kept: float = 0.0, page: int = 1, mixed: int = 0) -> Any:
    """A prefill budget over 800 free slots: ours, or SGLang's if ``ahead`` is None."""
    pool = allocator_of(page, FREE)
    if ahead is None:
        return PrefillBudget(pool, _Tree(), num_mixed_decode_tokens=mixed)
    promise = Promise(shareable=0, ahead=ahead, kept=kept)
    tree: Any = _Tree()
    return SharingBudget(pool, tree, promise=promise, owner=NO_OWNER, num_mixed_decode_tokens=mixed)


def fits(made: PrefillBudget, prompt: int, output: int) -> bool:
    """Whether the budget ``made`` admits a request with ``prompt`` and ``output`` tokens, in one chunk. Of
    several chunks there is ``test_admission_chunks.py``."""
    verdict, limit = made.check_prefill(
        extend_input_len=prompt, total_tokens=prompt + output, max_new_tokens=output,
        input_tokens=prompt, swa_host_hit_length=0, chunk_limit=1000,
    )  # fmt: skip
    assert limit == (1000 if verdict else None)
    return verdict


LENGTHS = st.integers(0, 400)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from((2.0, 7.5, 64.0, math.inf)),
    st.sampled_from((0.0, 0.25, 1.0)),
    st.sampled_from((1, 16)),
    st.sampled_from((0, 13, 970, 990)),
    st.lists(st.tuples(LENGTHS, LENGTHS), max_size=3),
    st.integers(-50, 500),
    st.tuples(st.integers(1, 40), st.integers(0, 60))
    | st.tuples(st.integers(1, 1000), st.integers(0, 1500)),
)
def test_only_output_to_come_is_discounted(
    ahead: float,
    kept: float,
    page: int,
    mixed: int,
    reserved: Any,
    rest: int,
    asked: tuple[int, int],
) -> None:
    """A request needs slots for its prompt, rounded up to pages, and for ``ahead`` of its other tokens, but at
    least for the fraction ``kept`` of what SGLang reserves. ``rest``: output of running requests, which SGLang
    adds to ``total_offset``. If ``total_offset`` is below ``current_offset``, no output is reserved. If all is
    kept and ``rest`` >= 0, both budgets are the same."""
    made = budget(ahead, kept, page, mixed)
    stock = budget(None, 0.0, page, mixed)
    for each in (made, stock):
        for prompt, output in reserved:
            each.reserve(prompt, output)
        each.total_offset += rest
    assert (made.total_offset, made.current_offset) == (stock.total_offset, stock.current_offset)
    left = FREE + EVICTABLE - made.current_offset

    def cut(future: int, requests: int) -> float:
        return max(min(future, ahead * requests), kept * future)

    future = max(made.total_offset - made.current_offset, 0)
    total = left - cut(future, RUNNING + len(reserved))
    assert (made.remaining_current, made.remaining_total) == (left, total)
    now = min(-(-asked[0] // page) * page, sum(asked))
    assert fits(made, *asked) == (now + cut(sum(asked) - now, 1) < total)
    if (ahead == math.inf or kept == 1) and rest >= 0:
        assert fits(stock, *asked) == fits(made, *asked)
        assert (stock.remaining_current, stock.remaining_total) == (left, total)
        assert stock.has_capacity() == made.has_capacity()
        assert stock.available_chunk_tokens(512) == made.available_chunk_tokens(512)


@pytest.mark.parametrize("running", [0, RUNNING])
@pytest.mark.parametrize("host", [0, 500])
def test_a_load_from_the_host_is_not_discounted(
    host: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading KV from the host takes slots at once. Beside running requests as much is reserved for output as
    for a request that loads nothing. If nothing runs, a prompt that fits is admitted."""
    monkeypatch.setattr(_Rows, "available_size", staticmethod(lambda: _Rows.size - running))

    def admits(tokens: int) -> bool:
        made = budget(ahead=50.0)
        made.total_offset += 300 * running
        extend = tokens - host
        asked: dict[str, Any] = dict(extend_input_len=extend, max_new_tokens=300)
        asked |= dict(swa_host_hit_length=0, chunk_limit=1000)
        total = tokens + 300
        fits, _ = made.check_prefill(**asked, total_tokens=total, input_tokens=extend)
        return fits and (not host or made.prepare_load_back(**asked, full_tokens=total))

    most = FREE + EVICTABLE - (50 * (running + 1) if running or not host else 0)
    assert admits(most - 1) and not admits(most + 1)

# SPDX-License-Identifier: Apache-2.0
"""Admission with a credit for sharing, calculated by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_reasoncache.cache.admission import SharingBudget, SharingForecast
from tests.property.world import allocator_of

FREE = 800
EVICTABLE = 200


class _Tree:
    """A prefix cache with 200 evictable slots."""

    evictable_size = staticmethod(lambda: EVICTABLE)
    supports_mamba = staticmethod(lambda: False)


def budget(credit: float | None, page: int = 1, mixed: int = 0) -> Any:
    """Of 800 free slots; ``credit`` None: SGLang's own."""
    pool = allocator_of(page, FREE)
    if credit is None:
        return PrefillBudget(pool, _Tree(), num_mixed_decode_tokens=mixed)
    return SharingBudget(pool, _Tree(), shareable=0, credit=credit, num_mixed_decode_tokens=mixed)


def fits(made: PrefillBudget, prompt: int, output: int) -> bool:
    """SGLang's question before it admits a request."""
    verdict, limit = made.check_prefill(
        extend_input_len=prompt,
        total_tokens=prompt + output,
        max_new_tokens=output,
        input_tokens=prompt,
        swa_host_hit_length=0,
        chunk_limit=7,
    )
    assert limit == (7 if verdict else None)
    return verdict


@pytest.mark.parametrize(
    ("page", "offset", "prompt", "fitting", "too_much"),
    [
        # The whole prompt, and the undiscounted part of the output: 600 + 0.5 * 798 is 999 and
        # fits below 1000; one pair of tokens more does not.
        (1, 0, 600, 798, 800),
        # A prompt of 601 takes 608, so 6 of the first output tokens are not discounted:
        # 608 + (601 + 784 - 608) * 0.5 = 996.5; 608 + (601 + 791 - 608) * 0.5 = 1000.
        (16, 0, 601, 784, 791),
        # A prompt of 1 with 3 output tokens needs 4, not the 16 of its page and a part of 3.
        (16, 995, 1, 3, 4),
    ],
)
def test_request_needs_its_prompt_and_the_undiscounted_part_of_its_output(
    page: int, offset: int, prompt: int, fitting: int, too_much: int
) -> None:
    made = budget(0.5, page)
    made.total_offset = made.current_offset = offset
    assert made.remaining_total == FREE + EVICTABLE - offset
    assert fits(made, prompt, fitting)
    assert not fits(made, prompt, too_much)


def test_what_remains() -> None:
    """Only future output is discounted: 100 for the prompt and its page, 400 * (1 - 0.25)."""
    made = budget(0.25)
    made.reserve(99, 400)
    assert (made.total_offset, made.current_offset) == (500, 100)
    assert made.remaining_total == 1000 - 100 - 300
    assert made.remaining_current == 1000 - 100
    prompts = budget(0.9)
    assert fits(prompts, prompt=999, output=0)
    assert not fits(prompts, prompt=1000, output=0)
    prompts.reserve(999, 0)
    assert prompts.remaining_total == 0
    assert not prompts.has_capacity()
    # SGLang adds the estimated rest of running requests to ``total_offset`` directly.
    running = budget(0.2, mixed=10)
    running.total_offset += 500
    assert running.remaining_total == 1000 - 10 - 500 * 0.8
    # A total below the current offset is no reservation in reverse.
    below = budget(0.5)
    below.current_offset += 40
    assert below.remaining_total == 1000 - 40


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mixed", [0, 13])
def test_credit_zero_is_stock(page: int, mixed: int) -> None:
    """Same verdicts and same remainders after every reservation."""
    ours, stock = budget(0.0, page, mixed), budget(None, page, mixed)
    for prompt, output in [(1, 0), (19, 64), (160, 0), (5, 300), (300, 1), (64, 200)]:
        for question in [(1, 0), (prompt, output), (400, 400), (16, 984), (999, 0), (1000, 0)]:
            assert fits(ours, *question) == fits(stock, *question), question
        assert ours.has_capacity() == stock.has_capacity()
        assert ours.available_chunk_tokens(512) == stock.available_chunk_tokens(512)
        ours.reserve(prompt, output)
        stock.reserve(prompt, output)
        assert ours.remaining_total == stock.remaining_total
        assert ours.remaining_current == stock.remaining_current


def test_more_credit_never_admits_less() -> None:
    verdicts = [fits(budget(credit / 10), prompt=500, output=900) for credit in range(10)]
    assert verdicts == sorted(verdicts) and set(verdicts) == {False, True}


ENDED, RUNNING = SharingForecast.observe, SharingForecast.poll
_RUNNING = [(RUNNING, 100, 500, 0.0), (RUNNING, 256, 1024, 0.25), (ENDED, 400, 1000, 0.4)]
_RUNNING += [(RUNNING, 500, 1000, 0.5), (RUNNING, 0, 0, 0.4)]
_FADED = [0.4 * 0.9**n * (1 - 0.9**50) / (1 - 0.9 ** (50 + n)) for n in range(1, 51)]


@pytest.mark.parametrize(
    ("limit", "horizon", "seen"),
    [
        # Nothing seen is no credit.
        (0.5, 1000, [(ENDED, 0, 0, 0.0)]),
        # The share of tokens: the first 100 weigh 1 - 300/1000 in the end.
        (0.9, 1000, [(ENDED, 30, 100, 0.3), (ENDED, 10, 300, (21 + 10) / (70 + 300))]),
        # Running requests count where they share more, from some tokens on.
        (0.9, 20_000, _RUNNING),
        # It follows a change: each request fades those before it by 0.9.
        (0.9, 1000, [*[(ENDED, 40, 100, 0.4)] * 50, *((ENDED, 0, 100, at) for at in _FADED)]),
        (0.4, 20_000, [(ENDED, 90, 100, 0.4)]),
        (0.0, 20_000, [(ENDED, 50, 100, 0.0)]),
        # A request longer than the horizon replaces what was seen.
        (0.9, 1000, [(ENDED, 900, 1000, 0.9), (ENDED, 100, 2000, 0.05)]),
    ],
)
def test_forecast(
    limit: float, horizon: float, seen: list[tuple[Callable[..., None], int, int, float]]
) -> None:
    """What was shared of how many tokens, and the credit behind it."""
    forecast = SharingForecast(limit, horizon)
    assert forecast.credit == 0.0
    for tell, shared, tokens, credit in seen:
        tell(forecast, shared, tokens)
        assert forecast.credit == pytest.approx(credit)

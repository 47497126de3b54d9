# SPDX-License-Identifier: Apache-2.0
"""Admission with a credit for sharing, calculated by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_reasoncache.cache.admission import SharingBudget, SharingForecast

FREE = 800
EVICTABLE = 200


class _Tree:
    """A prefix cache with 200 evictable slots."""

    @staticmethod
    def evictable_size() -> int:
        return EVICTABLE

    @staticmethod
    def supports_mamba() -> bool:
        return False


def allocator(page: int) -> Any:
    common: dict[str, Any] = dict(dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)
    if page == 1:
        return TokenToKVPoolAllocator(FREE, **common)
    return PagedTokenToKVPoolAllocator(FREE, page_size=page, **common)


def budget(credit: float, page: int = 1, mixed: int = 0) -> SharingBudget:
    return SharingBudget(allocator(page), _Tree(), credit=credit, num_mixed_decode_tokens=mixed)


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


def test_future_output_is_discounted() -> None:
    """1000 slots, 100 for the prompt and its page, 400 * (1 - 0.25) for its output."""
    made = budget(0.25)
    made.reserve(99, 400)
    assert (made.total_offset, made.current_offset) == (500, 100)
    assert made.remaining_total == 1000 - 100 - 300
    assert made.remaining_current == 1000 - 100


def test_prompts_are_never_discounted() -> None:
    made = budget(0.9)
    made.reserve(999, 0)
    assert made.remaining_total == 0
    assert not made.has_capacity()
    empty = budget(0.9)
    assert fits(empty, prompt=999, output=0)
    assert not fits(empty, prompt=1000, output=0)


def test_request_needs_its_prompt_and_the_undiscounted_part_of_its_output() -> None:
    """600 + 0.5 * 798 is 999 and fits below 1000; one pair of tokens more does not."""
    made = budget(0.5)
    assert fits(made, prompt=600, output=798)
    assert not fits(made, prompt=600, output=800)


def test_prompt_is_rounded_up_to_pages_before_the_discount() -> None:
    """At page 16 a prompt of 601 takes 608, so 6 of the first output tokens are not discounted."""
    made = budget(0.5, page=16)
    # 608 + (601 + 784 - 608) * 0.5 = 996.5
    assert fits(made, prompt=601, output=784)
    # 608 + (601 + 791 - 608) * 0.5 = 1000
    assert not fits(made, prompt=601, output=791)


def test_rounding_does_not_exceed_what_the_request_can_ever_use() -> None:
    """A prompt of 1 with 3 output tokens needs 4, not the 16 of its page and a part of 3."""
    made = budget(0.5, page=16)
    made.total_offset = made.current_offset = 995
    assert made.remaining_total == 5
    assert fits(made, prompt=1, output=3)
    assert not fits(made, prompt=1, output=4)


def test_running_requests_reserve_through_the_same_offsets() -> None:
    """SGLang adds the estimated rest of running requests to ``total_offset`` directly."""
    made = budget(0.2, mixed=10)
    made.total_offset += 500
    assert made.remaining_total == 1000 - 10 - 500 * 0.8


def test_total_below_current_is_not_a_reservation_in_reverse() -> None:
    made = budget(0.5)
    made.current_offset += 40
    assert made.remaining_total == 1000 - 40


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mixed", [0, 13])
def test_credit_zero_is_stock(page: int, mixed: int) -> None:
    """Same verdicts and same remainders after every reservation."""
    ours = budget(0.0, page, mixed)
    stock = PrefillBudget(allocator(page), _Tree(), num_mixed_decode_tokens=mixed)
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
    assert verdicts == sorted(verdicts)
    assert verdicts[0] is False and verdicts[-1] is True


# -- forecast -------------------------------------------------------------------


def test_nothing_seen_is_no_credit() -> None:
    forecast = SharingForecast(limit=0.5)
    assert forecast.credit == 0.0
    forecast.observe(0, 0)
    assert forecast.credit == 0.0


def test_forecast_is_the_share_of_tokens() -> None:
    """30 of 100 tokens, then 10 of 300; the first weighs 1 - 300/1000 by then."""
    forecast = SharingForecast(limit=0.9, horizon=1000)
    forecast.observe(30, 100)
    assert forecast.credit == pytest.approx(0.3)
    forecast.observe(10, 300)
    assert forecast.credit == pytest.approx((30 * 0.7 + 10) / (100 * 0.7 + 300))


def test_running_requests_count_where_they_share_more() -> None:
    forecast = SharingForecast(limit=0.9)
    forecast.poll(100, 500)
    assert forecast.credit == 0.0, "too few tokens to say"
    forecast.poll(256, 1024)
    assert forecast.credit == 0.25
    forecast.observe(400, 1000)
    assert forecast.credit == pytest.approx(0.4)
    forecast.poll(500, 1000)
    assert forecast.credit == 0.5
    forecast.poll(0, 0)
    assert forecast.credit == pytest.approx(0.4)


def test_forecast_is_limited() -> None:
    forecast = SharingForecast(limit=0.4)
    forecast.observe(90, 100)
    assert forecast.credit == 0.4


def test_limit_zero_switches_the_credit_off() -> None:
    forecast = SharingForecast(limit=0.0)
    forecast.observe(50, 100)
    assert forecast.credit == 0.0


def test_request_longer_than_the_horizon_replaces_what_was_seen() -> None:
    forecast = SharingForecast(limit=0.9, horizon=1000)
    forecast.observe(900, 1000)
    forecast.observe(100, 2000)
    assert forecast.credit == pytest.approx(0.05)


def test_forecast_follows_a_change() -> None:
    forecast = SharingForecast(limit=0.9, horizon=1000)
    for _ in range(50):
        forecast.observe(40, 100)
    assert forecast.credit == pytest.approx(0.4)
    credits = []
    for _ in range(50):
        forecast.observe(0, 100)
        credits.append(forecast.credit)
    assert credits == sorted(credits, reverse=True)
    assert 0 <= credits[-1] < 0.01

# SPDX-License-Identifier: Apache-2.0
"""Prompts evicted chunk by chunk, and policies that wait for a short pool, in a live server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server.harness import generate, wait_until_idle
from tests.server.masking import differences, respond
from tests.server.problems import OPT_OUT, problems, report, solve
from tests.server.specs import (
    EVICTING_ON_TWO_RANKS,
    EVICTING_PROMPTS,
    EVICTING_PROMPTS_PAGES,
    EVICTING_WHEN_SHORT,
)

PROMPTS = pytest.mark.parametrize(
    "server", [EVICTING_PROMPTS, EVICTING_PROMPTS_PAGES], indirect=True
)
BUDGET, CHUNK = 96, 64
#: bf16 in the server, fp32 in the loop.
MEAN_ROUNDING, MOST_ROUNDING = 0.03, 1.0


def long_prompts(count: int, seed: int, together: int = 8) -> list[str]:
    """Several problems in one prompt each."""
    todo = problems(count * together, seed=seed)
    return [
        "<|user|> " + " ".join(p.prompt for p in todo[i::count]) + " <|assistant|>"
        for i in range(count)
    ]


@pytest.mark.parametrize("server", [EVICTING_PROMPTS], indirect=True)
def test_block_wise_prefill_equals_masking(server: ServerProcess, reference: Any) -> None:
    """Prompt and response have the log-probabilities of a loop that never sees what was evicted."""
    prompts = long_prompts(4, seed=41)
    compared, right, dense = 0, 0.0, 0.0
    # One after the other, so that every chunk is the prompt's own; then all at once.
    found = [
        respond(server, [text], 200, logprob_start_len=0, sampling_params={"ignore_eos": True})[0]
        for text in prompts
    ]
    found += respond(server, prompts, 200, sampling_params={"ignore_eos": True})
    for text, response in zip(prompts * 2, found, strict=True):
        assert response["prompt_tokens"] > BUDGET + 2 * CHUNK
        assert response["retractions"] == 0
        check_budget(response)
        same = differences(reference, text, response)
        assert same.mean() < MEAN_ROUNDING and same.max() < MOST_ROUNDING
        compared += len(same)
        right += float(same.sum())
        dense += float(differences(reference, text, response, None).sum())
    assert compared > 2500
    assert right < dense / 10


def check_budget(response: dict[str, Any]) -> None:
    """Never more than the budget and a chunk, as the evicts tell; see below for the slots."""
    held_then, gone, chunks = 0, 0, set()
    for written, _, length in response["evictions"]:
        if written not in chunks:
            # As it was before the first evict of this poll.
            held_then = written - gone
            assert held_then <= BUDGET + CHUNK
        chunks.add(written)
        gone += length
    ends = {written for written in chunks if written < response["prompt_tokens"]}
    assert len(ends) >= 2, "no chunk was followed by an eviction"
    length = response["prompt_tokens"] + response["output_tokens"]
    assert length - response["evicted_positions"] <= BUDGET + 8


@pytest.mark.parametrize("server", [EVICTING_PROMPTS], indirect=True)
def test_a_prompt_beyond_what_others_leave(server: ServerProcess) -> None:
    """Requests whose prompts together would not fit."""
    prompts = long_prompts(8, seed=42)
    found = respond(server, prompts, 64)
    assert sum(one["prompt_tokens"] for one in found) > 2400
    assert all(one["cached"] == 0 for one in found), "there is no prefix cache"
    for one in found:
        check_budget(one)


@PROMPTS
def test_under_load(server: ServerProcess) -> None:
    """Short and long prompts in one queue, some of which opted out."""
    respond(server, long_prompts(6, seed=43), 100)
    todo = problems(10, seed=44)
    solve(server, todo[:7])
    solve(server, todo[7:], OPT_OUT)
    wait_until_idle(server)
    totals = report(server)["totals"]
    assert totals["positions_evicted"] > 6 * 100
    assert totals["eviction_refusals"] == {}
    assert report(server)["positions_evicted_now"] == 0


@pytest.mark.parametrize("server", [EVICTING_PROMPTS_PAGES], indirect=True)
def test_retracted_prompts_are_evicted_again(server: ServerProcess) -> None:
    found = respond(server, long_prompts(8, seed=45), 150)
    again = [one for one in found if one["retractions"]]
    assert again
    assert any(sum(run[2] for run in one["evictions"]) > one["evicted_positions"] for one in again)
    assert report(server)["totals"]["eviction_refusals"] == {}


@pytest.mark.parametrize("server", [EVICTING_PROMPTS_PAGES], indirect=True)
def test_the_prefix_cache_has_what_came_before_the_first_evicted_position(
    server: ServerProcess,
) -> None:
    [text] = long_prompts(1, seed=46)
    [first] = respond(server, [text], 20)
    lowest = min(start for _, start, _ in first["evictions"])
    assert lowest < first["prompt_tokens"] // 2
    [second] = respond(server, [text], 20)
    assert second["cached"] == lowest // 16 * 16


@pytest.mark.parametrize("server", [EVICTING_ON_TWO_RANKS], indirect=True)
def test_ranks_evict_alike(server: ServerProcess) -> None:
    """They would wait for each other for ever, or run out of different slots."""
    found = respond(server, long_prompts(8, seed=48), 200)
    assert sum(one["evicted_positions"] for one in found) > 8 * 50
    assert report(server)["totals"]["eviction_refusals"] == {}


@pytest.mark.parametrize("server", [EVICTING_WHEN_SHORT], indirect=True)
def test_nothing_is_evicted_until_the_pool_is_short(server: ServerProcess) -> None:
    """Alone a request keeps everything. Together they give up positions where they would
    otherwise, as the ones that opted out show, be retracted."""
    todo = problems(10, seed=47)
    text = f"<|user|> {todo[0].prompt} <|assistant|>"
    [alone] = respond(server, [text], 400, sampling_params={"ignore_eos": True})
    assert alone["prompt_tokens"] + alone["output_tokens"] > 160 + 2 * 8
    assert alone["evicted_positions"] == 0
    prompts = [f"<|user|> {problem.prompt} <|assistant|>" for problem in todo]
    together = respond(server, prompts, 400, sampling_params={"ignore_eos": True})
    assert sum(one["evicted_positions"] for one in together) > 300
    assert sum(one["retractions"] for one in together) == 0
    before = server.log_size()
    opted_out = {"sampling_params": {"ignore_eos": True, **OPT_OUT}}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(generate, server, text, 400, **opted_out) for text in prompts]
    assert all(answer.result()["text"] for answer in answers)
    assert "retract" in server.log_text(before).lower()

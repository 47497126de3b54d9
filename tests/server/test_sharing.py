# SPDX-License-Identifier: Apache-2.0
"""Sharing under load, in every publish mode and page size, and what every kind of server does.

The ``server`` fixture checks after each test that every slot is back, the cache
can be flushed and the log holds no traceback; SGLang's strict memory checks run
after every batch meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

import httpx
import pytest

from eval.serving import MODEL_NAME, ServerProcess
from tests.server.harness import wait_until_idle
from tests.server.problems import OPT_OUT, accuracy, chat_once, problems, report, solve
from tests.server.specs import (
    ALIASED,
    EVICTING,
    EVICTING_PAGES,
    EVICTING_PROMPTS,
    EVICTING_PROMPTS_PAGES,
    EXACT,
    PAGED,
    QUEST,
    RKV,
    SHARING_AND_EVICTING,
    SHARING_AND_QUEST,
    SHARING_AND_RKV,
    SNAPKV_H2O,
    TWO_RANKS,
)

SHARING = (EXACT, ALIASED, PAGED)
ALL = pytest.mark.parametrize("server", SHARING, indirect=True)
EVERY_KIND = (
    *(*SHARING, EVICTING, EVICTING_PAGES, SHARING_AND_EVICTING, EVICTING_PROMPTS),
    *(EVICTING_PROMPTS_PAGES, RKV, SHARING_AND_RKV, SNAPKV_H2O, QUEST, SHARING_AND_QUEST),
)
TOKEN_ALIGNED = pytest.mark.parametrize("server", [EXACT, ALIASED], indirect=True)


@TOKEN_ALIGNED
def test_shares_and_keeps_answers(server: ServerProcess) -> None:
    """A queue of streamed requests shares memory, and its answers stay right."""
    todo = problems(24)
    answers = solve(server, todo)
    totals = report(server)["totals"]
    assert totals["blocks_shared"] > 24
    assert totals["final_saving_ratio"] > 0.1
    assert accuracy(todo, answers) >= 0.8


@pytest.mark.parametrize("server", [PAGED], indirect=True)
def test_shares_whole_pages(server: ServerProcess) -> None:
    """At page size 16 blocks are pages; by index they differ in tokens, so only memory is checked."""
    solve(server, problems(16))
    seen = report(server)
    assert seen["block"] == 16
    assert seen["totals"]["blocks_shared"] > 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="each rank needs a core of its own")
@pytest.mark.parametrize("server", [TWO_RANKS], indirect=True)
def test_tensor_parallel_ranks_agree(server: ServerProcess) -> None:
    """Distances are summed over ranks, so both redirect the same rows; else they would hang."""
    todo = problems(10, seed=14)
    answers = solve(server, todo)
    assert report(server)["totals"]["blocks_shared"] > 0
    assert accuracy(todo, answers) >= 0.8


@pytest.mark.parametrize("server", [ALIASED], indirect=True)
def test_retracted_requests_share_again(server: ServerProcess) -> None:
    """After a retraction the accepted blocks are applied to the recomputed row."""
    todo = problems(12, seed=6)
    answers = solve(server, todo)
    assert accuracy(todo, answers) >= 0.9
    seen = report(server)
    assert any(entry["retractions"] for entry in seen["recent"])
    assert seen["totals"]["blocks_reapplied"] > 0


@pytest.mark.parametrize("server", EVERY_KIND, indirect=True)
def test_aborted_and_disconnected_requests_give_everything_back(server: ServerProcess) -> None:
    """Requests that vanish mid-stream, by abort call or by closing the connection."""

    async def vanish(client: httpx.AsyncClient, number: int, prompt: str) -> None:
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1200,
            "temperature": 0,
            "stream": True,
            "rid": f"vanish-{number}",
        }
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                received = 0
                async for _ in stream.aiter_lines():
                    received += 1
                    # Two lines a token: after some 100 to 250 tokens, when
                    # steps have begun to be shared.
                    if received > 200 + 25 * number:
                        break
                if number % 2:
                    await client.post("/abort_request", json={"rid": f"vanish-{number}"})

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
            todo = problems(10, seed=7)
            await asyncio.gather(*(vanish(client, i, p.prompt) for i, p in enumerate(todo)))

    asyncio.run(run())
    wait_until_idle(server)
    seen = report(server)
    assert seen["slots_saved_now"] == seen["positions_evicted_now"] == 0


@ALL
def test_follow_up_turn(server: ServerProcess) -> None:
    """A second turn over a shared first answer is answered, twice alike."""
    problem = problems(1, seed=8)[0]
    first = chat_once(server, [{"role": "user", "content": problem.prompt}])
    turns = [
        {"role": "user", "content": problem.prompt},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": problem.prompt},
    ]
    again = [chat_once(server, turns, max_tokens=64) for _ in range(2)]
    texts = [response.choices[0].message.content for response in again]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("server", "total"),
    [
        *((spec, "blocks_shared") for spec in SHARING),
        *((spec, "positions_evicted") for spec in (EVICTING, EVICTING_PAGES, SHARING_AND_EVICTING)),
    ],
    indirect=["server"],
)
def test_flush_between_loads(server: ServerProcess, total: str) -> None:
    """Flushing empties the shared prefix cache; the next load starts from nothing."""
    todo = problems(6, seed=9)
    solve(server, todo)
    wait_until_idle(server)
    assert server.post("/flush_cache").status_code == 200
    assert report(server)["totals"][total] == 0
    solve(server, todo)
    assert report(server)["totals"][total] > 0


@pytest.mark.parametrize("server", [EXACT, ALIASED, EVICTING], indirect=True)
def test_opted_out_request_keeps_its_row(server: ServerProcess) -> None:
    """``custom_params`` of the OpenAI API switches sharing and evicting off for one request."""
    before = report(server)["totals"]
    solve(server, problems(4, seed=10), OPT_OUT)
    after = report(server)["totals"]
    assert after["requests_opted_out"] == before["requests_opted_out"] + 4
    for total in ("blocks_compared", "positions_evicted"):
        assert after[total] == before[total]

# SPDX-License-Identifier: Apache-2.0
"""Policies that evict positions, in a live server and under load; as in ``test_sharing.py``, slots
are checked during and after each test."""

from pathlib import Path
from typing import Any

import pytest

from eval.serving import ServerError, ServerProcess
from tests.server import specs
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import (
    OPT_OUT,
    TO_THE_END,
    problems,
    prompts,
    report,
    respond,
    solve,
)
from tests.server.reference import assert_masked, assert_rkv_decides, differences


@pytest.mark.parametrize(
    ("server", "together"),
    [(specs.EVICTING_PAGES, 1), (specs.RKV, 6), (specs.SNAPKV_H2O, 6)],
    indirect=["server"],
)
def test_evicting_equals_masking(server: ServerProcess, together: int, reference: Any) -> None:
    """Tokens and log-probabilities are those of a loop whose attention is masked. Evicted slots are
    overwritten meanwhile."""
    todo = prompts(6, seed=21)
    # In overlap, the forward in flight at an eviction has read the old slots already.
    overlaps = not server.get("/server_info").json()["disable_overlap_schedule"]
    assert overlaps == (together > 1)
    found: list[dict[str, Any]] = []
    for at in range(0, len(todo), together):
        found += respond(server, todo[at : at + together])
    assert all(one["retractions"] == 0 and one["evicted_positions"] > 50 for one in found)
    right = assert_masked(reference, todo, found, 1000, 30, after=int(overlaps))
    if report(server)["evictors"][0]["name"] == "keydiff":
        # Evictions seen a token too early or too late would show.
        shifted = [
            differences(reference, text, one, 1 - int(overlaps)).sum()
            for text, one in zip(todo, found, strict=True)
        ]
        assert right < sum(shifted) / 3


@pytest.mark.parametrize("server", [specs.SNAPKV_H2O], indirect=True)
def test_one_has_the_prompt_the_other_the_response(server: ServerProcess) -> None:
    for found in respond(server, prompts(6, seed=21)):
        prompt = found["prompt_tokens"]
        assert any(start + length < prompt - 7 for _, start, length in found["evictions"])
        assert any(start >= prompt for _, start, length in found["evictions"])
        length = prompt + found["output_tokens"]
        assert 90 <= length - found["evicted_positions"] <= 90 + 16 + 8


@pytest.mark.parametrize("server", [specs.RKV], indirect=True)
def test_what_goes_is_what_the_rule_says(server: ServerProcess, reference: Any) -> None:
    assert_rkv_decides(server, reference)


@pytest.mark.parametrize("server", [*specs.EVICTORS, specs.RKV, specs.SNAPKV_H2O], indirect=True)
def test_frees_slots_under_load(server: ServerProcess) -> None:
    """And shares on the same rows, where the policy does both."""
    start = server.log_size()
    solve(server, problems(12, seed=22))
    wait_until_idle(server)
    seen = report(server)
    totals = seen["totals"]
    assert totals["positions_evicted"] > 12 * 50
    assert totals["slots_freed_by_eviction"] > 0
    assert seen["positions_evicted_now"] == seen["slots_saved_now"] == 0
    assert "#evicted token: " in server.log_text(start)
    assert 0.2 < totals["final_saving_ratio"] < 0.95
    if "reasoncache+" in seen["config"]["policy"]:
        assert totals["blocks_shared"] > 12
        assert totals["positions_evicted"] > totals["slots_freed_by_eviction"]
        assert totals["refusals"]["evicted"] > 0, "some block met an evicted position"
        assert any(row["blocks"] and row["evictions"] for row in seen["recent"])


@pytest.mark.parametrize("server", specs.EVICTORS, indirect=True)
def test_retracted_requests_evict_again(server: ServerProcess) -> None:
    # Which requests are retracted depends on time, and not each had evicted positions by then.
    for seed in range(25, 29):
        solve(server, problems(10, seed=seed))
        rows = [row for row in report(server)["recent"] if row["retractions"]]
        assert rows
        evicted = [sum(run[2] for run in row["evictions"]) for row in rows]
        # More was evicted than is gone at the end: some of it twice.
        if any(
            all_ > row["evicted_positions"] > 0 for all_, row in zip(evicted, rows, strict=True)
        ):
            return
    pytest.fail(f"no retracted row was evicted from again: {rows}")


@pytest.mark.parametrize("server", specs.EVICTORS, indirect=True)
def test_follow_up_turn(server: ServerProcess) -> None:
    """A second turn gets its prefix from the cache up to the first evicted position, and computes the rest."""
    [first] = prompts(1, seed=26)
    [entry] = respond(server, [first])
    page = server.get("/server_info").json()["page_size"]
    lowest = min(start for _, start, _ in entry["evictions"])
    assert lowest >= entry["prompt_tokens"] // page * page
    follow_up = f"{first} {entry['text']} {first}"
    cached = [generate(server, follow_up, 48)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == lowest // page * page
    # All of its prompt, which was computed without an evicted position.
    assert cached[1] > entry["prompt_tokens"] + entry["output_tokens"] - page


@pytest.mark.long
def test_a_default_backend_that_would_read_evicted_positions_is_refused(
    model_path: Path, tmp_path: Path
) -> None:
    """Where no flag names it, the backend is known only when the server has chosen it."""
    flags = ("--enable-reasoncache", "--reasoncache-policy", "random:share=0.5")
    # Without a compiler the CPU platform's default is SGLang's own.
    env = {"CXX": str(tmp_path / "none"), "REASONCACHE_CACHE_DIR": str(tmp_path)}
    server = ServerProcess(model_path, flags=flags, env=env, log_path=tmp_path / "log")
    with pytest.raises(ServerError, match="random:share=0.5 evicts positions, which"):
        server.start()


BUDGET, CHUNK = 96, 64


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


@pytest.mark.parametrize("server", [specs.EVICTING_PROMPTS], indirect=True)
def test_block_wise_prefill_equals_masking(server: ServerProcess, reference: Any) -> None:
    """Prompt and response have the log-probabilities of a loop that never sees what was evicted."""
    todo = prompts(4, seed=41, each=8)
    # One after the other, so that every chunk is the prompt's own; then all at once.
    found = [respond(server, [text], 200, logprob_start_len=0, **TO_THE_END)[0] for text in todo]
    found += respond(server, todo, 200, **TO_THE_END)
    for response in found:
        assert response["prompt_tokens"] > BUDGET + 2 * CHUNK
        assert response["retractions"] == 0
        check_budget(response)
    assert_masked(reference, todo * 2, found, 2500, 10, rounding=(0.03, 1.0))


@pytest.mark.parametrize("server", [specs.EVICTING_PROMPTS], indirect=True)
def test_a_prompt_beyond_what_others_leave(server: ServerProcess) -> None:
    found = respond(server, prompts(8, seed=42, each=8), 64)
    assert sum(one["prompt_tokens"] for one in found) > 2400
    assert all(one["cached"] == 0 for one in found), "there is no prefix cache"
    for one in found:
        check_budget(one)


@pytest.mark.parametrize("server", [specs.EVICTING_PROMPTS], indirect=True)
def test_under_load(server: ServerProcess) -> None:
    respond(server, prompts(6, seed=43, each=8), 100)
    todo = problems(6, seed=44)
    solve(server, todo[:4])
    solve(server, todo[4:], OPT_OUT)
    wait_until_idle(server)
    seen = report(server)
    assert seen["totals"]["positions_evicted"] > 6 * 100
    assert seen["positions_evicted_now"] == 0


@pytest.mark.parametrize("server", [specs.EVICTING_WHEN_SHORT], indirect=True)
def test_nothing_is_evicted_until_the_pool_is_short(server: ServerProcess) -> None:
    """Alone a request keeps everything. Together they give up positions where they would
    otherwise, as the ones that opted out show, be retracted."""
    todo = prompts(10, seed=47)
    [alone] = respond(server, todo[:1], 400, **TO_THE_END)
    assert alone["prompt_tokens"] + alone["output_tokens"] > 160 + 2 * 8
    assert alone["evicted_positions"] == 0
    # Of a request that ignores its end SGLang reserves every slot, and would never be short.
    together = respond(server, todo, 400)
    assert sum(one["evicted_positions"] for one in together) > 100
    assert sum(one["retractions"] for one in together) == 0
    before = server.log_size()
    opted_out = {"sampling_params": OPT_OUT}
    assert all(one["text"] for one in respond(server, todo, 400, **opted_out))
    assert "retract" in server.log_text(before).lower()

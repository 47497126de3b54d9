# SPDX-License-Identifier: Apache-2.0
"""Policies that evict positions, in a live server and under load.

The ``server`` fixture checks after each test that every slot is back; SGLang's
strict memory checks run after every batch meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.serving import ServerError, ServerProcess
from tests.server.harness import generate, wait_until_idle
from tests.server.masking import differences, respond
from tests.server.problems import assert_frees_slots, problems, report, series, solve
from tests.server.specs import EVICTING, EVICTING_PAGES, SHARING_AND_EVICTING

EACH = (EVICTING, EVICTING_PAGES, SHARING_AND_EVICTING)
ALL = pytest.mark.parametrize("server", EACH, indirect=True)
#: Difference of a response's log-probabilities between bf16 in the server and fp32 in the loop.
MEAN_ROUNDING, MOST_ROUNDING = 0.02, 0.6


@pytest.mark.parametrize(
    ("server", "together"), [(EVICTING, 6), (EVICTING_PAGES, 1)], indirect=["server"]
)
def test_evicting_equals_masking(server: ServerProcess, together: int, reference: Any) -> None:
    """Tokens and log-probabilities are those of a loop whose attention is masked.

    Evicted slots are overwritten meanwhile, by requests that run beside it or by itself.
    """
    prompts = [f"<|user|> {p.prompt} <|assistant|>" for p in problems(6, seed=21)]
    # In overlap, the forward in flight at an eviction has read the old slots already.
    overlaps = not server.get("/server_info").json()["disable_overlap_schedule"]
    assert overlaps == (together > 1)
    compared, right, shifted, dense = 0, 0.0, 0.0, 0.0
    for at in range(0, len(prompts), together):
        group = prompts[at : at + together]
        for text, found in zip(group, respond(server, group), strict=True):
            assert found["retractions"] == 0
            assert found["evicted_positions"] > 50
            same = differences(reference, text, found, int(overlaps))
            assert same.mean() < MEAN_ROUNDING and same.max() < MOST_ROUNDING
            compared += len(same)
            right += float(same.sum())
            shifted += float(differences(reference, text, found, 1 - int(overlaps)).sum())
            dense += float(differences(reference, text, found, None).sum())
    assert compared > 1000
    # EvictedPositions seen a token too early or too late would show, as would reading what was evicted.
    assert right < shifted / 3
    assert right < dense / 30


@ALL
def test_frees_slots_under_load(server: ServerProcess) -> None:
    """A queue of requests stays within the budget, and what is freed is used by others."""
    totals = assert_frees_slots(server, seed=22)
    assert 0.2 < totals["final_saving_ratio"] < 0.95


@pytest.mark.parametrize("server", [EVICTING], indirect=True)
def test_budget_and_reports(server: ServerProcess) -> None:
    """Endpoint, Prometheus and the decode log line say what happened."""
    start, before = server.log_size(), series(server)
    [found] = respond(server, [f"<|user|> {problems(1, seed=23)[0].prompt} <|assistant|>"])
    length = found["prompt_tokens"] + found["output_tokens"]
    # Budget, slack, and what is written between two polls and at the end.
    assert 160 <= length - found["evicted_positions"] <= 160 + 8 + 8
    seen = report(server)
    assert seen["evictors"][0]["name"] == "streamingllm"
    assert (seen["evictors"][0]["budget"], seen["evictors"][0]["sinks"]) == (160, 4)
    assert seen["totals"]["blocks_compared"] == 0
    after = series(server)
    for name in ("positions_evicted", "slots_freed_by_eviction", "eviction_decisions"):
        assert after[f"sglang:reasoncache_{name}_total"] > before.get(
            f"sglang:reasoncache_{name}_total", 0.0
        )
    assert after["sglang:reasoncache_positions_evicted_now"] == 0
    assert "#evicted token: " in server.log_text(start)


@pytest.mark.parametrize("server", [SHARING_AND_EVICTING], indirect=True)
def test_shares_and_evicts_on_the_same_rows(server: ServerProcess) -> None:
    solve(server, problems(12, seed=24))
    totals = report(server)["totals"]
    assert totals["blocks_shared"] > 12
    assert totals["positions_evicted"] > totals["slots_freed_by_eviction"] > 0
    assert totals["refusals"]["evicted"] > 0, "some block met an evicted position"
    assert any(row["blocks"] and row["evictions"] for row in report(server)["recent"])


@pytest.mark.parametrize("server", [EVICTING_PAGES, SHARING_AND_EVICTING], indirect=True)
def test_retracted_requests_evict_again(server: ServerProcess) -> None:
    # Which requests are retracted depends on time, and not each had evicted positions by then.
    for seed in range(25, 29):
        solve(server, problems(10, seed=seed))
        rows = [row for row in report(server)["recent"] if row["retractions"]]
        assert rows
        # More was evicted than is gone at the end: some of it twice.
        if any(
            sum(run[2] for run in row["evictions"]) > row["evicted_positions"] > 0 for row in rows
        ):
            return
    pytest.fail(f"no retracted row was evicted from again: {rows}")


@ALL
def test_follow_up_turn(server: ServerProcess) -> None:
    """A second turn gets its prefix from the cache up to the first evicted position, and computes the rest."""
    problem = problems(1, seed=26)[0]
    first = f"<|user|> {problem.prompt} <|assistant|>"
    body = generate(server, first, 700)
    rid = body["meta_info"]["id"]
    wait_until_idle(server)
    [entry] = [row for row in report(server)["recent"] if row["rid"] == rid]
    page = server.get("/server_info").json()["page_size"]
    lowest = min(start for _, start, _ in entry["evictions"])
    assert lowest >= entry["prompt_tokens"] // page * page
    follow_up = f"{first} {body['text']} <|user|> {problem.prompt} <|assistant|>"
    cached = [generate(server, follow_up, 48)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == lowest // page * page
    # All of its prompt, which was computed without an evicted position.
    assert cached[1] > entry["prompt_tokens"] + entry["output_tokens"] - page


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

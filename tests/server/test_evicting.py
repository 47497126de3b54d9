# SPDX-License-Identifier: Apache-2.0
"""Tests policies that evict positions, or select what is read, some of them under load. SGLang checks after
every batch that no slot is lost, and the ``server`` fixture checks this after each test."""

from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, generate, wait_until_idle
from tests.server.problems import (
    OPT_OUT,
    TO_THE_END,
    problems,
    prompts,
    report,
    respond,
    series,
    solve,
)
from tests.server.reference import (
    ROUNDING,
    Beside,
    Loop,
    assert_reads_less,
    assert_rkv_decides,
    off_from_selecting,
)

#: The loops that fit worse than the one that evicts what the server evicts (``reference.Beside``).
OTHERS = ("nothing evicted", "evicted at another query")


@pytest.mark.parametrize(
    ("spec", "together"),
    [
        (specs.EVICTING_PAGES, 1),
        (specs.RKV, 6),
        # A minute, of what RKV and the tests of sharing show apart.
        pytest.param(specs.SHARING_AND_EVICTING, 1, marks=pytest.mark.long),
    ],
)
def test_evicting_equals_skipping(
    servers: ServerPool, spec: specs.ServerSpec, together: int
) -> None:
    """Log-probabilities and tokens are those of a loop that skips evicted positions, although later tokens
    overwrite the slots of these positions."""
    server = servers.get(spec)
    log = server.log_size()
    todo = prompts(6, seed=21)
    beside = Beside(Loop(servers.model(spec.model)), server)
    assert beside.late == (1 if spec is specs.RKV else 0)
    found: list[dict[str, Any]] = []
    # Requests that are sent one by one are never retracted: SGLang retracts no request that runs alone.
    for at in range(0, len(todo), together):
        found += respond(server, todo[at : at + together])
    for text, one in zip(todo, found, strict=True):
        assert one["retractions"] == 0 and one["evicted_positions"] > 20
        beside.add(text, one)
    if spec is specs.SHARING_AND_EVICTING:
        beside.check(*OTHERS, "nothing shared", "keys rotated otherwise")
    else:
        beside.check(*OTHERS)
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.RKV], indirect=True)
def test_what_goes_is_what_the_rule_says(server: ServerProcess, reference: Any) -> None:
    assert_rkv_decides(server, reference)


@pytest.mark.parametrize(
    "server", [*specs.EVICTORS, pytest.param(specs.RKV, marks=pytest.mark.long)], indirect=True
)
def test_frees_slots_under_load(server: ServerProcess) -> None:
    """Evicting frees slots. With a policy that also shares, some requests share and evict."""
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
        assert any(row["blocks"] and row["evictions"] for row in seen["recent"])


@pytest.mark.parametrize("server", specs.EVICTORS, indirect=True)
def test_follow_up_turn(server: ServerProcess) -> None:
    """A second turn reads its prefix from the cache up to the first evicted position, and computes the rest."""
    [first] = prompts(1, seed=26)
    [entry] = respond(server, [first])
    page = server.get("/server_info").json()["page_size"]
    lowest = min(start for _, start, _ in entry["evictions"])
    assert lowest >= entry["prompt_tokens"] // page * page
    follow_up = f"{first} {entry['text']} {first}"
    cached = [generate(server, follow_up, 48)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached[0] == lowest // page * page
    # The first follow-up evicted nothing from its prompt, so the second one reads this prompt from the cache.
    assert cached[1] > entry["prompt_tokens"] + entry["output_tokens"] - page


BUDGET = 96
CHUNK = 64


def check_budget(response: dict[str, Any]) -> None:
    """Checks, from the reported evictions, that a request never holds more positions than BUDGET plus CHUNK."""
    held_then = 0
    gone = 0
    chunks = set()
    for written, _, length in response["evictions"]:
        if written not in chunks:
            # How many positions the request held before the evictions at length ``written``.
            held_then = written - gone
            assert held_then <= BUDGET + CHUNK
        chunks.add(written)
        gone += length
    ends = {written for written in chunks if written < response["prompt_tokens"]}
    assert len(ends) >= 2, "no chunk was followed by an eviction"
    length = response["prompt_tokens"] + response["output_tokens"]
    assert length - response["evicted_positions"] <= BUDGET + 8


@pytest.mark.parametrize(
    ("spec", "together"),
    # Under the overlap schedule the forward in flight may be another request's chunk. Then no query reads the
    # row as it was before an eviction. This depends on timing, so requests are sent one by one.
    [(specs.EVICTING_PROMPTS, False), (specs.EVICTING_PROMPTS_IN_TURN, True)],
)
def test_block_wise_prefill_equals_skipping(
    servers: ServerPool, spec: specs.ServerSpec, together: bool
) -> None:
    """Prompt and response have the log-probabilities of a loop that skips evicted positions."""
    server = servers.get(spec)
    log = server.log_size()
    beside = Beside(Loop(servers.model(spec.model)), server)
    assert beside.late == (0 if together else 1)
    todo = prompts(4, seed=41, each=8)
    # Sent one by one, each chunk is prefilled alone.
    found = [respond(server, [text], 200, logprob_start_len=0, **TO_THE_END)[0] for text in todo]
    if together:
        found += respond(server, todo, 200, **TO_THE_END)
    for text, response in zip(todo * 2, found, strict=False):
        assert response["prompt_tokens"] > BUDGET + 2 * CHUNK
        assert response["retractions"] == 0
        check_budget(response)
        beside.add(text, response)
    beside.check(*OTHERS)
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.QUEST], indirect=True)
def test_selecting_equals_masking_in_every_layer(
    servers: ServerPool, server: ServerProcess
) -> None:
    """Log-probabilities are those of a loop that masks, in each layer, what Quest leaves out. Prometheus counts
    what was read."""
    log = server.log_size()
    selecting, dense = off_from_selecting(server, servers.model(specs.QUEST.model))
    assert selecting.max() < ROUNDING
    assert dense.mean() > 100 * selecting.mean()
    wait_until_idle(server)
    assert_reads_less(report(server))
    published = series(server)
    assert 0 < published["positions_read_total"] < 0.8 * published["positions_held_total"]
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.QUEST], indirect=True)
def test_who_opts_out_reads_exact_kv_beside_selection(
    servers: ServerPool, server: ServerProcess
) -> None:
    """What earlier steps computed from some pages only is approximate: it stays cached for others."""
    loop = Loop(servers.model(specs.QUEST.model))
    [text] = prompts(1, seed=44)
    [first] = respond(server, [text], 200, **TO_THE_END)
    follow_up = f"{text} {first['text']} {text}"
    tokens = loop.tokenizer(follow_up)["input_ids"]
    sampling = {**TO_THE_END["sampling_params"], **OPT_OUT}
    [exact] = respond(server, [follow_up], 100, sampling_params=sampling)
    [other] = respond(server, [follow_up], 100, **TO_THE_END)
    assert loop.compare(tokens, exact).off.max() < ROUNDING
    assert loop.compare(tokens, other).off.mean() > 1e-3
    written = first["prompt_tokens"] + len(first["tokens"])
    assert exact["cached"] < written - 100 and other["cached"] > written - 32


@pytest.mark.parametrize("server", [specs.QUEST_AND_SHARING], indirect=True)
def test_selecting_beside_sharing_and_retractions(server: ServerProcess) -> None:
    """Requests are retracted, share pages and come back from the host."""
    answers = solve(server, problems(8, seed=43))
    assert all(answer.text for answer in answers)
    wait_until_idle(server)
    assert_reads_less(report(server))
    assert report(server)["totals"]["blocks_shared"] > 8

# SPDX-License-Identifier: Apache-2.0
"""Tests more than two ranks, and DP attention: each group of ranks has its own requests, filter process,
ledger (block pairs that may share) and report. All groups run each forward together, because they compute the
experts together."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, wait_until_idle
from tests.server.problems import OPT_OUT, TO_THE_END, letters, report, reports, respond, told
from tests.server.reference import ROUNDING, Beside, Loop

_MOST = 300


def _ask(server: ServerProcess, jobs: list[tuple[int, str, bool]]) -> list[dict[str, Any]]:
    """Sends all jobs at once. A job is a group, a prompt, and whether the request may share."""

    def ask(job: tuple[int, str, bool]) -> Any:
        group, text, shares = job
        sampling = {"temperature": 0, "max_new_tokens": _MOST, "ignore_eos": True}
        sampling |= {} if shares else OPT_OUT
        body = {"text": text, "return_logprob": True, "routed_dp_rank": group}
        response = server.post("/generate", json={**body, "sampling_params": sampling})
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return told(server, list(pool.map(ask, jobs)))


def _check(
    server: ServerProcess,
    loop: Loop,
    jobs: list[tuple[int, str, bool]],
    responses: list[dict[str, Any]],
) -> dict[str, float]:
    """Checks that the responses' log-probabilities are those of ``loop``, a Hugging Face model in which the
    same blocks share. Returns what ``Beside.check`` returns."""
    beside = Beside(loop, server)
    for (_, text, shares), found in zip(jobs, responses, strict=True):
        assert shares or not found["blocks"]
        beside.add(text, found)
    shared = any(found["blocks"] for found in responses)
    return beside.check(*(("nothing shared", "keys rotated otherwise") if shared else ()))


@specs.FEW_CORES
@pytest.mark.parametrize("spec", [specs.GROUPS.for_long_runs(), specs.GROUPS_OF_TWO])
def test_each_group_shares_for_itself(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """First each group has four requests that share and a request that opted out. Then one group works while
    the other group is idle."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    log = server.log_size()
    jobs = [(i % 2, text, i < 8) for i, text in enumerate(letters(10))]
    responses = _ask(server, jobs)
    seen = reports(server)
    assert [one["dp_rank"] for one in seen] == [0, 1]
    for group, one in enumerate(seen):
        mine = [found for job, found in zip(jobs, responses, strict=True) if job[0] == group]
        blocks = sum(len(found["blocks"]) for found in mine)
        assert blocks == one["totals"]["blocks_shared"] > 20
        assert one["uncorrected"] is None is one["disabled"]
        assert one["threshold"]["warm"] and one["totals"]["requests_opted_out"] == 1
    assert _check(server, loop, jobs, responses)["nothing shared"] > 5e-3
    families = text_string_to_metric_families(server.get("/metrics").text)
    labels = {
        sample.labels["dp_rank"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "sglang:reasoncache_blocks_shared_total" and sample.value
    }
    assert labels.keys() == {"0", "1"}
    alone = [(1, text, i < 2) for i, text in enumerate(letters(3, first=10))]
    _check(server, loop, alone, _ask(server, alone))
    grown = [
        now["totals"]["blocks_shared"] - one["totals"]["blocks_shared"]
        for now, one in zip(reports(server), seen, strict=True)
    ]
    assert grown[0] == 0 < grown[1]
    assert_whole(server, log)


@specs.FEW_CORES
@pytest.mark.parametrize("spec", [specs.GROUPS_SHORT])
def test_groups_short_of_slots_lose_nothing(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Each group has slots for two responses but gets six requests; one request of each group opts out.
    Requests are retracted. When they run again, their blocks share again."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    log = server.log_size()
    jobs = [(i % 2, text, i > 1) for i, text in enumerate(letters(12))]
    responses = _ask(server, jobs)
    wait_until_idle(server)
    for one in reports(server):
        totals = one["totals"]
        assert totals["blocks_shared"] > 0 == totals["blocks_missed"]
    assert sum(one["totals"]["blocks_reapplied"] for one in reports(server)) > 0
    assert "#retracted_reqs" in server.log_text(log)
    opted_out = [at for at, job in enumerate(jobs) if not job[2]]
    _check(server, loop, [jobs[at] for at in opted_out], [responses[at] for at in opted_out])
    assert_whole(server, log)


@specs.FEW_CORES
@pytest.mark.parametrize("spec", [specs.FOUR_RANKS])
def test_four_ranks_decide_alike(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """If they did not, they would wait for each other, or SGLang's checks would find lost slots."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    log = server.log_size()
    respond(server, letters(9), 400, **TO_THE_END)
    wait_until_idle(server)
    totals = report(server)["totals"]
    assert totals["blocks_shared"] > 8 and totals["shortages"] > 0 == totals["blocks_missed"]
    assert totals["requests_swapped"] > 0 and "#retracted_reqs" in server.log_text(log)
    for text, found in zip(
        letters(3), respond(server, letters(3), 200, sampling_params=OPT_OUT), strict=True
    ):
        ids = loop.tokenizer(text)["input_ids"]
        assert loop.compare(ids, found).off.max() < ROUNDING
    assert_whole(server, log)

# SPDX-License-Identifier: Apache-2.0
"""Servers on which the responses to one prompt share slots."""

import asyncio
import contextlib
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, generate, wait_until_idle
from tests.server.problems import OPT_OUT, prompts, report, series

SAMPLED = {"temperature": 0.8}
#: How long the clients of :func:`test_clients_that_come_and_go_lose_nothing` do so.
SECONDS = float(os.environ.get("REASONCACHE_SOAK_SECONDS", "60"))


@pytest.mark.parametrize(
    "server",
    [specs.SIBLINGS, pytest.param(specs.SIBLINGS_ON_TWO_RANKS, marks=specs.FEW_CORES)],
    indirect=True,
)
def test_samples_share_with_each_other(server: ServerProcess) -> None:
    before = series(server)
    todo = prompts(3, seed=51)
    with ThreadPoolExecutor(len(todo)) as pool:
        sampling = {**SAMPLED, "n": 4}
        made = list(
            pool.map(lambda text: generate(server, text, 700, sampling_params=sampling), todo)
        )
    assert [len(samples) for samples in made] == [4] * 3
    wait_until_idle(server)
    seen, after = report(server), series(server)
    totals = seen["totals"]
    assert totals["slots_saved_across_total"] > 100 and totals["blocks_shared_across"] > 12
    assert 0 < totals["across_ratio"] < 1 and seen["slots_saved_across_now"] == 0
    name = "slots_saved_across_total"
    ranks = server.get("/server_info").json()["tp_size"]
    # All of them did the same.
    assert 0 < after[name] - before.get(name, 0.0) <= ranks * totals[name]
    assert after["slots_saved_across_now"] == 0


@pytest.mark.parametrize("server", [specs.SIBLINGS], indirect=True)
def test_nobody_reads_what_another_salt_or_an_opted_out_request_wrote(
    server: ServerProcess,
) -> None:
    """The same prompt and, greedily, the same response, all at once."""
    [text] = prompts(1, seed=52)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "salted": {"cache_salt": "secret"},
        "keyed": {"extra_key": "another"},
        "out": {"sampling_params": OPT_OUT},
    }
    todo = [(f"{kind}-{i}", options) for i in range(3) for kind, options in kinds.items()]
    with ThreadPoolExecutor(len(todo)) as pool:
        list(pool.map(lambda job: generate(server, text, 700, rid=job[0], **job[1]), todo))
    wait_until_idle(server)
    across = dict.fromkeys(kinds, 0)
    for entry in report(server)["recent"]:
        kind = entry["rid"].partition("-")[0]
        for *_, source in entry["blocks_across"] if kind in kinds else ():
            across[kind] += 1
            assert source.partition("-")[0] == kind
    # Memory decides which of them run together.
    assert across["out"] == 0 and sum(across.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize("server", [specs.SIBLINGS], indirect=True)
def test_clients_that_come_and_go_lose_nothing(server: ServerProcess) -> None:
    """Samples of few prompts that end, are aborted, lose their client or are retracted in the middle
    of reading each other, between flushes; SGLang accounts for every slot after each batch."""
    draw, kinds = random.Random(54), ("", "salt", "out")
    done: dict[str, int] = {}

    async def one(client: httpx.AsyncClient, texts: list[str], number: int) -> None:
        how, kind = draw.choice(("end", "end", "abort", "leave")), draw.choice(kinds)
        sampling: dict[str, Any] = {**SAMPLED, "max_new_tokens": draw.randrange(50, 900)}
        sampling |= {"n": draw.choice((1, 2, 4))} | (OPT_OUT if kind == "out" else {})
        body = {"text": draw.choice(texts), "sampling_params": sampling, "stream": True}
        body |= {"rid": f"{kind}-{number}"} if sampling["n"] == 1 else {}
        body |= {"cache_salt": "secret"} if kind == "salt" else {}
        lines = draw.randrange(20, 400)
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with client.stream("POST", "/generate", json=body) as stream:
                assert stream.status_code == 200, await stream.aread()
                async for _ in stream.aiter_lines():
                    lines -= how != "end"
                    if not lines:
                        break
                if how == "abort" and "rid" in body:
                    await client.post("/abort_request", json={"rid": body["rid"]})
        done[how] = done.get(how, 0) + 1

    async def clients(end: float) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
            number = 0
            while time.monotonic() < end:
                texts, number = prompts(2, seed=number), number + 100
                load = (one(client, texts, number + i) for i in range(16))
                await asyncio.gather(*load)
                if draw.random() < 0.2:
                    await client.post("/flush_cache")

    began = server.log_size()
    asyncio.run(clients(time.monotonic() + SECONDS))
    wait_until_idle(server)
    solved = generate(server, prompts(1, seed=55)[0], 700, sampling_params={**SAMPLED, "n": 4})
    seen, log = report(server), server.log_text(began)
    retracted = log.count("Retract requests")
    print(done, {"retracted": retracted}, seen["totals"])
    assert len(solved) == 4 and retracted and set(done) == {"end", "abort", "leave"}
    assert seen["disabled"] is None and seen["totals"]["blocks_shared_across"] > 0
    for entry in seen["recent"]:
        kind, *rest = entry["rid"].split("-")
        for *_, source in entry["blocks_across"] if rest else ():
            # Only those that were asked for one sample have a name of ours.
            assert kind != "out" and source.split("-")[0] in (kind, source)


def _batch(servers: ServerPool, spec: specs.ServerSpec, *more: dict[str, Any]) -> list[list[Any]]:
    """Tokens with log-probabilities of samples of one prompt, which arrive together: four, and one
    with each of ``more`` sampling parameters."""
    server = servers.get(spec)
    common = {**SAMPLED, "max_new_tokens": 500, "ignore_eos": True}
    sampling = [{**common, **one} for one in (*[{}] * 4, *more)]
    body = {"text": prompts(1, seed=53) * len(sampling), "return_logprob": True}
    response = server.post("/generate", json={**body, "sampling_params": sampling})
    response.raise_for_status()
    wait_until_idle(server)
    return [sample["meta_info"]["output_token_logprobs"] for sample in response.json()]


def _across(servers: ServerPool, spec: specs.ServerSpec) -> int:
    return int(report(servers.get(spec))["totals"]["blocks_shared_across"])


@pytest.mark.parametrize(("spec", "copy"), [(specs.SIBLINGS_AS_CACHED, specs.SIBLINGS_COPY)])
def test_reading_a_sibling_equals_copying_from_it(
    servers: ServerPool, spec: specs.ServerSpec, copy: specs.ServerSpec
) -> None:
    """Bit for bit."""
    shared = _batch(servers, spec)
    assert _across(servers, spec) > 12 and len({str(sample) for sample in shared}) == 4
    copied = _batch(servers, copy)
    assert _across(servers, copy) > 12
    assert shared == copied


@pytest.mark.parametrize(("spec", "stock"), [(specs.SIBLINGS_BATCHED, specs.STOCK_BATCHED)])
def test_an_opted_out_sample_is_stocks_beside_those_that_read_each_other(
    servers: ServerPool, spec: specs.ServerSpec, stock: specs.ServerSpec
) -> None:
    """Bit for bit: both servers compute batches of the same size."""
    ours = _batch(servers, spec, {**OPT_OUT, "temperature": 0})[-1]
    assert _across(servers, spec) > 12 and len(ours) == 500
    assert ours == _batch(servers, stock, {"temperature": 0})[-1]

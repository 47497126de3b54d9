# SPDX-License-Identifier: Apache-2.0
"""Tests the decode server of a PD pair, whose prompts stock SGLang prefills in another server. The KV of
prompts goes from one to the other in files (``handing_over``). The two servers run at the same time."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eval.router import Router, of_pair
from eval.serving import ServerProcess
from tests.server import specs
from tests.server.handing_over.handing_over_reasoncache import FAILING, FOLDER
from tests.server.harness import ServerPool, assert_whole, generate
from tests.server.problems import OPT_OUT, TO_THE_END, letters, prompts, report, reports, told
from tests.server.reference import Beside, Loop, apart_from_dense, assert_computed, replays_of

_rooms = itertools.count(1)
#: Prefill servers of decode servers that need another one than ``PREFILLS``.
_PREFILLS = {
    specs.DECODES_ON_TWO_RANKS: specs.PREFILLS_ON_TWO_RANKS,
    specs.DECODES_PAGES: specs.PREFILLS_PAGES,
    specs.MTP_DECODES: specs.MTP_PREFILLS,
    specs.MTP_PAGES_DECODES: specs.MTP_PAGES_PREFILLS,
    specs.STATES_DECODES: specs.STATES_PREFILLS,
    specs.LAYERS_DECODES: specs.LAYERS_PREFILLS,
    specs.GROUPS_DECODES: specs.GROUPS_PREFILLS,
    specs.WINDOWS_DECODES: specs.WINDOWS_PREFILLS,
    specs.WINDOWS_PAGES_DECODES: specs.WINDOWS_PAGES_PREFILLS,
    specs.MTP_GROUPS_DECODES: specs.MTP_PREFILLS,
    specs.MOONCAKE_DECODES: specs.MOONCAKE_PREFILLS,
    specs.MOONCAKE_DECODES_CACHED: specs.MOONCAKE_PREFILLS,
}


class Pair:
    """A prefill server and a decode server."""

    def __init__(self, servers: ServerPool, folder: Path, decodes: specs.ServerSpec) -> None:
        env = {FOLDER: str(folder)}
        prefills = _PREFILLS.get(decodes, specs.PREFILLS)
        self.prefill = servers.get(prefills.having("pair", **env))
        self.decode = servers.get(decodes.having("pair", **env))

    def respond(self, todo: list[str], most: int, **options: Any) -> list[dict[str, Any]]:
        """What :func:`told` returns for responses of the decode server. All prompts are sent at once."""
        rooms = list(itertools.islice(_rooms, len(todo)))
        with ThreadPoolExecutor(len(todo)) as pool:
            for server in (self.prefill, self.decode):
                one = functools.partial(ask, server, most=most, **options)
                bodies = [*pool.map(one, todo, rooms)]
        return told(self.decode, bodies)


def ask(server: ServerProcess, text: str, room: int, most: int, **options: Any) -> Any:
    """What a router sends to both servers of a pair."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": specs.BOOTSTRAP_PORT}
    options |= {**where, "bootstrap_room": room}
    return generate(server, text, most, return_logprob=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("handed-over")


@pytest.fixture(scope="module")
def harness(model_path: Path) -> Any:
    """Computes a response's log-probabilities, dense and with its blocks shared."""
    return replays_of(model_path)


@pytest.mark.parametrize(
    "spec",
    [specs.DECODES_SHORT, specs.DECODES, specs.DECODES_CACHED, specs.DECODES_ON_TWO_RANKS],
)
def test_what_a_decode_server_shares_is_what_the_harness_computes(
    servers: ServerPool, folder: Path, harness: Any, spec: specs.ServerSpec
) -> None:
    """Also after SGLang copied a request that shares to the host and back. A transfer that fails takes its own
    request only. A request that opts out reads exact KV."""
    pair = Pair(servers, folder, spec)
    log = pair.decode.log_size()
    todo = prompts(8, seed=5)
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(ask, pair.decode, todo[0], FAILING, 32)
        responses = pair.respond(todo, 700)
    with pytest.raises(AssertionError, match="the transfer failed"):
        failing.result()
    assert any(found["retractions"] for found in responses if found["blocks"])
    blocks = 0
    for text, found in zip(todo, responses, strict=True):
        if found["blocks"]:
            assert_computed(found, harness(text, found))
            blocks += len(found["blocks"])
    assert blocks > 16
    for text, found in zip(
        todo[:2], pair.respond(todo[:2], 300, sampling_params=OPT_OUT), strict=True
    ):
        dense = harness(text, found)[0]
        assert float((dense - torch.tensor(found["logprobs"])).abs().max()) < 1e-4
    totals = report(pair.decode)["totals"]
    assert totals["blocks_missed"] == 0
    assert (
        (totals["requests_swapped"] > 0)
        == (totals["tokens_swapped_back"] > 0)
        == ("--hicache-ratio" in spec.flags)
    )
    assert 'engine_type="decode"' in pair.decode.get("/metrics").text
    assert_whole(pair.decode, log)


@pytest.mark.parametrize(
    "spec",
    [
        *(
            specs.WINDOWS_DECODES,
            specs.WINDOWS_PAGES_DECODES,
            specs.DECODES_PAGES,
            specs.MTP_DECODES,
            specs.MTP_PAGES_DECODES,
            specs.STATES_DECODES,
            specs.LAYERS_DECODES,
        ),
        pytest.param(specs.GROUPS_DECODES, marks=specs.FEW_CORES),
        pytest.param(specs.MTP_GROUPS_DECODES, marks=specs.FEW_CORES),
    ],
)
def test_decode_servers_of_other_models_share(
    servers: ServerPool, folder: Path, spec: specs.ServerSpec
) -> None:
    """They have pages, speculate, or run groups of DP attention. Prompts' KV, a draft layer's too, comes from
    the prefill server. So do a hybrid model's states."""
    pair = Pair(servers, folder, spec)
    loop = Loop(servers.model(spec.model), spec.model)
    todo = letters(9)
    responses = pair.respond(todo, 400, **TO_THE_END)
    few = (
        *(specs.DECODES_PAGES, specs.WINDOWS_PAGES_DECODES),
        *(specs.MTP_PAGES_DECODES, specs.GROUPS_DECODES),
    )
    least = 30 if spec in few else 100
    retracts = "SGLANG_TEST_RETRACT" in dict(spec.env)
    speculates = any("--speculative" in word for word in spec.flags)
    seen = [one["totals"] for one in reports(pair.decode)]
    assert all(totals["blocks_shared"] > 0 == totals["blocks_missed"] for totals in seen)
    assert sum(totals["blocks_shared"] for totals in seen) >= least
    assert any(found["retractions"] and found["blocks"] for found in responses) == retracts
    for totals in seen if speculates else ():
        # Requests that come back run on after the others.
        assert totals["decode_steps"] < (0.9 if retracts else 0.7) * 400, "drafts are accepted"
    beside = Beside(loop, pair.decode)
    for text, found in zip(todo, responses, strict=True):
        beside.add(text, found)
    beside.check("nothing shared", "keys rotated otherwise")
    assert_whole(pair.decode)


def routing(pair: Pair, log: Path) -> Router:
    """SGLang's router in front of a pair."""
    return Router(of_pair(pair.prefill.url, str(specs.BOOTSTRAP_PORT), pair.decode.url), log)


@pytest.mark.parametrize("spec", [specs.MOONCAKE_DECODES, specs.MOONCAKE_DECODES_CACHED])
def test_a_router_and_transfers_of_mooncake_meet_shared_slots(
    servers: ServerPool, folder: Path, harness: Any, spec: specs.ServerSpec
) -> None:
    """SGLang's router sends each request to both servers, and SGLang's own transfer engine moves the KV over
    loopback: its threads write slots of the decode server while other requests decode, share and are retracted
    there."""
    for package in ("mooncake.engine", "sglang_router"):
        pytest.importorskip(package, exc_type=ImportError)
    pair = Pair(servers, folder, spec)
    log = pair.decode.log_size()
    blocks = 0
    apart = []
    sampling = {"temperature": 0, "max_new_tokens": 700}
    with (
        routing(pair, folder / "router.log") as router,
        httpx.Client(base_url=router.url, timeout=600, trust_env=False) as client,
        ThreadPoolExecutor(12) as pool,
    ):

        def ask_router(text: str) -> Any:
            body = {"text": text, "sampling_params": sampling, "return_logprob": True}
            answer = client.post("/generate", json={**body, "logprob_start_len": 0})
            assert answer.status_code == 200, answer.text
            return answer.json()

        # The second round has new prompts and some of the first, which a prefix cache holds.
        for todo in (prompts(8, seed=5), prompts(4, seed=5) + prompts(8, seed=6)):
            bodies = [*pool.map(ask_router, todo)]
            for text, found in zip(todo, told(pair.decode, bodies), strict=True):
                blocks += len(found["blocks"])
                if found["blocks"]:
                    apart.append(apart_from_dense(found, harness(text, found)))
                else:
                    dense = harness(text, found)[0]
                    assert float((dense - torch.tensor(found["logprobs"])).abs().max()) < 1e-4
    assert blocks > 16 and sorted(apart)[len(apart) // 2] > 20
    assert report(pair.decode)["totals"]["blocks_missed"] == 0
    assert_whole(pair.decode, log)

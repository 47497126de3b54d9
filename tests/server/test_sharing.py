# SPDX-License-Identifier: Apache-2.0
"""Tests sharing under load, at two page sizes. Some tests run on every kind of server.

The ``server`` fixture checks after each test that every slot is free or evictable, that a flush resets the
plugin's totals and that the log has no traceback. SGLang's strict memory checks run after every batch. The
first test is light, so that a server is flushed once before other tests put it under load."""

import asyncio
import contextlib
import os
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sglang
import torch
from safetensors.torch import load_file, save_file

from eval.router import Router
from eval.serving import MODEL_NAME, ServerProcess
from sglang_reasoncache.custom_params import HEADER, ROUTED_HEADER
from sglang_reasoncache.native import NativeUnavailable, library
from sglang_reasoncache.plugin.report import GAUGES
from tests.server import specs
from tests.server.faulty.faulty_reasoncache import ARMS, SAID, VITAL
from tests.server.harness import ServerPool, assert_whole, generate, wait_until_idle
from tests.server.problems import (
    MAX_TOKENS,
    OPT_OUT,
    accuracy,
    chat_once,
    problems,
    prompts,
    report,
    respond,
    series,
    solve,
)


@pytest.mark.parametrize("server", specs.SHARING, indirect=True)
def test_follow_up_turn(server: ServerProcess) -> None:
    ask = {"role": "user", "content": problems(1, seed=8)[0].prompt}
    answer = {"role": "assistant", "content": chat_once(server, [ask]).message.content}
    again = [chat_once(server, [ask, answer, ask], max_tokens=64) for _ in range(2)]
    assert again[0].message.content == again[1].message.content


@pytest.mark.parametrize(
    ("server", "count", "blocks", "saved", "right"),
    [
        # EXACT shares only when slots run short. How much it shares depends on which requests overlap.
        (specs.EXACT, 24, 24, 0.03, 0.8),
        pytest.param(specs.ACROSS, 16, 16, 0.1, 0.8, marks=pytest.mark.long),
        (specs.FP8, 16, 16, 0.1, 0.8),
        # PAGED shares only when slots run short, too.
        (specs.PAGED, 24, 12, 0.0, 0.8),
        # MEMSHARE shares blocks whose tokens differ, so answers are not checked.
        (specs.MEMSHARE, 12, 0, 0.0, 0.0),
    ],
    indirect=["server"],
)
def test_shares_and_keeps_answers(
    server: ServerProcess, count: int, blocks: int, saved: float, right: float
) -> None:
    """Answers stay right. When a retracted request has been computed again, its blocks share again."""
    todo = problems(count)
    answers = solve(server, todo)
    seen = report(server)
    if "SGLANG_TEST_RETRACT" in server.env:
        assert any(entry["retractions"] for entry in seen["recent"])
        assert seen["totals"]["blocks_reapplied"] > 0
    assert seen["block"] == seen["config"]["block"]
    assert seen["totals"]["blocks_shared"] > blocks
    assert seen["totals"]["blocks_missed"] == 0
    assert seen["totals"]["final_saving_ratio"] > saved
    assert accuracy(todo, answers) >= right


@pytest.mark.parametrize("server", [specs.UNCACHED], indirect=True)
def test_without_a_prefix_cache(server: ServerProcess) -> None:
    """Blocks share, retracted requests come back from the host, and nothing stays behind."""
    log = server.log_size()
    todo = problems(16)
    assert accuracy(todo, solve(server, todo)) >= 0.8
    wait_until_idle(server)
    totals = report(server)["totals"]
    assert totals["blocks_shared"] > 8 and totals["blocks_missed"] == 0
    assert totals["requests_swapped"] > 0 and totals["tokens_swapped_back"] > 0
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_what_an_operator_can_see(server: ServerProcess) -> None:
    """Prometheus, the endpoints and the decode log line show what was shared."""
    start = server.log_size()
    before = series(server)
    totals_before = report(server)["totals"]
    solve(server, problems(12, seed=12))
    wait_until_idle(server)
    after = series(server)
    seen = report(server)
    totals = seen["totals"]
    for field in ("blocks_shared", "blocks_compared", "steps_seen", "steps_with_candidate"):
        grown = after[f"{field}_total"] - before.get(f"{field}_total", 0.0)
        # The series may lack the counts of the last steps, which are not published yet.
        assert 0 < grown <= totals[field] - totals_before[field]
    assert after["poll_seconds_count"] > 0
    assert 0 < after["memory_saving_ratio"] < 1
    assert "slots_saved_now" in after and "slots_shareable_now" in after
    assert totals["shortages"] > 0 == totals["blocks_missed"] == seen["slots_shareable_now"]
    assert seen["config"]["block"] == seen["block"] == 8
    assert seen["config"]["positions"] == "corrected"
    assert seen["threshold"]["warm"]
    assert totals["filter_seconds"] > 0
    assert totals["steps_shed"] == totals["filter_restarts"] == totals["filter_given_up"] == 0
    assert 0 < totals["affected_ratio"] < 1
    entry = max(seen["recent"], key=lambda request: request["shared_positions"])
    assert entry["shared_positions"] == 8 * len(entry["blocks"])
    # Of equal blocks, the older one reads the slots of the newest.
    assert all(dst + length <= src for _, dst, src, length in entry["blocks"])
    answer = server.get("/reasoncache").json()
    [short] = answer["schedulers"]
    assert f"sglang {sglang.__version__}" in answer["build"]
    [state] = server.get("/server_info").json()["internal_states"]
    for told in (short, state["reasoncache"]):
        assert told.keys() == seen.keys() - {"recent"}
        assert told["totals"]["blocks_shared"] == totals["blocks_shared"]
    assert "#shared token: " in server.log_text(start)


@pytest.mark.parametrize("server", specs.EVERY_KIND, indirect=True)
def test_aborted_and_disconnected_requests_give_everything_back(server: ServerProcess) -> None:
    async def vanish(client: httpx.AsyncClient, number: int, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        rid = f"vanish-{number}"
        body = dict(model=MODEL_NAME, messages=messages, max_tokens=1200, temperature=0)
        body |= dict(stream=True, rid=rid)
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                # Each token takes two lines of the stream, one of them empty, so clients leave after
                # 100 to 213 tokens. By then blocks share, or positions are evicted.
                for _ in range(201 + 25 * number):
                    if await anext(lines, None) is None:
                        break
                if number % 2:
                    await client.post("/abort_request", json={"rid": rid})

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
            todo = problems(10, seed=7)
            await asyncio.gather(*(vanish(client, i, p.prompt) for i, p in enumerate(todo)))

    asyncio.run(run())
    wait_until_idle(server)
    seen = report(server)
    assert seen["slots_saved_now"] == seen["positions_evicted_now"] == 0


@specs.FEW_CORES
@pytest.mark.long
@pytest.mark.parametrize("spec", [specs.TWO_RANKS])
def test_a_failure_of_ours_ends_sharing_and_nothing_else(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """Both ranks share the same blocks: otherwise they would hang as they sum up KV distances over the ranks.
    When sharing then fails on one rank under load, no request fails and no slot is lost."""
    server = servers.get(spec)
    todo = problems(2, seed=13)
    start = server.log_size()
    assert report(server)["disabled"] is None
    armed = {"text": "1 + 2 =", "rid": ARMS, "sampling_params": {"max_new_tokens": 8}}
    assert server.post("/generate", json=armed).status_code == 200
    assert accuracy(todo, solve(server, todo, {"max_tokens": 800})) == 1
    shared = report(server)["totals"]["blocks_shared"]
    assert shared > 0
    solve(server, todo[:1], {"max_tokens": 100})
    seen = report(server)
    # The endpoint reports the first rank, but the last rank failed.
    assert seen["disabled"] == "another tensor-parallel rank failed"
    assert seen["totals"]["blocks_shared"] == shared
    assert series(server)["disabled"] >= 1
    log = server.log_text(start)
    assert log.count("Traceback (most recent call last)") == 1
    assert log.count(SAID) == VITAL
    assert_whole(server, server.log_size())


@pytest.mark.parametrize("server", [specs.UNCORRECTED], indirect=True)
def test_nothing_is_shared_where_keys_cannot_be_corrected(server: ServerProcess) -> None:
    """The metric ``uncorrected``, for which there is an alert, is set before the first request."""
    assert series(server)["uncorrected"] == 1 and series(server).keys() >= GAUGES.keys()
    todo = problems(4, seed=3)
    assert accuracy(todo, solve(server, todo)) == 1
    seen = report(server)
    assert "needs one attention backend for prefill and decode" in seen["uncorrected"]
    assert (seen["disabled"], seen["totals"]["blocks_shared"]) == (None, 0)


@pytest.mark.parametrize(
    "server", [specs.EXACT, specs.ACROSS, specs.SHARING_AND_EVICTING], indirect=True
)
def test_opted_out_request_keeps_its_row(server: ServerProcess) -> None:
    """The field ``custom_params`` switches sharing and evicting off for one request."""
    before = report(server)["totals"]
    solve(server, problems(4, seed=10), OPT_OUT)
    after = report(server)["totals"]
    assert after["requests_opted_out"] == before["requests_opted_out"] + 4
    for total in ("blocks_compared", "positions_evicted"):
        assert after[total] == before[total]
    body = {"text": "one", "sampling_params": {"custom_params": {"reasoncache": "maybe"}}}
    refused = server.post("/generate", json=body)
    assert refused.status_code == 400 and "got 'maybe'" in refused.text


def _short() -> dict[str, dict[str, Any]]:
    """A short request for each of SGLang's APIs."""
    talk = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "1 + 2 ="}],
        "max_tokens": 8,
    }
    ollama = {"model": MODEL_NAME, "options": {"num_predict": 8}}
    return {
        "/v1/chat/completions": talk,
        "/v1/completions": {"model": MODEL_NAME, "prompt": ["1 +", "2 +"], "max_tokens": 8},
        "/generate": {"text": "1 + 2 =", "sampling_params": {"max_new_tokens": 8}},
        "/v1/responses": {"model": MODEL_NAME, "input": "1 + 2 =", "max_output_tokens": 8},
        "/v1/messages": talk,
        "/api/chat": {**ollama, "messages": talk["messages"]},
        "/api/generate": {**ollama, "prompt": "1 + 2 ="},
    }


def _opted_out(server: ServerProcess) -> int:
    wait_until_idle(server)
    found: int = report(server)["totals"]["requests_opted_out"]
    return found


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_a_header_opts_out_in_every_api(server: ServerProcess) -> None:
    """Also where requests have no ``custom_params``, streaming or not. The next request on the same connection
    shares. A wrong value is refused in the form of the API, before a stream begins."""
    for path, body in _short().items():
        for stream in (False, True):
            asked = {**body, "stream": stream}
            before = _opted_out(server)
            for headers in ({HEADER: "false"}, {HEADER: "true"}, {}):
                answer = server.post(path, json=asked, headers=headers)
                assert answer.status_code == 200 and answer.text, answer.text
            assert _opted_out(server) == before + (2 if path == "/v1/completions" else 1), path
            refused = server.post(path, json=asked, headers={HEADER: "maybe"})
            told = refused.json()
            message = told.get("error", told)["message"]
            assert refused.status_code == 400 and message.endswith("true or false, got 'maybe'")
            assert (told.get("type") == "error") == (path == "/v1/messages")
    before = _opted_out(server)
    for value in (True, False):
        sampling = {"custom_params": {"reasoncache": value}, "max_new_tokens": 8}
        body = {"text": "1 + 2 =", "sampling_params": sampling}
        assert server.post("/generate", json=body, headers={HEADER: "0"}).status_code == 200
    assert _opted_out(server) == before + 1
    told = server.post("/generate", json={"text": "1"}, headers={HEADER: '{"record": 1}'}).json()
    assert told["meta_info"]["reasoncache"]["blocks"] == []


@pytest.mark.long
@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_a_router_hands_the_header_on(server: ServerProcess, tmp_path: Path) -> None:
    """SGLang's router drops headers that it does not know and, of chat and ``/generate``, ``custom_params``."""
    pytest.importorskip("sglang_router", exc_type=ImportError)
    with (
        Router(("--worker-urls", server.url), tmp_path / "router.log") as router,
        httpx.Client(base_url=router.url, timeout=60, trust_env=False) as client,
    ):
        for path in ("/v1/chat/completions", "/generate", "/v1/responses"):
            before = _opted_out(server)
            # Without ``stream`` the router sends null to the Responses API, which SGLang refuses.
            asked = {**_short()[path], "stream": False}
            answer = client.post(path, json=asked, headers={ROUTED_HEADER: "false"})
            assert answer.status_code == 200, answer.text
            assert _opted_out(server) == before + 1


THINK = "<think>"
END_OF_THINKING = "</think>"


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_blocks_end_before_the_reasoning_does(server: ServerProcess) -> None:
    blocks = 0
    whole = {"skip_special_tokens": False}
    for found in respond(server, prompts(4, seed=31), MAX_TOKENS, sampling_params=whole):
        reasoning, end, _answer = found["text"].partition(END_OF_THINKING)
        assert end, "the embedded model closes its reasoning"
        # ``reasoning`` has the same tokens alone as in the whole text, because each word is one token.
        tokens = server.post("/tokenize", json={"prompt": reasoning}).json()["count"]
        last = max((dst + length for _, dst, _, length in found["blocks"]), default=0)
        assert last <= found["prompt_tokens"] + tokens
        blocks += len(found["blocks"])
    assert blocks > 0
    seen = report(server)
    assert seen["threshold"]["observations"] > 0
    with contextlib.suppress(NativeUnavailable):
        library()
        assert seen["distances"] == "native"


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_a_response_without_reasoning_shares_nothing(server: ServerProcess) -> None:
    """The prompt opens and closes the reasoning, as chat templates do if a client wants no reasoning."""
    # The bias forbids the marker that would open the reasoning again.
    sampling = {"skip_special_tokens": False, "logit_bias": {"4": -100.0}}
    todo = [f"{prompt} {THINK} {END_OF_THINKING}" for prompt in prompts(2, seed=31)]
    for found in respond(server, todo, MAX_TOKENS, sampling_params=sampling):
        assert THINK not in found["text"] and found["text"].count("\n\n") > 4
        assert found["blocks"] == []


SAMPLED = {"temperature": 0.8}


@pytest.mark.parametrize("server", [specs.ACROSS], indirect=True)
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
    seen = report(server)
    after = series(server)
    totals = seen["totals"]
    assert totals["slots_saved_across_total"] > 100 and totals["blocks_shared_across"] > 12
    assert 0 < totals["across_ratio"] < 1 and seen["slots_saved_across_now"] == 0
    name = "slots_saved_across_total"
    assert 0 < after[name] - before.get(name, 0.0) <= totals[name]
    assert after["slots_saved_across_now"] == 0


@pytest.mark.parametrize("server", [specs.ACROSS], indirect=True)
def test_nobody_reads_what_another_salt_or_an_opted_out_request_wrote(
    server: ServerProcess,
) -> None:
    """Requests of four kinds have the same prompt and, because decoding is greedy, the same response."""
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
            assert entry["sources"][source].partition("-")[0] == kind
    # Which requests run together depends on free slots, so only the sum over kinds is checked.
    assert across["out"] == 0 and sum(across.values()) > 0


SECONDS = float(os.environ.get("REASONCACHE_SOAK_SECONDS", "60"))
SAMPLES = 4


@pytest.mark.parametrize("server", [specs.SWINGING], indirect=True)
def test_only_a_server_that_is_short_shares(server: ServerProcess) -> None:
    choose = random.Random(1)
    end = time.monotonic() + SECONDS
    wave = 0
    right = asked = shared = 0
    while time.monotonic() < end or not shared or wave < 4:
        wave += 1
        before = report(server)["totals"]["blocks_shared"]
        few = wave % 2 == 1
        todo = problems(choose.randint(1, 2) if few else choose.randint(24, 48), seed=100 + wave)
        if wave % 4 == 0:
            todo = [problem for problem in todo[::SAMPLES] for _ in range(SAMPLES)]
        right += round(accuracy(todo, solve(server, todo)) * len(todo))
        asked += len(todo)
        wait_until_idle(server)
        seen = report(server)
        now = seen["totals"]["blocks_shared"] - before
        shared += now
        assert seen["disabled"] is None and seen["totals"]["blocks_missed"] == 0
        assert not (few and now), "SGLang had enough slots"
    assert right >= 0.97 * asked
    print(f"{wave} waves, {asked} responses, {right} right, {shared} blocks shared")
    assert_whole(server)


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_a_pause_keeps_no_kv_of_what_it_retracts(server: ServerProcess) -> None:
    """While SGLang is paused the weights may change, so what it retracted is computed again, not loaded."""
    [text] = prompts(1, seed=61)
    start = server.log_size()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generate, server, text, 600)
        # SGLang logs every 40th decode step.
        while server.log_text(start).count("Decode batch") < 2:
            assert not asked.done()
            time.sleep(0.1)
        server.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        server.post("/continue_generation", json={}).raise_for_status()
        found = asked.result()
    assert found["text"] == generate(server, text, 600)["text"]
    computed = [int(n) for n in re.findall(r"#new-token: (\d+)", server.log_text(start))]
    assert max(computed) > 48, "more than the prompt was computed again"


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_nothing_of_older_weights_is_read(
    server: ServerProcess, model_path: Path, tmp_path: Path, mode: str
) -> None:
    """As trainers do, pause a server that is short of slots, update its weights, and go on. What was asked then
    is answered as after a fresh start, and nothing is held."""
    todo = prompts(6, seed=62)
    changed = changed_weights(model_path, tmp_path / "changed")

    def load(path: Path, flush: bool) -> None:
        body = {"model_path": str(path), "flush_cache": flush}
        answer = server.post("/update_weights_from_disk", json=body)
        assert answer.json()["success"], answer.text

    def texts() -> list[str]:
        return [generate(server, text, 80)["text"] for text in todo]

    before = texts()
    start = server.log_size()
    with ThreadPoolExecutor(len(todo)) as pool:
        asked = [pool.submit(generate, server, text, 600) for text in todo]
        while server.log_text(start).count("Decode batch") < 6:
            assert not all(each.done() for each in asked)
            time.sleep(0.1)
        server.post("/pause_generation", json={"mode": mode}).raise_for_status()
        # SGLang flushes no cache that running requests read.
        load(changed, flush=mode == "retract")
        server.post("/continue_generation", json={}).raise_for_status()
        assert all(each.result()["text"] for each in asked)
    wait_until_idle(server)
    try:
        if mode == "in_place":
            load(changed, flush=True)
        after = texts()
        assert_whole(server, start)
        assert texts() == after != before
    finally:
        load(model_path, flush=True)
    assert texts() == before


def changed_weights(model: Path, target: Path) -> Path:
    """A copy of a model's folder with other weights."""
    shutil.copytree(model, target)
    file = target / "model.safetensors"
    weights = load_file(file)
    drawn = torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        if weight.dim() == 2:
            noise = torch.randn(weight.shape, generator=drawn)
            weights[name] = weight + 0.4 * weight.std() * noise.to(weight.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_what_a_pause_aborts_has_its_record(server: ServerProcess) -> None:
    """Launchers of rollouts pause, abort everything, and later go on with what was said so far."""
    todo = prompts(3, seed=63)
    start = server.log_size()
    custom = {"custom_params": {"reasoncache": {"record": True}}}
    with ThreadPoolExecutor(len(todo)) as pool:
        asked = [pool.submit(generate, server, t, 600, sampling_params=custom) for t in todo]
        while server.log_text(start).count("Decode batch") < 8:
            assert not any(each.done() for each in asked)
            time.sleep(0.1)
        server.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        server.post("/abort_request", json={"abort_all": True}).raise_for_status()
        found = [each.result()["meta_info"] for each in asked]
        server.post("/continue_generation", json={}).raise_for_status()
    assert {meta["finish_reason"]["type"] for meta in found} == {"abort"}
    assert all(set(meta["finish_reason"]) <= {"type", "message"} for meta in found)
    records = [meta["reasoncache"] for meta in found]
    assert any(record["blocks"] for record in records)
    for record, meta in zip(records, found, strict=True):
        # SGLang does not say how many tokens the prompt has: some fifty. Its main process gets tokens of a
        # response that is not streamed fifty at a time, and the last ones not at all.
        end = 60 + meta["completion_tokens"] + 50
        assert all(written <= end for written, *_ in record["blocks"])

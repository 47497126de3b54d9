# SPDX-License-Identifier: Apache-2.0
"""Tests models whose attention differs from the embedded reasoner's: hybrids (only attention layers share),
latent attention, layers with a sliding window. For hybrids the prefix cache also keeps the states of the other
layers; a wrong state would change the log-probabilities after a cached prefix."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server import specs
from tests.server.harness import ServerPool, ServerProcess, assert_whole, wait_until_idle
from tests.server.problems import OPT_OUT, follow_up, letters, report, together, told
from tests.server.reference import ROUNDING, Beside, Compared, Loop, joined

TRIED = ("qwen3_5_text", "deepseek_v3", "gemma3_text", "mellum", "gpt_oss")
OTHERS = ("qwen3_next", "lfm2", "nemotron_h", "deepseek_v2", "olmo3")
#: Layers without positions, windows of SGLang's own reading, gates, LongRoPE, keys wider than values.
FURTHER = ("afmoe", "cohere2", "cohere2_moe", "exaone_moe", "laguna", "mimo_v2_flash", "phi3")
WITH_STATES = ("granitemoehybrid", "falcon_h1", "kimi_linear")
AT_ONCE = [specs.at_once(name) for name in TRIED[:2]]
AT_ONCE += [specs.at_once(name).for_long_runs() for name in TRIED[2:]]
SHORT = [specs.short(TRIED[0])]
SHORT += [specs.short(name).for_long_runs() for name in TRIED[1:]]
AT_ONCE += [specs.at_once(name).for_long_runs() for name in OTHERS + FURTHER + WITH_STATES]
SHORT += [specs.short(name).for_long_runs() for name in WITH_STATES]
SHORT += [specs.STATES_MTP_SHORT, specs.STATES_PAGES_SHORT, *specs.WINDOWS_SPECULATING_SHORT]
SHORT += [specs.WINDOW_PAGES_SHORT, specs.WINDOWS_OVERLAPPED]
#: A server with room for all requests, and a server short of slots.
ON_TWO_RANKS = [
    pytest.param(specs.on_two_ranks(make("deepseek_v3")), marks=specs.FEW_CORES)
    for make in (specs.at_once, specs.short)
]


@pytest.mark.parametrize("spec", [*AT_ONCE, ON_TWO_RANKS[0]])
def test_a_server_computes_what_a_loop_computes(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """Log-probabilities are those of a :class:`Loop` that redirects the same blocks, and not those of a Loop
    that rotates no keys or redirects nothing."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    responses = together(server, letters(10), 400)
    seen = report(server)
    rotation = loop.rotation()
    assert seen["uncorrected"] is None
    assert seen["config"]["positions"] == ("as-cached" if rotation is None else "corrected")
    blocks = sum(len(found["blocks"]) for found in responses)
    assert blocks == seen["totals"]["blocks_shared"] >= 200
    beside = Beside(loop, server)
    stateless = spec.model in {**specs.LATENT, **specs.WINDOWS, **specs.PLAIN}
    again: list[Compared] = []
    continued: list[Compared] = []
    for text, found in zip(letters(10), responses, strict=True):
        assert found["retractions"] == 0 < len(found["blocks"])
        beside.add(text, found)
        # The prefix cache holds the response, and gives those who opt out what is before the first shared
        # position. If the model has states or a pool for window layers, these get only the prompt, with the
        # state or window at its end. The others go on with the state or window behind the response.
        whole = loop.tokenizer(text)["input_ids"] + found["tokens"]
        follow = follow_up(server, whole, opts_out=False)
        assert follow["cached"] == len(whole) - 1
        continued.append(beside.continued(whole, found, follow))
        follow = follow_up(server, whole)
        first = min(dst for _, dst, *_ in found["blocks"])
        assert follow["cached"] == (first if stateless else found["prompt_tokens"])
        again.append(loop.compare(whole, follow))
    whole += follow["tokens"]
    follow = follow_up(server, whole)
    # The last follow-up read exact KV and shared nothing, so the cache holds all its computed positions and its
    # last state.
    assert follow["cached"] == len(whole) - 1
    again.append(loop.compare(whole, follow))
    most = 5e-3 if spec.model == "nemotron_h" else ROUNDING  # the same without shared blocks
    others = (
        ["nothing shared"] if rotation is None else ["nothing shared", "keys rotated otherwise"]
    )
    beside.check(*others, most=most)
    assert joined(again).off.max() < most
    assert joined(continued).off.max() < most
    assert_whole(server)


@pytest.mark.parametrize("spec", [*SHORT, ON_TWO_RANKS[1]])
def test_a_server_short_of_slots_loses_nothing(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """While some requests share, others are retracted or aborted, or have opted out. Requests that opted out
    have the log-probabilities of a :class:`Loop` that redirects nothing."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    log = server.log_size()

    def ask(job: tuple[int, str]) -> Any:
        number, text = job
        rid = f"short-{number}"
        how = ("end", "end", "abort", "opt out")[number % 4]
        sampling = {"ignore_eos": True, **(OPT_OUT if how == "opt out" else {})}
        body = {"text": text, "rid": rid, "return_logprob": True}
        sampling |= {"temperature": 0, "max_new_tokens": 800 if how == "abort" else 400}
        aborted = threading.Timer(2.0, server.post, ("/abort_request",), {"json": {"rid": rid}})
        if how == "abort":
            aborted.start()
        return server.post("/generate", json={**body, "sampling_params": sampling}).json()

    todo = list(enumerate(letters(20 if spec.model in specs.STATELESS else 12)))
    with ThreadPoolExecutor(len(todo)) as pool:
        bodies = list(pool.map(ask, todo))
    wait_until_idle(server)
    seen = report(server)
    totals = seen["totals"]
    assert totals["blocks_shared"] > 8 and totals["shortages"] > 0 == totals["blocks_missed"]
    assert totals["requests_opted_out"] == len(todo) // 4
    assert "#retracted_reqs" in server.log_text(log)
    for number, text in todo[3::4]:
        [found] = told(server, [bodies[number]])
        ids = loop.tokenizer(text)["input_ids"]
        assert loop.compare(ids, found).off.max() < ROUNDING
    # With pages, a state comes back only if SGLang copies states where pages end.
    states_return = spec.model not in specs.STATELESS and spec != specs.STATES_PAGES_SHORT
    if states_return or spec.model in specs.WINDOW_POOL:
        comes_back(server, [text for _, text in todo], [body["text"] for body in bodies])
    assert_whole(server, log)


def comes_back(server: ServerProcess, texts: list[str], expected: list[str]) -> None:
    """Retracted requests get their KV and state or window back from the host, and the response that they had,
    if it was exact. SGLang computes those again that ask for log-probabilities."""
    before = report(server)["totals"]
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, **OPT_OUT}

    def ask(text: str) -> Any:
        return server.post("/generate", json={"text": text, "sampling_params": sampling}).json()

    with ThreadPoolExecutor(len(texts)) as pool:
        bodies = list(pool.map(ask, texts))
    wait_until_idle(server)
    assert [body["text"] for body in bodies[3::4]] == expected[3::4]
    after = report(server)["totals"]
    assert after["tokens_swapped_back"] - before["tokens_swapped_back"] > 100

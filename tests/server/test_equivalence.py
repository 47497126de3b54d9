# SPDX-License-Identifier: Apache-2.0
"""Compares answers of reasoncache servers with those of stock SGLang, on the plugin's CPU platform. Compares
log-probabilities of responses that shared slots with those of the fidelity harness (``eval/fidelity``), which
copies KV instead. One test needs the language model that ``make small-model`` writes."""

import functools
import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.cache import Reader
from eval.serving import ServerProcess
from eval.small_reasoner import MODEL
from eval.small_reasoner.task import make_problem
from eval.tasks.grading import last_boxed
from eval.tiny_reasoner.task import generate
from sglang_reasoncache.compat import CPU_BACKEND
from tests.server import specs
from tests.server.harness import STRICT_CHECKS, ServerPool, assert_whole
from tests.server.problems import (
    COMPARED,
    OPT_OUT,
    Answers,
    answers,
    follow_up,
    prompts,
    report,
    respond,
    solve,
)
from tests.server.reference import (
    Loop,
    Replayed,
    assert_computed,
    assert_within_rounding,
    replays_of,
)


@functools.cache
def _run(servers: ServerPool, spec: specs.ServerSpec) -> Answers:
    """A server's cached answers. Those of stock SGLang never change; each other server is asked only once."""
    server = servers.get(spec)
    server.post("/flush_cache")
    return answers(server)


def _assert_same_answers(one: Answers, other: Answers) -> None:
    """Checks that answers of two servers are right, and equal except for rounding. If two tokens are equally
    likely, rounding decides between them. After the first such difference only final answers are compared."""
    for problem, (tokens, logprobs), (other_tokens, other_logprobs) in zip(
        COMPARED, one, other, strict=True
    ):
        two = zip(tokens, other_tokens, strict=False)
        compared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], two)) + 1
        assert logprobs[:compared] == pytest.approx(other_logprobs[:compared], abs=0.05)
        assert {last_boxed("".join(one)) for one in (tokens, other_tokens)} == {problem.answer}


@pytest.mark.parametrize("spec", [specs.EXACT])
def test_a_server_with_room_answers_as_stock(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Answers are equal bit for bit. Nothing shares, because one request never fills half of the pool."""
    assert _run(servers, spec) == _run(servers, specs.STOCK)
    assert servers.get(specs.STOCK).get("/server_info").json()["attention_backend"] == CPU_BACKEND
    totals = report(servers.get(spec))["totals"]
    assert totals["steps_with_candidate"] > 15
    assert totals["blocks_compared"] == totals["blocks_shared"] == totals["shortages"] == 0


@pytest.mark.parametrize("spec", [specs.UNCORRECTED])
def test_our_attention_answers_as_sglangs(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """``spec`` decodes with ``torch_native``; stock SGLang with the plugin's ``reasoncache_cpu``."""
    _assert_same_answers(_run(servers, spec), _run(servers, specs.STOCK))


@pytest.mark.long
@pytest.mark.parametrize("spec", [specs.ACROSS])
def test_opted_out_request_is_stock(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Requests that opt out get the answers of stock SGLang, even after other requests have shared. Rounding
    differs, because this server prefills in chunks and computes retracted requests again."""
    server = servers.get(spec)
    solve(server, COMPARED)
    assert report(server)["totals"]["blocks_shared"] > 0
    _assert_same_answers(answers(server, **OPT_OUT), _run(servers, specs.STOCK))


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_what_shares_is_what_the_harness_computes(server: ServerProcess, model_path: Path) -> None:
    """Responses that shared have the log-probabilities that the harness computes by copying the same blocks."""
    log_probs = replays_of(model_path)
    todo = prompts(4, seed=11)
    blocks = 0
    for text, found in zip(todo, respond(server, todo), strict=True):
        if found["blocks"]:
            assert_computed(found, log_probs(text, found))
            blocks += len(found["blocks"])
    assert blocks > 12


@pytest.mark.parametrize("server", [specs.SIBLINGS], indirect=True)
def test_the_next_turn_reads_what_siblings_read(server: ServerProcess, model_path: Path) -> None:
    """Samples of one prompt read each other's slots. Each stays cached whole, and the log-probabilities of a
    next turn are those that the harness computes by copying the same blocks."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    reader = Reader(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))
    [text] = prompts(1, seed=51)
    samples = respond(server, [text] * 3, 600, sampling_params={"temperature": 0.8})
    assert sum(len(found["blocks_across"]) for found in samples) > 4
    prompt = tokenizer(text)["input_ids"]
    wholes = [prompt + found["tokens"] for found in samples]
    follows = [follow_up(server, whole, opts_out=False) for whole in wholes]
    replayed = {
        found["rid"]: Replayed(reader, whole + follow["tokens"], found, number)
        for number, (found, whole, follow) in enumerate(zip(samples, wholes, follows, strict=True))
    }
    for whole, follow, found in zip(wholes, follows, samples, strict=True):
        assert follow["cached"] == len(whole) - 1
        computed = replayed[found["rid"]].log_probs(replayed)
        assert_computed(follow, computed[:, -len(follow["tokens"]) :])


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_a_response_says_what_it_read_if_it_is_asked(server: ServerProcess) -> None:
    """Streamed or not: what a trainer needs to mask tokens or to replay the response."""
    ask = {"custom_params": {"reasoncache": {"record": True}}}
    sampling = {"max_new_tokens": 700, "temperature": 0}
    body = {"text": prompts(1, seed=11)[0], "sampling_params": {**sampling, **ask}}
    said = [server.post("/generate", json=body).json()["meta_info"]]
    url = f"{server.url}/generate"
    streamed = {**body, "stream": True}
    with httpx.stream("POST", url, json=streamed, timeout=60) as response:
        chunks = [
            json.loads(line[6:]) for line in response.iter_lines() if line[6:].startswith("{")
        ]
    assert len(chunks) > 2 and not any("reasoncache" in each["meta_info"] for each in chunks[:-1])
    said.append(chunks[-1]["meta_info"])
    recent = {entry["rid"]: entry for entry in report(server)["recent"]}
    for meta in said:
        told = meta["reasoncache"]
        seen = recent[meta["id"]]
        assert len(told["blocks"]) > 4 and told["continued"] is None
        assert {key: seen[key] for key in told if key != "continued"} == {
            key: each for key, each in told.items() if key != "continued"
        }
    unasked = server.post("/generate", json={**body, "sampling_params": sampling}).json()
    assert "reasoncache" not in unasked["meta_info"]


@pytest.mark.parametrize("spec", [specs.FP16])
def test_rounding_to_16_bits_does_not_add_up(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Shared keys are rotated and read in fp16, but log-probabilities differ from an fp32 model's hardly
    more than without sharing. ``test_cuda.py`` makes the same comparison on a GPU."""
    server = servers.get(spec)
    others = ("nothing shared", "keys rotated otherwise")
    loop = Loop(servers.model(spec.model))
    assert_within_rounding(server, loop, prompts(6, seed=21), *others, rounding=specs.OF_FP16)
    assert_whole(server)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = "--enable-reasoncache --reasoncache-scope prompt --reasoncache-when always"
    flags += " --dtype float32 --max-total-tokens 8000"
    log = tmp_path_factory.mktemp("real") / "server.log"
    process = ServerProcess(MODEL, flags=flags.split(), env=STRICT_CHECKS, log_path=log)
    process.start()
    yield process
    process.close()


@pytest.mark.long
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"no {MODEL}: make small-model makes it")
def test_a_language_model_computes_what_the_harness_computes(real: ServerProcess) -> None:
    """Blocks share within a response, then also across samples of one prompt."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    todo: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for problem in generate(3, 4, make=make_problem)
    ]
    reader = Reader(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    shared = 0
    for text in todo:
        found: dict[str, Any] = respond(real, [text], 1400)[0]
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        assert_computed(found, Replayed(reader, tokens, found).log_probs())
        shared += len(found["blocks"])
    assert shared > 40
    # Samples of one prompt.
    sampling = {"temperature": 1.0, "ignore_eos": True}
    samples = respond(real, todo[:1] * 4, 900, sampling_params=sampling)
    prompt = tokenizer(todo[0])["input_ids"]
    replayed = {
        found["rid"]: Replayed(reader, prompt + found["tokens"], found, number)
        for number, found in enumerate(samples)
    }
    for found in samples:
        assert_computed(found, replayed[found["rid"]].log_probs(replayed))
    assert sum(len(found["blocks_across"]) for found in samples) > 20
    assert_whole(real)

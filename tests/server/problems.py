# SPDX-License-Identifier: Apache-2.0
"""Helpers of server tests: make problems for the model ``eval/tiny_reasoner``, send requests, read reports."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eval.runs.client import Request
from eval.runs.folder import Response
from eval.serving import MODEL_NAME, ServerProcess
from eval.tasks.grading import last_boxed
from eval.tiny_reasoner.task import Problem
from eval.tiny_reasoner.task import generate as make_problems
from tests.eval.peer import ask_all
from tests.server.harness import generate, wait_until_idle

MAX_TOKENS = 1200
#: Switches sharing and evicting off for one request.
OPT_OUT: dict[str, Any] = {"custom_params": {"reasoncache": False}}
#: Makes a response as long as allowed: the model's end token does not end it.
TO_THE_END: dict[str, Any] = {"sampling_params": {"ignore_eos": True}}


def problems(count: int, seed: int = 5) -> list[Problem]:
    return make_problems(seed, count)


def prompts(count: int, seed: int, each: int = 1) -> list[str]:
    """``count`` prompts for ``/generate``. Every prompt has ``each`` problems."""
    todo = [problem.prompt for problem in problems(count * each, seed)]
    return [f"<|user|> {' '.join(todo[at::count])} <|assistant|>" for at in range(count)]


def letters(count: int, first: int = 0) -> list[str]:
    """``count`` prompts of twenty letters for the models of ``tiny_models.py``."""
    words = list("abcdefghijklmnopqrst")
    return [" ".join(words[at:] + words[:at]) for at in range(first, first + count)]


def solve(
    server: ServerProcess, todo: Sequence[Problem], extra: dict[str, Any] | None = None
) -> list[Response]:
    """Send all problems at once and wait for all answers. No request may fail."""
    body = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **(extra or {})}
    requests = [Request(str(i), problem.prompt, body) for i, problem in enumerate(todo)]
    answers = ask_all(server.url, MODEL_NAME, requests)
    assert not [answer.error for answer in answers if answer.error]
    return answers


def accuracy(todo: Sequence[Problem], answers: Sequence[Response]) -> float:
    pairs = zip(answers, todo, strict=True)
    return sum(last_boxed(answer.text) == problem.answer for answer, problem in pairs) / len(todo)


def respond(
    server: ServerProcess, todo: Sequence[str], most: int = 700, **options: Any
) -> list[dict[str, Any]]:
    """Sends all prompts at once. Returns each response's text, tokens, log-probabilities and the plugin's
    report. ``inputs``: log-probabilities of the prompt after its first token, if ``options`` ask for them."""
    with ThreadPoolExecutor(len(todo)) as pool:
        one = functools.partial(generate, server, max_new_tokens=most, return_logprob=True)
        bodies = [*pool.map(lambda text: one(text, **options), todo)]
    return told(server, bodies)


def told(server: ServerProcess, bodies: Sequence[Any]) -> list[dict[str, Any]]:
    """Converts response bodies, which must have log-probabilities, into what :func:`respond` returns."""
    wait_until_idle(server)
    recent = {entry["rid"]: entry for one in reports(server) for entry in one["recent"]}
    found = []
    # The plugin's report lists no request that opted out or ended before the plugin polled it.
    unlisted: dict[str, Any] = {
        "blocks": [],
        "blocks_across": [],
        "sources": [],
        "evictions": [],
        "retractions": 0,
    }
    for body in bodies:
        meta = body["meta_info"]
        outputs = meta["output_token_logprobs"]
        found.append(
            {
                "text": body["text"],
                "logprobs": [logprob for logprob, _, _ in outputs],
                "tokens": [token for _, token, _ in outputs],
                "inputs": [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]],
                "cached": meta["cached_tokens"],
                "cached_from": meta.get("cached_tokens_details") or {},
                "prompt_tokens": meta["prompt_tokens"],
                **unlisted,
                **recent.get(meta["id"], {}),
            }
        )
    return found


def together(server: ServerProcess, todo: list[str], most: int) -> list[dict[str, Any]]:
    """Responses of ``most`` tokens, computed in one batch from the first token to the last, if the server has
    ``--enable-tokenizer-batch-encode``. What :func:`told` returns."""
    server.post("/flush_cache")
    bodies = generate(server, todo, most, return_logprob=True, **TO_THE_END)
    return told(server, bodies)


def follow_up(
    server: ServerProcess, ids: list[int], opts_out: bool = True, most: int = 16
) -> dict[str, Any]:
    """A response of ``most`` tokens to the prompt ``ids``. If it opts out, it may read a cached prefix that is
    exact."""
    sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
    sampling |= OPT_OUT if opts_out else {}
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling}
    [found] = told(server, [server.post("/generate", json=body).json()])
    return found


def reports(server: ServerProcess) -> list[dict[str, Any]]:
    """The detailed report of each scheduler, sorted by data-parallel rank."""
    response = server.get("/reasoncache/details")
    response.raise_for_status()
    return sorted(response.json()["schedulers"], key=lambda one: one["dp_rank"])


def report(server: ServerProcess) -> dict[str, Any]:
    """The detailed report of the only scheduler."""
    [one] = reports(server)
    return one


def series(server: ServerProcess) -> dict[str, float]:
    """Maps names of the plugin's Prometheus series, without ``sglang:reasoncache_``, to sums over labels."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            ours, name = sample.name.partition("sglang:reasoncache_")[1:]
            if ours:
                out[name] = out.get(name, 0.0) + sample.value
    return out


def chat_once(server: ServerProcess, messages: list[dict[str, str]], **options: Any) -> Any:
    """Sends a greedy chat request without streaming. Returns the choice, with its tokens' log-probabilities."""
    http = openai.DefaultHttpxClient(trust_env=False)
    told: dict[str, Any] = dict(base_url=f"{server.url}/v1", api_key="unused", http_client=http)
    response = openai.OpenAI(**told, timeout=600.0, max_retries=0).chat.completions.create(
        model=MODEL_NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=options.pop("max_tokens", MAX_TOKENS),
        logprobs=True,
        **options,
    )
    return response.choices[0]


Answers = list[tuple[list[str], list[float]]]
#: Problems that :func:`answers` asks.
COMPARED = problems(3, seed=11)


def answers(server: ServerProcess, **extra: Any) -> Answers:
    """Tokens and log-probabilities of each answer. Problems are sent one by one, so none are batched."""
    found = []
    for problem in COMPARED:
        choice = chat_once(server, [{"role": "user", "content": problem.prompt}], extra_body=extra)
        entries = choice.logprobs.content
        found.append(([entry.token for entry in entries], [entry.logprob for entry in entries]))
    return found


def assert_equal_but_for_rounding(one: Answers, other: Answers) -> None:
    """Checks that tokens are equal and log-probabilities differ by at most 0.1. Rounding may differ: one server
    may read keys that were rotated and then stored in bf16, while the other may rotate queries in fp32."""
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(one, other, strict=True):
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=0.1)

# SPDX-License-Identifier: Apache-2.0
"""Requests for server tests: problems of the embedded reasoner through the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from eval.runs.client import Request, ask_all
from eval.runs.records import Response
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner.task import Problem, generate, grade
from tests.server.harness import wait_until_idle

MAX_TOKENS = 1200
#: Switches sharing off for one request.
OPT_OUT: dict[str, Any] = {"custom_params": {"reasoncache": False}}


def problems(count: int, seed: int = 5) -> list[Problem]:
    """Held-out problems, the same for the same seed."""
    return generate(seed, count)


def solve(
    server: ServerProcess, todo: Sequence[Problem], extra: dict[str, Any] | None = None
) -> list[Response]:
    """Send all problems at once and wait for all answers; none may fail."""
    body = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **(extra or {})}
    requests = [Request(str(i), problem.prompt, body) for i, problem in enumerate(todo)]
    answers = ask_all(server.url, MODEL_NAME, requests)
    assert not [answer.error for answer in answers if answer.error]
    return answers


def accuracy(todo: Sequence[Problem], answers: Sequence[Response]) -> float:
    """Share of right answers."""
    right = [grade(answer.text, problem) for answer, problem in zip(answers, todo, strict=True)]
    return sum(right) / len(right)


def report(server: ServerProcess) -> dict[str, Any]:
    """The one scheduler's entry of ``GET /reasoncache``."""
    response = server.get("/reasoncache")
    response.raise_for_status()
    return response.json()["schedulers"][0]


def series(server: ServerProcess) -> dict[str, float]:
    """Our samples by name, summed over labels."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("sglang:reasoncache_"):
                out[sample.name] = out.get(sample.name, 0.0) + sample.value
    return out


def assert_frees_slots(server: ServerProcess, seed: int) -> dict[str, Any]:
    """A queue of requests evicts positions, their slots come back, and nothing was refused.

    Returns:
        The report's totals.
    """
    before = report(server)["totals"]
    solve(server, problems(16, seed=seed))
    wait_until_idle(server)
    seen = report(server)
    totals = seen["totals"]
    assert totals["positions_evicted"] - before["positions_evicted"] > 16 * 50
    assert totals["slots_freed_by_eviction"] > 0
    assert totals["eviction_refusals"] == {}
    assert seen["positions_evicted_now"] == seen["slots_saved_now"] == 0
    return totals


def chat_once(server: ServerProcess, messages: list[dict[str, str]], **options: Any) -> Any:
    """One greedy, unstreamed chat completion with token log-probabilities."""
    return server.openai().chat.completions.create(
        model=MODEL_NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=options.pop("max_tokens", MAX_TOKENS),
        logprobs=True,
        **options,
    )


def tokens_and_logprobs(response: Any) -> tuple[list[str], list[float]]:
    """What a chat completion generated, token by token."""
    content = response.choices[0].logprobs.content
    return [entry.token for entry in content], [entry.logprob for entry in content]

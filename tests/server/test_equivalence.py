# SPDX-License-Identifier: Apache-2.0
"""What sharing computes, compared with the same thing done without sharing memory."""

from __future__ import annotations

from itertools import takewhile

import pytest

from eval.serving import ServerProcess
from eval.tiny_reasoner.task import grade
from sglang_reasoncache.compat import CPU_BACKEND
from tests.server.harness import STOCK, ServerPool, ServerSpec
from tests.server.problems import OPT_OUT, chat_once, problems, report, tokens_and_logprobs
from tests.server.specs import (
    ALIASED,
    AS_CACHED,
    AS_CACHED_COPY,
    CORRECTED,
    CORRECTED_COPY,
    NOTHING_SHARED,
    STOCK_TORCH,
)

_PROBLEMS = problems(4, seed=11)
_PROMPTS = [problem.prompt for problem in _PROBLEMS]


def _answers(server: ServerProcess, **extra: object):
    chats = ([{"role": "user", "content": prompt}] for prompt in _PROMPTS)
    return [tokens_and_logprobs(chat_once(server, chat, extra_body=extra)) for chat in chats]


def _run(servers: ServerPool, spec: ServerSpec):
    """Each prompt alone on a server: tokens and log-probabilities do not depend on a batch."""
    server = servers.get(spec)
    server.post("/flush_cache")
    return _answers(server)


def _assert_same_answers(one, other) -> None:
    """The same but for rounding, and right.

    Where two tokens are equally likely, rounding decides which is taken; only the answers
    compare from there on.
    """
    for problem, (tokens, logprobs), (other_tokens, other_logprobs) in zip(
        _PROBLEMS, one, other, strict=True
    ):
        two = zip(tokens, other_tokens, strict=False)
        compared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], two)) + 1
        assert logprobs[:compared] == pytest.approx(other_logprobs[:compared], abs=0.05)
        assert grade("".join(tokens), problem) and grade("".join(other_tokens), problem)


@pytest.mark.parametrize("spec", [NOTHING_SHARED])
def test_percentile_zero_equals_stock(servers: ServerPool, spec: ServerSpec) -> None:
    """With the flag on and nothing shared, tokens and log-probabilities are stock SGLang's, bit for bit."""
    assert _run(servers, spec) == _run(servers, STOCK)


@pytest.mark.parametrize("spec", [STOCK_TORCH])
def test_our_attention_answers_as_sglangs(servers: ServerPool, spec: ServerSpec) -> None:
    """Without our flag, through ``torch_native`` and through ``reasoncache_cpu``."""
    _assert_same_answers(_run(servers, spec), _run(servers, STOCK))
    assert servers.get(STOCK).get("/server_info").json()["attention_backend"] == CPU_BACKEND


@pytest.mark.parametrize("spec", [ALIASED])
def test_opted_out_request_is_stock(servers: ServerPool, spec: ServerSpec) -> None:
    """An opted-out request gets stock results, also where others left approximations in the cache.

    But for rounding: this server prefills in pieces and recomputes after retractions.
    """
    server = servers.get(spec)
    _answers(server)
    assert report(server)["totals"]["blocks_shared"] > 0
    _assert_same_answers(_answers(server, **OPT_OUT), _run(servers, STOCK))


@pytest.mark.parametrize(
    ("spec", "copy"), [(AS_CACHED, AS_CACHED_COPY), (CORRECTED, CORRECTED_COPY)]
)
def test_sharing_equals_copying(servers: ServerPool, spec: ServerSpec, copy: ServerSpec) -> None:
    """Redirecting a row reads what copying K and V (rotated, when corrected) into own slots reads.

    As cached both read the same values, so log-probabilities are identical.
    Corrected, one turns the query in fp32, the other reads rotated copies of
    the keys, rounded to bf16: attention changes log-probabilities by up to 0.05.
    """
    copied = _run(servers, copy)
    assert report(servers.get(copy))["totals"]["blocks_shared"] > 0
    shared = _run(servers, spec)
    assert report(servers.get(spec))["totals"]["blocks_shared"] > 0
    if spec is AS_CACHED:
        assert shared == copied
        return
    for (tokens, logprobs), (copy_tokens, copy_logprobs) in zip(shared, copied, strict=True):
        assert tokens == copy_tokens
        assert logprobs == pytest.approx(copy_logprobs, abs=0.05)

# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang on the CPU platform, the ground every comparison stands on, and what sharing
computes, compared with the same thing done without sharing memory."""

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest

from eval.serving import ServerProcess
from eval.tiny_reasoner.task import grade
from sglang_reasoncache.compat import CPU_BACKEND
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, generate
from tests.server.problems import (
    COMPARED,
    OPT_OUT,
    TO_THE_END,
    Answers,
    answers,
    assert_equal_but_for_rounding,
    report,
)

_TEXTS = ["1 + 2 =", "3 + 4 = 7 , so 7 + 5 =", "9", "a b c d e f g h i j k l m n o p q r s t"]


def _outputs(server: ServerProcess) -> list[list[int]]:
    with ThreadPoolExecutor(len(_TEXTS)) as pool:
        replies = list(pool.map(lambda text: generate(server, text, 40, **TO_THE_END), _TEXTS))
    assert all(len(reply["output_ids"]) == 40 for reply in replies)
    return [reply["output_ids"] for reply in replies]


@pytest.mark.parametrize("spec", [specs.STOCK_PAGE16])
def test_stock_serves_and_caches_prefixes(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Outputs depend neither on that nor on the page size."""
    found = []
    for each in (specs.STOCK, spec):
        server = servers.get(each)
        found += [_outputs(server), _outputs(server)]
        repeated = generate(server, _TEXTS[-1] + " u v w x y z", 1)
        assert repeated["meta_info"]["cached_tokens"] > 0
        assert_whole(server)
    assert found == found[:1] * 4


@functools.cache
def _run(servers: ServerPool, spec: specs.ServerSpec) -> Answers:
    """What stock says is the same each time, and others are asked once."""
    server = servers.get(spec)
    server.post("/flush_cache")
    return answers(server)


def _assert_same_answers(one: Answers, other: Answers) -> None:
    """The same but for rounding, and right. Where two tokens are equally likely, rounding decides
    which is taken; only the answers compare from there on."""
    for problem, (tokens, logprobs), (other_tokens, other_logprobs) in zip(
        COMPARED, one, other, strict=True
    ):
        two = zip(tokens, other_tokens, strict=False)
        compared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], two)) + 1
        assert logprobs[:compared] == pytest.approx(other_logprobs[:compared], abs=0.05)
        assert grade("".join(tokens), problem) and grade("".join(other_tokens), problem)


@pytest.mark.parametrize("spec", [specs.ROOMY])
def test_a_server_with_room_answers_as_stock(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Bit for bit, however much could be shared."""
    assert _run(servers, spec) == _run(servers, specs.STOCK)
    totals = report(servers.get(spec))["totals"]
    assert totals["steps_with_candidate"] > 20
    assert totals["blocks_compared"] == totals["blocks_shared"] == totals["shortages"] == 0


@pytest.mark.parametrize("spec", [specs.STOCK_TORCH])
def test_our_attention_answers_as_sglangs(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Without our flag, through ``torch_native`` and through ``reasoncache_cpu``."""
    _assert_same_answers(_run(servers, spec), _run(servers, specs.STOCK))
    assert servers.get(specs.STOCK).get("/server_info").json()["attention_backend"] == CPU_BACKEND


@pytest.mark.parametrize("spec", [specs.ALIASED])
def test_opted_out_request_is_stock(servers: ServerPool, spec: specs.ServerSpec) -> None:
    """Also where others left approximations in the cache; but for rounding, as this server prefills
    in pieces and recomputes after retractions."""
    server = servers.get(spec)
    answers(server)
    assert report(server)["totals"]["blocks_shared"] > 0
    _assert_same_answers(answers(server, **OPT_OUT), _run(servers, specs.STOCK))


@pytest.mark.parametrize(
    ("spec", "copy"),
    [(specs.AS_CACHED, specs.AS_CACHED_COPY), (specs.CORRECTED, specs.CORRECTED_COPY)],
)
def test_sharing_equals_copying(
    servers: ServerPool, spec: specs.ServerSpec, copy: specs.ServerSpec
) -> None:
    """Redirecting a row reads what copying K and V (rotated, when corrected) into own slots reads;
    as cached the same values, so that log-probabilities are identical."""
    copied = _run(servers, copy)
    assert report(servers.get(copy))["totals"]["blocks_shared"] > 0
    shared = _run(servers, spec)
    assert report(servers.get(spec))["totals"]["blocks_shared"] > 0
    if spec is specs.AS_CACHED:
        assert shared == copied
    assert_equal_but_for_rounding(shared, copied)

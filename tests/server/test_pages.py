# SPDX-License-Identifier: Apache-2.0
"""Tests page sizes above 1: a server whose pages share computes what a Hugging Face model computes whose
attention reads the same slots. Only whole pages share, so responses must repeat themselves at a distance of
whole pages."""

import pytest

from tests.server import specs
from tests.server.harness import ServerPool, assert_whole
from tests.server.problems import follow_up, letters, report, together
from tests.server.reference import ROUNDING, Beside, Compared, Loop, joined


@pytest.mark.parametrize(
    "spec", [specs.PAGES, specs.PAGES_OF_64, specs.PAGES_AS_CACHED, specs.LATENT_PAGES]
)
def test_shared_pages_give_what_a_loop_computes(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """Log-probabilities and tokens are those of a loop in which the same pages share, and those of no
    other. The prefix cache then holds each response up to its first shared page, and gives exact KV to a
    follow-up."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    page = server.get("/server_info").json()["page_size"]
    todo = letters(6)
    responses = together(server, todo, 500)
    seen = report(server)
    assert (seen["block"], seen["uncorrected"]) == (page, None)
    assert page == (64 if spec is specs.PAGES_OF_64 else 16)
    beside = Beside(loop, server)
    again: list[Compared] = []
    for text, found in zip(todo, responses, strict=True):
        beside.add(text, found)
        whole = loop.tokenizer(text)["input_ids"] + found["tokens"]
        follow = follow_up(server, whole)
        first = min((dst for _, dst, _ in found["blocks"]), default=len(whole) - 1)
        assert follow["cached"] == first // page * page
        again.append(loop.compare(whole, follow))
    blocks = sum(len(found["blocks"]) for found in responses)
    assert blocks == seen["totals"]["blocks_shared"] >= 6 * 128 // page
    beside.check("nothing shared", "keys rotated otherwise")
    assert joined(again).off.max() < ROUNDING
    assert_whole(server)

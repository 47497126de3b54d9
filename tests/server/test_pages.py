# SPDX-License-Identifier: Apache-2.0
"""Tests page sizes: a server whose positions share computes what a Hugging Face model computes whose attention
reads the same slots. Pages are freed as a whole, but their sources begin anywhere."""

import pytest

from tests.server import specs
from tests.server.harness import ServerPool, assert_whole
from tests.server.problems import follow_up, letters, report, together
from tests.server.reference import ROUNDING, Beside, Compared, Loop, joined


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(specs.TOKENS, marks=pytest.mark.long),
        *(specs.QUOTES, specs.PAGES, specs.PAGES_OF_64, specs.PAGES_AS_CACHED),
        *(specs.LATENT_PAGES, specs.WINDOW_PAGES),
    ],
)
def test_shared_pages_give_what_a_loop_computes(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """Log-probabilities and tokens are those of a loop in which the same positions share, and those of no
    other. The prefix cache then holds each response, and gives what was shared to a follow-up, but only exact
    KV to one that opts out."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    page = server.get("/server_info").json()["page_size"]
    todo = letters(6)
    responses = together(server, todo, 500)
    seen = report(server)
    assert (seen["block"], seen["uncorrected"]) == (8, None)
    assert page == {specs.TOKENS: 1, specs.QUOTES: 1, specs.PAGES_OF_64: 64}.get(spec, 16)
    beside = Beside(loop, server)
    again: list[Compared] = []
    continued: list[Compared] = []
    for text, found in zip(todo, responses, strict=True):
        beside.add(text, found)
        whole = loop.tokenizer(text)["input_ids"] + found["tokens"]
        follow = follow_up(server, whole, opts_out=False)
        assert follow["cached"] == (len(whole) - 1) // page * page
        continued.append(beside.continued(whole, found, follow))
        follow = follow_up(server, whole)
        first = min((dst for _, dst, *_ in found["blocks"]), default=len(whole) - 1)
        if spec is specs.WINDOW_PAGES and found["blocks"]:
            # The window before the first shared position is freed.
            first = found["prompt_tokens"]
        assert follow["cached"] == first // page * page
        again.append(loop.compare(whole, follow))
    quoted = [src < each["prompt_tokens"] for each in responses for *_, src, _ in each["blocks"]]
    assert any(quoted) == (spec is specs.QUOTES)
    runs = [run for found in responses for run in found["blocks"]]
    shared = sum(length for *_, length in runs)
    unit = max(page, 8)
    assert shared == unit * seen["totals"]["blocks_shared"] >= 6 * 128
    if page > 1:
        # Sharing only whole pages with whole pages would save a fraction of it.
        whole_pages = sum(
            length == page and dst % page == src % page for _, dst, src, length in runs
        )
        print(spec.name, shared, "positions share,", page * whole_pages, "by whole equal pages")
        assert shared > 4 * page * whole_pages
    beside.check("nothing shared", "keys rotated otherwise")
    assert joined(again).off.max() < ROUNDING
    assert joined(continued).off.max() < ROUNDING
    totals = report(server)["totals"]
    assert totals["prompts_continued"] > 0 and totals["tokens_continued"] > 0
    assert_whole(server)

# SPDX-License-Identifier: Apache-2.0
"""Tests servers that speculate: by n-grams (trees of tokens) and by a draft model (chains). SGLang's operations
on drafted tokens have CPU stand-ins (``speculating``); this project's attention verifies drafted tokens."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, wait_until_idle
from tests.server.problems import (
    OPT_OUT,
    TO_THE_END,
    accuracy,
    follow_up,
    letters,
    problems,
    prompts,
    report,
    reports,
    respond,
    solve,
    together,
)
from tests.server.reference import ROUNDING, Beside, Loop, joined


@pytest.fixture(scope="module")
def loop(model_path: Path) -> Loop:
    return Loop(model_path)


@pytest.mark.parametrize("server", specs.SPECULATING, indirect=True)
def test_what_is_verified_is_what_a_loop_computes(server: ServerProcess, loop: Loop) -> None:
    """Log-probabilities are those of a loop that redirects the same blocks, and not those of a loop that
    rotates no keys or redirects nothing. A request that opts out reads exact KV. The weights of the EAGLE3 head
    are random, so nearly all that it drafts is rejected."""
    todo = prompts(10, seed=5)
    responses = respond(server, todo)
    seen = report(server)
    assert seen["uncorrected"] is None and seen["totals"]["blocks_missed"] == 0
    beside = Beside(loop, server)
    for text, found in zip(todo, responses, strict=True):
        beside.add(text, found)
    beside.check("nothing shared", "keys rotated otherwise")
    tokens = sum(len(found["tokens"]) for found in responses)
    # A step without drafts gives a request one token. The requests run together.
    longest = max(len(found["tokens"]) for found in responses)
    if "EAGLE3" not in server.command:
        assert seen["totals"]["decode_steps"] < 0.9 * longest, "drafts are accepted"
    shared = sum(length for found in responses for *_, length in found["blocks"])
    assert shared > 0.05 * tokens
    exact = Beside(loop, server)
    for text, found in zip(
        todo[:3], respond(server, todo[:3], sampling_params=OPT_OUT), strict=True
    ):
        assert not found["blocks"]
        exact.add(text, found)
    assert joined(exact.ours).off.max() < ROUNDING
    assert_whole(server)


@pytest.mark.parametrize("server", specs.SPECULATING_SHORT, indirect=True)
def test_a_short_server_that_speculates_loses_nothing(server: ServerProcess) -> None:
    """SGLang retracts requests between two verifications, and some come back from the host."""
    todo = problems(24, seed=9)
    assert accuracy(todo, solve(server, todo)) >= 0.9
    wait_until_idle(server)
    totals = report(server)["totals"]
    assert totals["blocks_shared"] > 0 and totals["blocks_missed"] == 0
    assert totals["shortages"] > 0
    assert totals["requests_swapped"] > 0 and totals["tokens_swapped_back"] > 100
    assert_whole(server)


STATES = [specs.STATES_NGRAMS, specs.STATES_MTP, specs.STATES_COPIED, *specs.OTHER_STATES]


@pytest.mark.parametrize(
    "spec",
    [
        *STATES,
        *specs.WINDOWS_SPECULATING,
        specs.STATES_PAGES,
        specs.MTP,
        specs.MTP_PAGES,
        pytest.param(specs.MTP_GROUPS, marks=specs.FEW_CORES),
        pytest.param(specs.STATES_GROUPS, marks=specs.FEW_CORES),
    ],
)
def test_what_other_models_verify_is_what_a_loop_computes(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """DeepSeek's and Qwen's layers of multi-token prediction draft. Rows are latent, or layers have states.
    With two groups of DP attention, one has more requests than the other, so SGLang pads verifications."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    todo = letters(9)
    responses = together(server, todo, 400)
    for seen in reports(server):
        totals = seen["totals"]
        assert seen["uncorrected"] is None and totals["blocks_missed"] == 0
        # Few blocks cover whole pages of 64 positions in 400 tokens.
        assert totals["blocks_shared"] >= (20 if spec == specs.STATES_PAGES else 50)
        # Drafts are accepted. The tiny Qwen3-Next's layer drafts worse than the others, and a head with random
        # weights drafts nothing that is.
        most = {"qwen3_next": 0.9}.get(spec.model, 0.7)
        assert spec == specs.POOL_EAGLE3 or totals["decode_steps"] < most * 400
    beside = Beside(loop, server)
    for text, found in zip(todo, responses, strict=True):
        beside.add(text, found)
    rotates = loop.rotation() is not None
    beside.check("nothing shared", *["keys rotated otherwise"] * rotates)
    assert_whole(server)


@pytest.mark.parametrize("spec", [*STATES, *specs.STATES_OVERLAPPED])
def test_a_cached_state_is_that_after_accepted_tokens(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """A response goes on behind what is cached of an earlier one: its prompt, and what was computed without
    sharing up to the last copy of the states. With copies, all up to the last one is cached for requests that
    did not opt out. Without them, SGLang caches no response whose state speculation has taken ahead of it."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    copied = spec in (specs.STATES_COPIED, *specs.STATES_OVERLAPPED)
    continues = copied
    beside = Beside(loop, server)
    compared = []
    for text, found in zip(letters(4), together(server, letters(4), 200), strict=True):
        assert found["blocks"]
        whole = loop.tokenizer(text)["input_ids"] + found["tokens"]
        computed = (len(whole) - 1) // 64 * 64 if copied else len(whole) - 1
        if continues:
            follow = follow_up(server, whole, opts_out=False, most=20)
            assert follow["cached"] == computed
            assert beside.continued(whole, found, follow).off.max() < ROUNDING
        follow = follow_up(server, whole, most=150)
        exact = min(dst for _, dst, *_ in found["blocks"])
        if continues or not copied:
            exact = found["prompt_tokens"]
        assert follow["cached"] == (exact // 64 * 64 if copied else exact)
        compared.append(loop.compare(whole, follow))
        whole += follow["tokens"]
        again = follow_up(server, whole)
        if copied:
            assert again["cached"] == (len(whole) - 1) // 64 * 64
        compared.append(loop.compare(whole, again))
    assert joined(compared).off.max() < ROUNDING
    assert_whole(server)


@pytest.mark.parametrize(
    "spec",
    [specs.DRAFTS, specs.MTP, specs.POOL_DRAFTS, specs.POOL_EAGLE3, specs.LAYERS_DRAFT],
)
def test_the_next_turn_finds_what_a_response_shared(
    servers: ServerPool, spec: specs.ServerSpec
) -> None:
    """The prompt of the next turn goes on with the response, which is cached whole, for the draft model too:
    most of what it drafts is accepted. Log-probabilities are those of a loop that redirects the same blocks."""
    server = servers.get(spec)
    loop = Loop(servers.model(spec.model), spec.model)
    tokenizer = AutoTokenizer.from_pretrained(servers.model(spec.model))
    beside = Beside(loop, server)
    for text in letters(3) if spec.model else prompts(3, seed=5):
        [found] = respond(server, [text], 400, **TO_THE_END)
        assert found["blocks"]
        prompt = tokenizer(text)["input_ids"]
        whole = [*prompt, *found["tokens"], prompt[0]]
        before = report(server)["totals"]["decode_steps"]
        follow = follow_up(server, whole, opts_out=False, most=60)
        steps = report(server)["totals"]["decode_steps"] - before
        assert steps < 30 or spec == specs.POOL_EAGLE3, "drafts are accepted"
        # A verification may have computed the KV of the last token, too. A draft layer's KV of a position
        # depends on the next token.
        assert follow["cached"] >= len(whole) - 3
        assert beside.continued(whole, found, follow).off.max() < ROUNDING
    assert_whole(server)

# SPDX-License-Identifier: Apache-2.0
"""Policies that select what a step reads, in a live server, by the example of Quest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from eval.serving import ServerProcess
from sglang_reasoncache.policies.quest import Quest
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import problems, report, series, solve
from tests.server.specs import QUEST, SHARING_AND_QUEST
from tests.server.test_dropping import reference as reference
from tests.server.test_sharing import (
    test_aborted_and_disconnected_requests_give_everything_back as give_everything_back,
)

PAGE = 16
POLICY = Quest(budget=48, whole_layers=1)
BOTH = pytest.mark.parametrize("server", [QUEST, SHARING_AND_QUEST], indirect=True)


def pages_read(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """bool ``[positions]``, what the newest query ``[heads, dim]`` reads of its keys."""
    ends = [(page.amin(dim=0), page.amax(dim=0)) for page in keys.split(PAGE)]
    group = len(query) // keys.shape[1]
    logits = torch.stack(
        [
            torch.maximum(*(query * end.repeat_interleave(group, dim=0) for end in both)).sum(1)
            for both in ends
        ]
    )
    shares = (logits * scale).softmax(dim=0).sum(dim=1)[None]
    held, newest = torch.ones(shares.shape, dtype=torch.bool), torch.tensor([len(ends) - 1])
    keep = POLICY.keep(shares, held, newest, PAGE)
    return keep[0].repeat_interleave(PAGE)[: len(keys)]


def selecting(prompt: int, policy: Quest | None) -> Any:
    """Attention of a Hugging Face model in which tokens of the response select what they read."""

    def attend(
        module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        if policy is not None and module.layer_idx >= policy.whole_layers:
            for at in range(max(prompt, policy.budget), query.shape[2]):
                keys = key[0, :, : at + 1].transpose(0, 1)
                visible[at, : at + 1] = pages_read(query[0, :, at], keys, scaling)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_selection_equals_masking_in_every_layer(server: ServerProcess, reference: Any) -> None:
    from transformers import AttentionInterface

    tokenizer, model = reference
    prompts = [f"<|user|> {p.prompt} <|assistant|>" for p in problems(4, seed=41)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(
            pool.map(lambda text: generate(server, text, 200, return_logprob=True), prompts)
        )
    right = dense = compared = 0.0
    for text, body in zip(prompts, bodies, strict=True):
        prompt = tokenizer(text)["input_ids"]
        logprobs, tokens = (
            torch.tensor([entry[i] for entry in body["meta_info"]["output_token_logprobs"]])
            for i in (0, 1)
        )
        off = []
        for policy in (POLICY, None):
            AttentionInterface.register("selecting", selecting(len(prompt), policy))
            model.set_attn_implementation("selecting")
            with torch.no_grad():
                out = model(input_ids=torch.tensor([prompt + tokens.tolist()]))
            expected = out.logits[0].log_softmax(dim=-1)[len(prompt) - 1 : -1]
            off.append((expected.gather(1, tokens[:, None])[:, 0] - logprobs).abs())
        right += float(off[0].sum())
        dense += float(off[1].sum())
        compared += len(tokens)
    print(compared, right, dense)
    assert compared > 400
    # A page is now and then another one: keys are rounded in the server.
    assert right / compared < 0.02
    assert right < dense / 5


@BOTH
def test_reads_less_and_frees_nothing(server: ServerProcess) -> None:
    solve(server, problems(12, seed=42))
    wait_until_idle(server)
    seen = report(server)
    selection = seen["selection"]
    assert selection["name"] == "quest" and selection["refusals"] == {}
    assert 0 < selection["positions_read"] < 0.8 * selection["positions_held"]
    assert seen["evictors"] == []
    assert seen["totals"]["positions_dropped"] == 0


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_prometheus_tells_what_was_read(server: ServerProcess) -> None:
    solve(server, problems(6, seed=44))
    selection, found = report(server)["selection"], series(server)
    for field in ("positions_held", "positions_read"):
        published = found[f"sglang:reasoncache_selection_{field}_total"]
        # The last steps may not have been published yet.
        assert 0.5 * selection[field] < published <= selection[field]


@pytest.mark.parametrize("server", [SHARING_AND_QUEST], indirect=True)
def test_shared_pages_are_selected_too(server: ServerProcess) -> None:
    solve(server, problems(16, seed=43))
    assert report(server)["totals"]["blocks_shared"] > 4


@BOTH
def test_aborted_and_disconnected_requests_give_everything_back(server: ServerProcess) -> None:
    give_everything_back(server)

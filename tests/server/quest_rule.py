# SPDX-License-Identifier: Apache-2.0
"""What Quest should have read, by attention of another implementation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from eval.serving import ServerProcess
from sglang_reasoncache.selection.quest import Quest
from tests.server.harness import generate
from tests.server.problems import problems, report, solve

PAGE = 16
RULE = Quest(budget=48, whole_layers=1)
#: Of a server whose steps :func:`assert_quest_decides` follows.
POLICY = (
    "--page-size",
    str(PAGE),
    "--reasoncache-policy",
    f"quest:budget={RULE.budget}:whole_layers={RULE.whole_layers}",
)


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
    keep = RULE.keep(shares, held, newest, PAGE)
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


def assert_quest_decides(server: ServerProcess, reference: Any) -> None:
    """Log-probabilities are those of attention masked in every layer, but for rounding.

    ``reference``: tokenizer and model.
    """
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
        for policy in (RULE, None):
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


def assert_reads_less(server: ServerProcess) -> None:
    """Of what rows hold, with no refusal."""
    solve(server, problems(12, seed=42))
    selection = report(server)["selection"]
    assert selection["name"] == "quest" and selection["refusals"] == {}
    assert 0 < selection["positions_read"] < 0.8 * selection["positions_held"]

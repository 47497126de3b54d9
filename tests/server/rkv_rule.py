# SPDX-License-Identifier: Apache-2.0
"""What R-KV should have evicted, by a forward of another implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eval.serving import ServerProcess
from sglang_reasoncache.eviction.policies.evictor import pooled
from sglang_reasoncache.eviction.policies.rkv import redundancy
from tests.server.masking import respond
from tests.server.problems import problems

RECENT = 16
#: Of a server whose first evictions :func:`assert_rkv_decides` reads.
POLICY = ("--reasoncache-policy", f"rkv:budget=110:slack=24:recent={RECENT}")


@torch.no_grad()
def scores_of(model: Any, tokens: list[int], written: int) -> np.ndarray:
    """R-KV's, the highest to go first, by attention and keys of a Hugging Face forward."""
    # On the overlap schedule the query behind the written positions has been computed as well.
    out = model(
        input_ids=torch.tensor([tokens[: written + 1]]), output_attentions=True, use_cache=True
    )
    weights = torch.cat([layer[0] for layer in out.attentions])
    importance = weights[:, -8:, :written].mean(dim=(0, 1)).double().numpy()
    redundant = torch.stack(
        [
            redundancy(layer.keys[0, :, :written].transpose(0, 1), 0.5, 512)
            for layer in out.past_key_values.layers
        ]
    ).mean(dim=(0, 2))
    scores: np.ndarray = 0.9 * redundant.double().numpy() - 0.1 * pooled(importance, 7, "max")
    return scores


def assert_rkv_decides(server: ServerProcess, reference: Any) -> None:
    """The first evict of each response has the positions of highest score, but for rounding.

    ``reference``: tokenizer and model.
    """
    tokenizer, model = reference
    prompts = [f"<|user|> {p.prompt} <|assistant|>" for p in problems(6, seed=31)]
    same = total = 0
    for text, found in zip(prompts, respond(server, prompts), strict=True):
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        written = found["evictions"][0][0]
        gone = {
            at
            for when, start, length in found["evictions"]
            if when == written
            for at in range(start, start + length)
        }
        candidates = range(found["prompt_tokens"], written - RECENT)
        scores = scores_of(model, tokens, written)
        expected = sorted(candidates, key=lambda at: -scores[at])[: len(gone)]
        assert gone <= set(candidates)
        same += len(gone & set(expected))
        total += len(gone)
    print(same, total)
    assert total > 6 * 20
    assert same / total > 0.95

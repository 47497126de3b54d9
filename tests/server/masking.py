# SPDX-License-Identifier: Apache-2.0
"""Responses of a server that evicts positions, against a Hugging Face loop whose attention is masked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from eval.serving import ServerProcess
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import report


def respond(
    server: ServerProcess, prompts: list[str], most: int = 700, **options: Any
) -> list[dict[str, Any]]:
    """All at once; token ids, their log-probabilities, and what the endpoint tells.

    ``inputs``: log-probabilities of the prompt's tokens but the first, where ``options`` ask
    for them.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [
            pool.submit(generate, server, text, most, return_logprob=True, **options)
            for text in prompts
        ]
        bodies = [future.result() for future in futures]
    wait_until_idle(server)
    recent = {entry["rid"]: entry for entry in report(server)["recent"]}
    found = []
    for meta in (body["meta_info"] for body in bodies):
        outputs = meta["output_token_logprobs"]
        found.append(
            {
                "logprobs": [logprob for logprob, _, _ in outputs],
                "tokens": [token for _, token, _ in outputs],
                "inputs": [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]],
                "cached": meta["cached_tokens"],
                **recent[meta["id"]],
            }
        )
    return found


def load(model_path: Path) -> Any:
    """Tokenizer and model of the loop, fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return AutoTokenizer.from_pretrained(model_path), model


@torch.no_grad()
def differences(
    reference: Any, prompt: str, found: dict[str, Any], after: int | None = 1
) -> torch.Tensor:
    """fp32 ``[tokens]``: how far log-probabilities are from those of the loop.

    Args:
        reference: Tokenizer and model.
        found: As :func:`respond` returns it.
        after: Queries that see what was evicted behind the prompt: on the overlap schedule the
            forward in flight has read it. Between chunks nothing runs. None: nothing is masked.
    """
    tokenizer, model = reference
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) == found["prompt_tokens"]
    text, logprobs = ids + found["tokens"], found["inputs"] + found["logprobs"]
    visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    for written, start, length in found["evictions"] if after is not None else ():
        query = written + (after or 0) * (written >= len(ids))
        visible[query:, start : start + length] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    out = model(input_ids=torch.tensor([text]), attention_mask=mask[None, None])
    expected = out.logits[0].log_softmax(dim=-1)[-len(logprobs) - 1 : -1]
    expected = expected.gather(1, torch.tensor(text[-len(logprobs) :])[:, None])[:, 0]
    return (expected - torch.tensor(logprobs)).abs()

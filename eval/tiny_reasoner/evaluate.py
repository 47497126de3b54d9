# SPDX-License-Identifier: Apache-2.0
"""Greedy accuracy of a checkpoint, under the Hugging Face loop and through the chat template."""

from __future__ import annotations

import argparse
import time
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .task import Problem, follows_prompt, generate, grade


@torch.no_grad()
def respond(
    model: Any, tokenizer: Any, problems: list[Problem], batch: int = 64, limit: int = 900
) -> list[str]:
    """Greedy responses, special tokens left out."""
    texts: list[str] = []
    for start in range(0, len(problems), batch):
        chats = [[{"role": "user", "content": p.prompt}] for p in problems[start : start + batch]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        inputs.pop("token_type_ids", None)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
        texts += tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return texts


def main() -> None:
    """Print accuracy over held-out problems."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--wrong", type=int, default=0, metavar="N", help="print N wrong responses")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    problems = generate(args.seed, args.problems)
    begin = time.perf_counter()
    texts = respond(model, tokenizer, problems, args.batch)
    seconds = time.perf_counter() - begin
    right = [grade(t, p) for t, p in zip(texts, problems, strict=True)]
    for name, keep in (("all", (True, False)), ("clean", (False,)), ("error", (True,))):
        chosen = [ok for ok, p in zip(right, problems, strict=True) if p.error in keep]
        print(f"{name:5} {fmean(chosen):.3f} of {len(chosen)}")
    faithful = fmean(follows_prompt(t, p) for t, p in zip(texts, problems, strict=True))
    print(f"every assignment as in the prompt {faithful:.3f}")
    same = fmean(t == p.response for t, p in zip(texts, problems, strict=True))
    print(f"word for word as the reference {same:.3f}; {seconds:.0f} s")
    for text, problem in [
        (t, p) for t, p, ok in zip(texts, problems, right, strict=True) if not ok
    ][: args.wrong]:
        print(f"\nPROMPT {problem.prompt} (answer {problem.answer})\n{text}")


if __name__ == "__main__":
    main()

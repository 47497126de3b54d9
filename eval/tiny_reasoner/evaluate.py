# SPDX-License-Identifier: Apache-2.0
"""Greedy accuracy of a checkpoint, under the Hugging Face loop and through the chat template."""

import argparse
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.tiny_reasoner.task import follows_prompt, generate, grade


@torch.no_grad()
def respond(model: Any, tokenizer: Any, prompts: list[str], batch: int) -> list[str]:
    """Greedy responses of at most 900 tokens, special tokens left out."""
    texts: list[str] = []
    for start in range(0, len(prompts), batch):
        chats = [[{"role": "user", "content": p}] for p in prompts[start : start + batch]]
        how: dict[str, Any] = dict(padding=True, return_tensors="pt", return_dict=True)
        inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, **how)
        inputs.pop("token_type_ids", None)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=900)
        new = out[:, inputs["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
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
    problems = generate(args.seed, args.problems)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    texts = respond(model, tokenizer, [problem.prompt for problem in problems], args.batch)
    pairs = list(zip(texts, problems, strict=True))
    found = pd.DataFrame(
        {
            "right": [grade(text, problem) for text, problem in pairs],
            "every assignment as in the prompt": [follows_prompt(t, p) for t, p in pairs],
            "word for word as the reference": [t == p.response for t, p in pairs],
        }
    )
    kind = pd.Series(["error" if problem.error else "clean" for problem in problems], name="kind")
    table = pd.concat([found.groupby(kind).mean(), found.mean().to_frame("all").T])
    print(table.to_markdown(floatfmt=".3f"))
    wrong = [pair for pair, ok in zip(pairs, found["right"], strict=True) if not ok]
    for text, problem in wrong[: args.wrong]:
        print(f"\nPROMPT {problem.prompt} (answer {problem.answer})\n{text}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How much of a reference response could share KV-cache slots, by the filter alone.

Counts the blocks that the filter proposes when a step ends, before distances are looked at, over
the tokens of prompts and responses.
"""

from __future__ import annotations

import argparse

import pandas as pd

from eval.redundancy.measure import propose
from eval.redundancy.spelling import TokenizerSpeller
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import ASSISTANT, USER, generate
from sglang_reasoncache.filter.lexical import LexicalIndex
from sglang_reasoncache.filter.settings import FilterConfig

SIMILAR = 0.8


def main() -> None:
    """Print the figures over generated problems."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--show", action="store_true", help="print the first problem")
    args = parser.parse_args()
    problems = generate(args.seed, args.problems)
    if args.show:
        print(f"PROMPT {problems[0].prompt}\n\n{problems[0].response}\n")
    speller = TokenizerSpeller(str(CHECKPOINT))
    lines, shares = [], []
    for problem in problems:
        spelled = speller.spell(problem.response)
        # The template adds the two role words.
        prompt = len([USER, *problem.prompt.split(" "), ASSISTANT])
        response = len(spelled.token_ids)
        line = {"error": problem.error, "prompt": prompt, "response": response}
        tokens = prompt + response
        for block in args.blocks:
            proposals = propose(spelled, FilterConfig(block=block))
            sizes = [block * len(proposal.pairs) for proposal in proposals]
            # Shared from the token that ends the step on.
            left = [response - proposal.step.end + 1 for proposal in proposals]
            over_time = sum(size * steps for size, steps in zip(sizes, left, strict=True))
            held = response * prompt + response * (response + 1) / 2
            shares.append(
                {"error": problem.error, "block": block, "tokens": tokens, "shared": sum(sizes)}
                | {"over decode steps": over_time / held}
            )
        index = LexicalIndex(len(proposals))
        similar = 0
        for proposal in proposals:
            similar += len(index) and float(index.similarities(proposal.step).max()) > SIMILAR
            index.add(proposal.step)
        lines.append(line | {"steps": len(proposals), "similar": similar})
    rows = pd.DataFrame(lines)
    lengths, steps = rows["response"], rows["steps"]
    prompts = rows["prompt"].sum() / (rows["prompt"] + lengths).sum()
    print(f"problems {len(rows)}, with a wrong draft {rows['error'].mean():.1%}")
    print(f"response tokens mean {lengths.mean():.1f} min {lengths.min()} max {lengths.max()}")
    print(f"prompt tokens mean {rows['prompt'].mean():.1f}, {prompts:.1%} of all")
    print(f"steps per response {steps.mean():.1f}")
    similar = rows["similar"].sum() / (steps - 1).sum()
    print(f"later steps with similarity > {SIMILAR} to an earlier one {similar:.1%}\n")
    found = pd.DataFrame(shares)
    every = found.assign(problems="all")
    parts = found.assign(problems=found["error"].map({True: "error", False: "clean"}))
    groups = pd.concat([every, parts]).groupby(["problems", "block"])
    table = groups[["tokens", "shared"]].sum()
    table["shareable at the end"] = table.pop("shared") / table.pop("tokens")
    table["over decode steps"] = groups["over decode steps"].mean()
    print(table.reset_index().to_markdown(index=False, floatfmt=".3f"))


if __name__ == "__main__":
    main()

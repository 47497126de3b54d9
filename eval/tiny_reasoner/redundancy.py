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
        held = response * prompt + response * (response + 1) / 2
        for block in args.blocks:
            proposals = propose(spelled, FilterConfig(block=block))
            sizes = [block * len(proposal.pairs) for proposal in proposals]
            # Shared from the token that ends the step on.
            left = [response - proposal.step.end + 1 for proposal in proposals]
            over_time = sum(size * steps for size, steps in zip(sizes, left, strict=True))
            shares.append((problem.error, block, prompt + response, sum(sizes), over_time / held))
        index, similar = LexicalIndex(len(proposals)), 0
        for proposal in proposals:
            similar += len(index) and float(index.similarities(proposal.step).max()) > SIMILAR
            index.add(proposal.step)
        lines.append((prompt, response, len(proposals), similar))
    rows = pd.DataFrame(lines, columns=["prompt", "response", "steps", "similar"])
    mean, total, lengths = rows.mean(), rows.sum(), rows["response"]
    prompts = total["prompt"] / (total["prompt"] + total["response"])
    similar = total["similar"] / (total["steps"] - len(rows))
    wrong = sum(problem.error for problem in problems) / len(problems)
    print(f"problems {len(rows)}, with a wrong draft {wrong:.1%}")
    print(f"response tokens mean {mean['response']:.1f} min {lengths.min()} max {lengths.max()}")
    print(f"prompt tokens mean {mean['prompt']:.1f}, {prompts:.1%} of all")
    print(f"steps per response {mean['steps']:.1f}")
    print(f"later steps with similarity > {SIMILAR} to an earlier one {similar:.1%}\n")
    found = pd.DataFrame(shares, columns=["error", "block", "tokens", "shared", "over time"])
    parts = found.assign(problems=found["error"].map({True: "error", False: "clean"}))
    groups = pd.concat([found.assign(problems="all"), parts]).groupby(["problems", "block"])
    sums = groups[["tokens", "shared"]].sum()
    table = pd.DataFrame(
        {
            "shareable at the end": sums["shared"] / sums["tokens"],
            "over decode steps": groups["over time"].mean(),
        }
    )
    print(table.reset_index().to_markdown(index=False, floatfmt=".3f"))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How much of a reference response could share KV slots, by the filter alone: blocks that it
proposes, before distances are looked at, over tokens of prompts and responses."""

import argparse
import itertools

import pandas as pd

from eval.redundancy.measure import BLOCKS, TokenizerSpeller, measure
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import ASSISTANT, USER, generate

SIMILAR = 0.8


def main() -> None:
    """Print the figures over generated problems."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the first problem")
    args = parser.parse_args()
    problems = generate(args.seed, args.problems)
    if args.show:
        print(f"PROMPT {problems[0].prompt}\n\n{problems[0].response}\n")
    speller = TokenizerSpeller(str(CHECKPOINT))
    rows = pd.DataFrame(measure(speller.spell(problem.response)) for problem in problems).fillna(0)
    # The template adds the two role words.
    prompts = pd.Series([len([USER, *p.prompt.split(" "), ASSISTANT]) for p in problems])
    error, lengths = pd.Series([p.error for p in problems]), rows["tokens"]
    whole = prompts + lengths
    similar = rows["with_length_factor", SIMILAR].sum() / rows["later_steps"].sum()
    print(f"problems {len(rows)}, with a wrong draft {error.mean():.1%}")
    print(f"response tokens mean {lengths.mean():.1f} min {lengths.min()} max {lengths.max()}")
    print(f"prompt tokens mean {prompts.mean():.1f}, {prompts.sum() / whole.sum():.1%} of all")
    print(f"steps per response {rows['steps'].mean():.1f}")
    print(f"later steps with similarity > {SIMILAR} to an earlier one {similar:.1%}\n")
    held = rows["held_over_time"] + lengths * prompts
    groups = {"all": error | ~error, "clean": ~error, "error": error}
    table = []
    for (name, chosen), block in itertools.product(groups.items(), BLOCKS):
        end = rows["structure", block][chosen].sum() / whole[chosen].sum()
        over = (rows["structure", block, "over_time"] / held)[chosen].mean()
        line = {"problems": name, "block": block, "shareable at the end": end}
        table.append({**line, "over decode steps": over})
    print(pd.DataFrame(table).to_markdown(index=False, floatfmt=".3f"))


if __name__ == "__main__":
    main()

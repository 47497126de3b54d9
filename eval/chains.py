# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.chains [COUNT]`` prints word problems of seven and eight steps, for ``eval.run --tasks gsm8k
--data gsm8k=FILE``. They make a small instruction-tuned model repeat itself: an earlier turn shows a problem
that is solved, then checked twice, every step again."""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from eval.small_reasoner.task import (
    FEWER,
    ITEMS,
    MORE,
    NAMES,
    TOGETHER,
    TWICE,
    draw_fact,
)

STEPS = (7, 8)
EXAMPLE_STEPS = 4
ASK = "Solve it, then check it twice; write every step again in each check."


class Chain(NamedTuple):
    """A problem about people, each of whom has more or fewer items than the one before.

    Attributes:
        facts: What the problem says, a sentence for each person.
        solution: How to compute what each person has, a sentence for each.
        items: What they have.
        last: The last person, about whom the problem asks.
        answer: How many items the last person has.
    """

    facts: list[str]
    solution: list[str]
    items: str
    last: str
    answer: int

    @property
    def question(self) -> str:
        return f"{' '.join(self.facts)} How many {self.items} does {self.last} have?\n\n{ASK}"

    @property
    def response(self) -> str:
        steps = "\n".join(self.solution)
        checks = (f"Check {n}: let me do every step again.\n{steps}" for n in (1, 2))
        answer = f"{self.last} has \\boxed{{{self.answer}}} {self.items}."
        return "\n\n".join((f"Solution:\n{steps}", *checks, answer))


def chain(rng: random.Random, steps: int) -> Chain:
    """A problem that takes ``steps`` steps, of facts as the small reasoner's problems have."""
    first, *owners = rng.sample(NAMES, steps + 1)
    items = rng.choice(ITEMS)
    has = {first: rng.randint(5, 40)}
    facts = [f"{first} has {has[first]} {items}."]
    solution = list(facts)
    for owner in owners:
        fact = draw_fact(rng, owner, has, fewer=True)
        there = has[fact.others[0]]
        computed = {
            MORE: f"{there} + {fact.number}",
            FEWER: f"{there} - {fact.number}",
            TWICE: f"2 * {there}",
            TOGETHER: f"{there} + {has[fact.others[-1]]}",
        }[fact.kind]
        has[owner] = fact.result(has)
        facts.append(fact.kind.format(**fact.words(items)))
        said = facts[-1].removesuffix(".")
        solution.append(f"{said}, so {owner} has {computed} = {has[owner]} {items}.")
    return Chain(facts, solution, items, owners[-1], has[owners[-1]])


def rows(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """``count`` problems, as many of each number of steps. All have the same example."""
    shown = chain(random.Random("example"), EXAMPLE_STEPS)
    example = {"question": shown.question, "response": shown.response}
    rng = random.Random(f"chains {seed}")
    for number in range(count):
        made = chain(rng, STEPS[number % len(STEPS)])
        yield {
            "id": f"chain-{number}",
            "question": made.question,
            "answer": str(made.answer),
            "examples": [example],
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.chains", description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=40, help="how many problems")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other problems")
    args = parser.parse_args()
    for row in rows(args.count, args.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()

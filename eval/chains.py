# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.chains [COUNT]`` prints word problems of seven and eight steps, for ``eval.run --tasks gsm8k
--data gsm8k=FILE``. They make a small instruction-tuned model repeat itself: an earlier turn shows a problem
that is solved, then checked twice, every step again. Asked for that in words alone, such models do not."""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

NAMES = (
    *("Anna", "Ben", "Carl", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Jack", "Kate", "Leo", "Mary", "Nick", "Paul", "Rose", "Tom"),
)
ITEMS = ("apples", "books", "cards", "coins", "eggs", "keys", "shells", "stamps")
STEPS = (7, 8)
EXAMPLE_STEPS = 4
HIGHEST = 199
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
    """A problem that takes ``steps`` steps, in which nobody has more than ``HIGHEST`` items."""
    people = rng.sample(NAMES, steps + 1)
    items = rng.choice(ITEMS)
    first = rng.randint(3, 25)
    has = {people[0]: first}
    facts = [f"{people[0]} has {first} {items}."]
    solution = list(facts)
    for before, me in itertools.pairwise(people):
        there = has[before]
        number = rng.randint(2, 20)
        other = rng.choice(people[: max(people.index(before), 1)])
        kinds = {
            "more": (f"{number} more {items} than {before}", f"{there} + {number}", there + number),
            "fewer": (
                f"{number} fewer {items} than {before}",
                f"{there} - {number}",
                there - number,
            ),
            "twice": (f"twice as many {items} as {before}", f"2 * {there}", 2 * there),
            "together": (
                f"as many {items} as {before} and {other} together",
                f"{there} + {has[other]}",
                there + has[other],
            ),
        }
        if other == before:
            del kinds["together"]
        allowed = [kind for kind in kinds.values() if 1 <= kind[2] <= HIGHEST]
        said, computed, has[me] = rng.choice(allowed)
        facts.append(f"{me} has {said}.")
        solution.append(f"{me} has {said}, so {me} has {computed} = {has[me]} {items}.")
    return Chain(facts, solution, items, people[-1], has[people[-1]])


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

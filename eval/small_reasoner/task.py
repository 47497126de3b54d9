# SPDX-License-Identifier: Apache-2.0
"""The task of the small reasoner: word problems about who has how many items, solved once and then checked.

See README.md. A problem determines every word of its reference response, so exactly one next token is right at
each position."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from eval.tiny_reasoner.task import STEP_END, Problem

NAMES = (
    "Anna", "Ben", "Carl", "David", "Emma", "Frank", "Grace", "Henry",
    "Jack", "Kate", "Leo", "Mary", "Nick", "Paul", "Rose", "Tom",
)  # fmt: skip
ITEMS = (
    "apples", "books", "cards", "coins", "eggs", "flowers", "keys", "stones", "shells", "stamps",
)  # fmt: skip
HIGHEST = 99

# Fact about person {v} in the prompt -> step of the response that computes {r}. {a} has {x} items, {b} has {y}.
STEPS = {
    "{v} has {n} more {i} than {a}.": "{a} has {x}, so {v} has {x} + {n} = {r} {i}.",
    "{v} has {n} fewer {i} than {a}.": "Take {n} from the {x} of {a}: {x} - {n} = {r} {i} for {v}.",
    "{v} has twice as many {i} as {a}.": "With {x} for {a}, that makes {x} + {x} = {r} {i} for {v}.",
    "{v} has as many {i} as {a} and {b} together.": "{a} has {x} and {b} has {y}, "
    "which is {x} + {y} = {r} {i} for {v}.",
}
MORE, FEWER, TWICE, TOGETHER = STEPS
NOTED = "But the note says that {v} has {r} {i}, so I take {r}."
SAME = "This is what I had before."
CHANGED = "Before I had {old}, and that was wrong."
SUM = "Together {a} and {b} have {x} + {y} = {r} {i}."
HEADERS = {
    "forwards": "Wait, let me check. Check {k} of {n} goes forwards.",
    "backwards": "Let me verify that again. Check {k} of {n} goes backwards.",
}
BEGIN = "<think>\nLet me work this out, starting from {a} with {x} {i}."
END = "At first I had {first} {i} together, and now I have {last}.\n</think>"
ANSWER = "The answer is \\boxed{{{first} then {last}}}."


@dataclass(frozen=True)
class Difficulty:
    """Size of the generated problems. The evaluation uses the defaults."""

    min_steps: int = 3
    max_steps: int = 4
    min_checks: int = 2
    max_checks: int = 4
    #: ``shuffled`` puts the facts in random order; ``fewer`` allows facts with the word "fewer". The model was
    #: trained on such problems, but is weak at them.
    shuffled: bool = False
    fewer: bool = False


@dataclass(frozen=True)
class Fact:
    """Says how many items ``owner`` has. ``kind`` tells how to compute this from ``others`` and ``number``."""

    kind: str
    owner: str
    others: tuple[str, ...]
    number: int

    def result(self, values: dict[str, int]) -> int:
        first = values[self.others[0]]
        if self.kind == TOGETHER:
            return first + values[self.others[1]]
        return {MORE: first + self.number, FEWER: first - self.number, TWICE: 2 * first}[self.kind]

    def words(self, items: str) -> dict[str, object]:
        names = dict(zip("ab", self.others, strict=False))
        return {**names, "v": self.owner, "n": self.number, "i": items}

    def step(self, items: str, values: dict[str, int], result: int) -> str:
        operands = dict(zip("xy", (values[name] for name in self.others), strict=False))
        text = f"{self.kind} {STEPS[self.kind]}"
        return text.format(**self.words(items), **operands, r=result)


def draw_fact(rng: random.Random, owner: str, values: dict[str, int], fewer: bool) -> Fact:
    """Draws a fact that gives ``owner`` 2 to ``HIGHEST`` items and uses the last person in ``values``."""
    *earlier, last = values
    while True:
        other = FEWER if fewer else MORE
        kind = rng.choice((MORE, MORE, other, other, TWICE, *([TOGETHER] if earlier else [])))
        others = (last, rng.choice(earlier)) if kind == TOGETHER else (last,)
        number = rng.randint(2, 40) if kind in (MORE, FEWER) else 0
        fact = Fact(kind, owner, others, number)
        if 2 <= fact.result(values) <= HIGHEST:
            return fact


def _check(facts: Sequence[Fact], items: str, values: dict[str, int]) -> list[str]:
    """Recomputes and corrects ``values`` in another pass over ``facts``; returns the steps of this pass."""
    steps = []
    for fact in facts:
        old = values[fact.owner]
        result = fact.result(values)
        tail = SAME if result == old else CHANGED.format(old=old)
        steps.append(f"{fact.step(items, values, result)} {tail}")
        values[fact.owner] = result
    return steps


def make_problem(rng: random.Random, difficulty: Difficulty = Difficulty()) -> Problem:
    count = rng.randint(difficulty.min_steps, difficulty.max_steps)
    first, *owners = rng.sample(NAMES, count + 1)
    items = rng.choice(ITEMS)
    amount = rng.randint(5, 40)
    true = {first: amount}
    facts = []
    for owner in owners:
        if not difficulty.fewer and list(true.values())[-1] > HIGHEST - 40:
            return make_problem(rng, difficulty)  # adding up to 40 could exceed HIGHEST
        facts.append(draw_fact(rng, owner, true, difficulty.fewer))
        true[owner] = facts[-1].result(true)
    last = owners[-1]
    other = rng.choice((first, *owners[:-1]))
    checks = rng.choices(
        tuple(HEADERS), k=rng.randint(difficulty.min_checks, difficulty.max_checks)
    )
    checks[0] = "forwards"  # only a forward pass corrects all values that follow from a wrong note

    # Half of the problems have a wrong note, three in ten have a right note.
    noted = rng.choice(owners)
    luck = rng.random()
    note = true[noted]
    while luck < 0.5 and note == true[noted]:
        note = max(2, true[noted] + rng.randint(-9, 9))

    values = {first: amount}
    steps = [BEGIN.format(a=first, x=amount, i=items)]
    sums: list[int] = []

    def add_up() -> None:
        x = values[other]
        y = values[last]
        sums.append(x + y)
        steps.append(SUM.format(a=other, b=last, x=x, y=y, r=x + y, i=items))

    for fact in facts:
        result = values[fact.owner] = fact.result(values)
        steps.append(fact.step(items, values, result))
        if luck < 0.8 and fact.owner == noted:
            values[noted] = note
            steps[-1] += " " + NOTED.format(v=noted, r=note, i=items)
    add_up()
    before = list(values.values())
    for number, kind in enumerate(checks, 1):
        steps.append(HEADERS[kind].format(k=number, n=len(checks)))
        steps += _check(facts if kind == "forwards" else facts[::-1], items, values)
        add_up()
    if min(before) < 0:
        return make_problem(rng, difficulty)
    assert values == true
    ends = {"first": sums[0], "last": sums[-1]}
    steps += [END.format(**ends, i=items), ANSWER.format(**ends)]

    sentences = [
        f"{first} has {amount} {items}.",
        *(f.kind.format(**f.words(items)) for f in facts),
    ]
    if difficulty.shuffled:
        rng.shuffle(sentences)
    if luck < 0.8:
        sentences.append(f"A note says that {noted} has {note} {items}.")
    sentences.append(f"How many {items} do {other} and {last} have together?")
    plan = ", ".join(checks)
    sentences.append(
        f"Check your work {len(checks)} times: {plan}. Say what you had at first, too."
    )
    answer = f"{sums[0]} then {sums[-1]}"
    return Problem(" ".join(sentences), answer, luck < 0.5, STEP_END.join(steps))

# SPDX-License-Identifier: Apache-2.0
"""How much of a response could share KV-cache slots, by a simple rule that needs no model.

When a step ends, an earlier step is a candidate if its lexical similarity exceeds
``0.9 - 0.2 * mean(similarities)`` and its formal tokens (digits, letters, operators, "=") are the
same. The step is covered from left to right by runs of ``block`` tokens that also occur in the best
candidate.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from .task import ASSISTANT, FORMAL, STEP_END, USER, generate

SIMILAR = 0.8


@dataclass(frozen=True)
class Step:
    """One finished step: its tokens and what comparing it needs."""

    start: int
    tokens: tuple[Hashable, ...]
    counts: Counter
    norm: float
    formal: tuple[Hashable, ...]


def make_step(start: int, tokens: Sequence[Hashable], formal: frozenset) -> Step:
    """A step at position ``start``; ``formal`` holds the tokens that count as formal."""
    counts = Counter(tokens)
    norm = math.sqrt(sum(n * n for n in counts.values()))
    return Step(start, tuple(tokens), counts, norm, tuple(t for t in tokens if t in formal))


def similarity(a: Step, b: Step) -> float:
    """Cosine of the token-count bags times the ratio of the shorter to the longer length."""
    dot = sum(n * b.counts[t] for t, n in a.counts.items())
    lengths = sorted((len(a.tokens), len(b.tokens)))
    return dot / (a.norm * b.norm) * lengths[0] / lengths[1]


def best_candidate(step: Step, earlier: Sequence[Step], structure: bool = True) -> Step | None:
    """The most similar earlier step over the adaptive threshold, the earliest of equals."""
    if not earlier:
        return None
    sims = [similarity(step, other) for other in earlier]
    threshold = 0.9 - 0.2 * fmean(sims)
    found = [
        (sim, -index)
        for index, (sim, other) in enumerate(zip(sims, earlier, strict=True))
        if sim > threshold and (not structure or other.formal == step.formal)
    ]
    return earlier[-max(found)[1]] if found else None


def aligned_runs(step: Step, source: Step, block: int) -> list[tuple[int, int]]:
    """Where each covering run of ``block`` tokens starts, in the step and in the source."""
    where: dict[tuple, int] = {}
    for i in range(len(source.tokens) - block + 1):
        where.setdefault(source.tokens[i : i + block], i)
    runs, i = [], 0
    while i + block <= len(step.tokens):
        j = where.get(step.tokens[i : i + block])
        if j is None:
            i += 1
        else:
            runs.append((step.start + i, source.start + j))
            i += block
    return runs


@dataclass
class Measured:
    """Redundancy of one response."""

    prompt: int
    response: int
    later_steps: int
    similar_steps: int
    shareable: dict[int, int]
    over_steps: dict[int, float]


def measure(prompt: Sequence[str], response: Sequence[str], blocks: Sequence[int]) -> Measured:
    """Apply the rule to one tokenised response; only steps of the response take part."""
    steps: list[Step] = []
    similar = 0
    shared = dict.fromkeys(blocks, 0)
    shared_sum = dict.fromkeys(blocks, 0)
    total_sum, begin = 0, 0
    for i, token in enumerate(response):
        if token == STEP_END:
            step = make_step(begin, response[begin : i + 1], FORMAL)
            similar += any(similarity(step, other) > SIMILAR for other in steps)
            source = best_candidate(step, steps)
            if source is not None:
                for block in blocks:
                    shared[block] += block * len(aligned_runs(step, source, block))
            steps.append(step)
            begin = i + 1
        total_sum += len(prompt) + i + 1
        for block in blocks:
            shared_sum[block] += shared[block]
    over = {block: shared_sum[block] / total_sum for block in blocks}
    return Measured(len(prompt), len(response), len(steps) - 1, similar, shared, over)


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
    rows = [
        # The template adds the two role words; the response ends with one more token, <eos>.
        measure([USER, *p.prompt.split(" "), ASSISTANT], p.response.split(" "), args.blocks)
        for p in problems
    ]
    lengths = [r.response for r in rows]
    prompt_share = sum(r.prompt for r in rows) / sum(r.prompt + r.response for r in rows)
    similar = sum(r.similar_steps for r in rows) / sum(r.later_steps for r in rows)
    print(f"problems {len(rows)}, with a wrong draft {fmean(p.error for p in problems):.1%}")
    print(f"response tokens mean {fmean(lengths):.1f} min {min(lengths)} max {max(lengths)}")
    print(f"prompt tokens mean {fmean(r.prompt for r in rows):.1f}, {prompt_share:.1%} of all")
    print(f"steps per response {fmean(r.later_steps + 1 for r in rows):.1f}")
    print(f"later steps with similarity > {SIMILAR} to an earlier one {similar:.1%}")
    print("problems block  shareable at the end  over decode steps")
    for name, keep in (("all", (True, False)), ("clean", (False,)), ("error", (True,))):
        chosen = [r for r, p in zip(rows, problems, strict=True) if p.error in keep]
        for block in args.blocks if chosen else ():
            tokens = sum(r.prompt + r.response for r in chosen)
            end = sum(r.shareable[block] for r in chosen) / tokens
            over = fmean(r.over_steps[block] for r in chosen)
            print(f"{name:8} {block:5}  {end:20.1%}  {over:17.1%}")


if __name__ == "__main__":
    main()

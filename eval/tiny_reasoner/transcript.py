# SPDX-License-Identifier: Apache-2.0
"""Long prompts that the tiny reasoner can read: a problem, and how far somebody else came with it.

Lines of other problems or words without meaning in front of a problem leave the model at chance:
it has never seen a prompt of over 60 tokens. What it knows to read are its own
responses, and those are long: so the prompt is a problem together with a response up to its last
verification round. What distracts in it are the values of the first pass, half of which follow
from a wrong draft, beside those that were corrected later.
"""

from __future__ import annotations

from dataclasses import dataclass

from eval.tiny_reasoner.task import STEP_END, Difficulty, Problem, generate

#: The longest responses that the model was trained on.
LONGEST = Difficulty(min_variables=5, min_rounds=4, draft_rate=1.0)
_ROUNDS = ("wait", "now check", "check")


@dataclass(frozen=True)
class Transcript:
    """A problem and the beginning of its reference response, which ends with a whole step."""

    problem: Problem
    begun: str


def transcripts(seed: int, count: int, split: str = "test") -> list[Transcript]:
    """``count`` problems of the largest size, each begun up to its last round: some 470 to 740
    tokens with the problem, the same for the same arguments."""
    return [
        Transcript(problem, begin(problem.response))
        for problem in generate(seed, count, split, LONGEST)
    ]


def begin(response: str) -> str:
    """A reference response up to its last verification round."""
    steps = response.split(f" {STEP_END} ")
    last = max(number for number, step in enumerate(steps) if step.startswith(_ROUNDS))
    return f" {STEP_END} ".join(steps[:last]) + f" {STEP_END}"

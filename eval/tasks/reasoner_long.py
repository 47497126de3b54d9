# SPDX-License-Identifier: Apache-2.0
"""Long prompts for the embedded reasoner: a problem with a response to finish."""

from __future__ import annotations

from dataclasses import dataclass

from eval.tasks.reasoner import ReasonerTask
from eval.tasks.task import Problem, Source
from eval.tiny_reasoner.transcript import transcripts

#: What is left to say has some 130 tokens, 180 at most.
MAX_TOKENS = 400


@dataclass(frozen=True)
class LongReasonerTask(ReasonerTask):
    """Held-out problems, each with its response up to the last verification round.

    The server continues the response: prompts have 470 to 740 tokens. Needs a server that
    knows ``continue_final_message``, as SGLang does.
    """

    name: str = "tiny_reasoner_long"
    title: str = "Embedded reasoner, long prompts"

    def load(self, source: Source) -> list[Problem]:
        """As of :meth:`ReasonerTask.load`."""
        return [
            Problem(
                f"{self.name}-{source.seed}-{i}",
                given.problem.prompt,
                given.problem.answer,
                "error" if given.problem.error else "clean",
                extra={
                    "messages": [
                        {"role": "user", "content": given.problem.prompt},
                        {"role": "assistant", "content": given.begun},
                    ],
                    "continue_final_message": True,
                },
                max_tokens=MAX_TOKENS,
            )
            for i, given in enumerate(transcripts(source.seed, self.count(source)))
        ]

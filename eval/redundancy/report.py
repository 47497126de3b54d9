# SPDX-License-Identifier: Apache-2.0
"""Totals as Markdown tables and as JSON."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from eval.redundancy.measure import BLOCKS, LEVELS, RULES, SIMILARITIES, Totals

_STEPS = """
Steps that repeat an earlier one of their response: share of all steps but the first whose
best similarity exceeds the level (cosine of token counts times ratio of lengths; plain cosine).
"""
_SHAREABLE = """
What stage 1 would propose, before distances are looked at: share of steps with a candidate
over the dynamic threshold; share of response tokens in proposed blocks of d tokens at the end
of a response / averaged over decode steps, any candidate and candidates of equal structure.
"""


def as_json(totals: Totals) -> dict[str, Any]:
    later, tokens, held = (totals[name] for name in ("later_steps", "tokens", "held_over_time"))
    return {
        **{name: totals[name] for name in ("responses", "tokens", "steps", "later_steps")},
        "tokens_per_step": _share(tokens, totals["steps"]),
        "similar_steps": {
            name: {str(level): _share(totals[name, level], later) for level in LEVELS}
            for name in SIMILARITIES
        },
        "steps_with_candidate": _share(totals["candidates"], later),
        "shareable_tokens": {
            rule: {
                str(block): {
                    "at_the_end": _share(totals[rule, block], tokens),
                    "over_decode_steps": _share(totals[rule, block, "over_time"], held),
                }
                for block in BLOCKS
            }
            for rule in RULES
        },
    }


def as_markdown(groups: Mapping[str, Totals], tokenizer: str, left_out: int) -> str:
    """Two tables with one line a group, and what they say."""
    steps, shareable = [], []
    for name, totals in groups.items():
        found = as_json(totals)
        later, tokens = bool(totals["later_steps"]), bool(totals["tokens"])
        group = {"responses of": name.replace("|", "\\|")}
        sizes = {"number": totals["responses"], "steps": totals["steps"]}
        mean = {"tokens a step": f"{found['tokens_per_step']:.1f}"}
        similar = {
            f"{prefix}> {level}": _percent(found["similar_steps"][kind][str(level)], later)
            for kind, prefix in zip(SIMILARITIES, ("", "plain "), strict=True)
            for level in LEVELS
        }
        steps.append({**group, **sizes, **mean, **similar})
        proposed = {
            f"d = {block}, {rule}": " / ".join(_percent(share, tokens) for share in shares.values())
            for rule, blocks in found["shareable_tokens"].items()
            for block, shares in blocks.items()
        }
        candidate = _percent(found["steps_with_candidate"], later)
        shareable.append({**group, "candidate": candidate, **proposed})
    number = next(iter(groups.values()))["responses"]
    lines_out = f", {left_out} lines left out." if left_out else "."
    first, second = (
        pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
        for lines in (steps, shareable)
    )
    head = f"Tokens: `{tokenizer}`. Responses: {number}{lines_out}\n"
    return f"{head}{_STEPS}\n{first}\n{_SHAREABLE}\n{second}\n"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(share: float, known: bool) -> str:
    return f"{share:.1%}" if known else "-"

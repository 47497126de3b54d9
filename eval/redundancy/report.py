# SPDX-License-Identifier: Apache-2.0
"""Totals as a Markdown table and as JSON."""

from __future__ import annotations

from typing import Any

from eval.redundancy.measure import BINS, BLOCKS, LEVELS, Totals


def as_json(totals: Totals) -> dict[str, Any]:
    """Shares, and the counts behind them."""
    return {
        "responses": totals.responses,
        "tokens": totals.tokens,
        "steps": totals.steps,
        "later_steps": totals.later_steps,
        "tokens_per_step": _share(totals.tokens, totals.steps),
        "similar_steps": {
            _length(factor): {
                str(level): _share(totals.over[factor, level], totals.later_steps)
                for level in LEVELS
            }
            for factor in (True, False)
        },
        "best_similarity_histogram": {
            "bin_width": 1 / BINS,
            **{_length(factor): totals.best[factor].tolist() for factor in (True, False)},
        },
        "steps_with_candidate": _share(totals.candidates, totals.later_steps),
        "shareable_tokens": {
            _rule(structure): {
                str(block): {
                    "at_the_end": _share(totals.shared[block, structure], totals.tokens),
                    "over_decode_steps": _share(
                        totals.shared_over_time[block, structure], totals.held_over_time
                    ),
                }
                for block in BLOCKS
            }
            for structure in (False, True)
        },
    }


def as_markdown(groups: dict[str, Totals], tokenizer: str, left_out: int) -> str:
    """Two tables with one line a group, and what they say."""
    names = {name: name.replace("|", "\\|") for name in groups}
    lines = [
        f"Tokens: `{tokenizer}`. Responses: {next(iter(groups.values())).responses}"
        + (f", {left_out} lines left out." if left_out else "."),
        "",
        "Steps that repeat an earlier one of their response: share of all steps but the first whose",
        "best similarity exceeds the level (cosine of token counts times ratio of lengths; plain cosine).",
        "",
        _line(
            "responses of",
            "number",
            "steps",
            "tokens a step",
            *(f"> {level}" for level in LEVELS),
            *(f"plain > {level}" for level in LEVELS),
        ),
        _line(*["---"] * (4 + 2 * len(LEVELS))),
    ]
    for name, totals in groups.items():
        lines.append(
            _line(
                names[name],
                str(totals.responses),
                str(totals.steps),
                f"{_share(totals.tokens, totals.steps):.1f}",
                *(
                    _percent(totals.over[factor, level], totals.later_steps)
                    for factor in (True, False)
                    for level in LEVELS
                ),
            )
        )
    lines += [
        "",
        "What stage 1 would propose, before distances are looked at: share of steps with a candidate",
        "over the dynamic threshold; share of response tokens in proposed blocks of d tokens at the end",
        "of a response / averaged over decode steps, any candidate and candidates of equal structure.",
        "",
        _line(
            "responses of",
            "candidate",
            *(f"d = {block}, {_rule(s)}" for s in (False, True) for block in BLOCKS),
        ),
        _line(*["---"] * (2 + 2 * len(BLOCKS))),
    ]
    for name, totals in groups.items():
        lines.append(
            _line(
                names[name],
                _percent(totals.candidates, totals.later_steps),
                *(
                    f"{_percent(totals.shared[rule], totals.tokens)} / "
                    f"{_percent(totals.shared_over_time[rule], totals.held_over_time)}"
                    for structure in (False, True)
                    for rule in ((block, structure) for block in BLOCKS)
                ),
            )
        )
    return "\n".join(lines) + "\n"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _length(factor: bool) -> str:
    return "with_length_factor" if factor else "plain_cosine"


def _rule(structure: bool) -> str:
    return "structure" if structure else "candidate"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(part: float, whole: float) -> str:
    return f"{_share(part, whole):.1%}" if whole else "-"

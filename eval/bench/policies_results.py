# SPDX-License-Identifier: Apache-2.0
"""Rows, table and picture of ``bench-policies``: a policy at one setting, against dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.bench.policies_accuracy import DENSE, Runs
from eval.bench.policies_points import CONTROLS, POLICIES, SELECTOR, Point, parts
from eval.bench.policies_speed import Timing
from eval.bench.turns import as_text, spread
from eval.measures.accuracy import Estimate, accuracy, compare, keyed
from eval.measures.figures import of_cells
from eval.report.markdown import Table, number, words
from eval.report.style import GREY, LABEL_SIZE, figure, light_grid, save, text
from eval.runs.folder import Cell

#: Fields of a :class:`Timing` in a row.
_TIMED = (
    "throughput_ratio", "throughput_ratios", "step_ms", "dense_step_ms", "scheduler_ms",
    "mean_running", "dense_mean_running", "reproduced",
)  # fmt: skip
#: A policy and the saving that it aims at.
Aim = tuple[str, float]

# Okabe and Ito's colours, and Tol's for the rest; sharing is the blue square of all pictures.
_LOOKS = {
    "reasoncache": ("#0072B2", "s", "-"),
    "streamingllm": ("#E69F00", "^", "-"),
    "h2o": ("#009E73", "v", "-"),
    "snapkv": ("#56B4E9", "<", "-"),
    "keydiff": ("#D55E00", "o", "-"),
    "rkv": ("#CC79A7", "D", "-"),
    "l2norm": ("#999933", ">", "-"),
    "quest": ("#117733", "P", "-"),
    "random": ("#888888", "x", ":"),
    "random_eviction": ("#888888", "+", ":"),
}
_OTHER = ("#332288", "h", "-")


def row_of(point: Point, runs: Runs, timed: Timing) -> dict[str, Any]:
    """One row. Shares are of 1; what was not measured is None.

    ``saved`` is what the server counted, averaged over decode steps: slots that the running
    requests did without over their positions, which is what dense holds. ``accuracy_error``
    is half of the 95% interval of the difference from dense on the same problems.
    ``throughput_ratio``, ``step_ms`` and others come from replays of the policy at this aim.
    """
    cell, dense = runs.cell(point.method), runs.cell(DENSE)
    held = of_cells([cell])
    results = keyed({cell.seed: cell.results()})
    against = compare(results, keyed({dense.seed: dense.results()}))
    scored = accuracy(results)
    difference = against.difference if against else None
    return {
        "policy": point.policy,
        "aim": point.aim,
        "method": point.method,
        "saved": held.saving,
        "saved_at_the_end": held.final_saving,
        "reads_saved": _reads_saved(cell, point.policy),
        "accuracy": scored.value if scored else None,
        "accuracy_difference": difference.value if difference else None,
        "accuracy_error": _half(difference),
        "only_dense_right": against.only_dense if against else None,
        "only_policy_right": against.only_method if against else None,
        "problems": len(results),
        "length_ratio": _length_ratio(cell, dense),
        "leaked_slots": held.leaked_slots,
        **{name: timed.get(name) for name in _TIMED},
        "throughput_saved": timed.get("saved"),
    }


def rows(
    points: Sequence[Point], runs: Runs, timings: Mapping[Aim, Timing]
) -> list[dict[str, Any]]:
    """Rows of the points that have answers."""
    return [
        row_of(point, runs, timings.get((point.policy, point.aim), {}))
        for point in points
        if runs.cell(point.method).results()
    ]


def dense_row(runs: Runs) -> dict[str, Any]:
    """What the rows are held against."""
    scored = accuracy(keyed({0: runs.cell(DENSE).results()}))
    return {
        "accuracy": scored.value if scored else None,
        "accuracy_error": _half(scored),
        "problems": scored.n if scored else 0,
    }


def _reads_saved(cell: Cell, policy: str) -> float | None:
    """The share of positions that attention did not read, in layers that select; None of policies
    that evict or share."""
    if SELECTOR not in policy.split("+"):
        return None
    counts = [leg.report.get("selection") or {} for leg in cell.legs()]
    held = sum(int(count.get("positions_held", 0)) for count in counts)
    return 1 - sum(int(count.get("positions_read", 0)) for count in counts) / held if held else None


def _half(found: Estimate | None) -> float | None:
    if found is None or found.low is None or found.high is None:
        return None
    return (found.high - found.low) / 2


def _length_ratio(cell: Cell, dense: Cell) -> float | None:
    """Output tokens over dense's on the same problems."""
    one, other = cell.answered(), dense.answered()
    both = one.keys() & other.keys()
    base = sum(other[name].output_tokens for name in both)
    return sum(one[name].output_tokens for name in both) / base if base else None


def table(
    rows: Sequence[Mapping[str, Any]],
    dense: Mapping[str, Any],
    title: str = "Policies at equal saving",
) -> Table:
    """The papers' Table II in shape: accuracy, saving over decode steps, throughput; by saving."""
    lines = [_line(row) for row in _by_aim(rows)]
    first = {"policy": "dense", "accuracy": number(dense["accuracy"], form="{:.3f}")}
    columns = dict.fromkeys(lines[0] if lines else first, "")
    notes = [
        "Saved: slots that running requests did without over their positions, averaged over decode "
        "steps, as the server counted. After ±: half of the 95% interval of the difference from "
        "dense on the same problems. Throughput and step time: replayed responses, in turns with "
        "stock SGLang at the same KV slots and flags; steps are compared at equal batches. In "
        "brackets the quartiles of rounds. -: not measured, as replays are at one saving only."
    ]
    return Table("policies", title, [{**columns, **first}, *lines], notes)


def _by_aim(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    def rank(policy: str) -> int:
        return POLICIES.index(policy) if policy in POLICIES else len(POLICIES)

    return sorted(rows, key=lambda row: (row["aim"], rank(row["policy"]), row["policy"]))


def _line(row: Mapping[str, Any]) -> dict[str, str]:
    difference = step = ratio = "-"
    if row["accuracy_difference"] is not None and row["accuracy_error"] is not None:
        difference = f"{100 * row['accuracy_difference']:+.1f} ± {100 * row['accuracy_error']:.1f}"
    if row["step_ms"] is not None:
        step = f"{row['step_ms']:.2f} ({row['dense_step_ms']:.2f})"
    if row["throughput_ratios"]:
        ratio = as_text(spread(row["throughput_ratios"]), 2)
    return {
        "aim": f"{row['aim']:.0%}",
        "policy": words(row["policy"]),
        "saved over steps": number(row["saved"], form="{:.1%}"),
        "at the end": number(row["saved_at_the_end"], form="{:.1%}"),
        "accuracy": number(row["accuracy"], form="{:.3f}"),
        "less than dense, points": difference,
        "length / dense": number(row["length_ratio"], form="{:.2f}"),
        "tokens/s / stock": ratio,
        "step, ms (stock)": step,
        "policy, ms a step": number(row["scheduler_ms"], form="{:.2f}"),
        "reads saved": "" if row["reads_saved"] is None else f"{row['reads_saved']:.1%}",
    }


def picture(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], path: Path) -> None:
    """Accuracy against slots actually freed, a line a policy."""
    made, axes = figure(7.6, 4.8)
    one = axes[0, 0]
    if dense["accuracy"] is not None:
        one.axhline(dense["accuracy"], color=GREY, linestyle="--", linewidth=1, label="dense")
    for policy in dict.fromkeys(row["policy"] for row in _by_aim(rows)):
        points = sorted(
            (100 * row["saved"], row["accuracy"], row["accuracy_error"] or 0.0)
            for row in rows
            if row["policy"] == policy and None not in (row["saved"], row["accuracy"])
        )
        if not points:
            continue
        # A pair has its evictor's colour.
        shares, evictor = parts(policy)
        colour, marker, line = _LOOKS.get(evictor, _OTHER)
        name = {"random": "random sharing", "random_eviction": "random eviction"}.get(policy)
        x, y, error = zip(*points, strict=True)
        one.errorbar(
            x,
            y,
            yerr=error,
            color=colour,
            marker="*" if shares else marker,
            linestyle="--" if shares else line,
            linewidth=1.3,
            markersize=6,
            elinewidth=0.8,
            alpha=0.7 if policy in CONTROLS else 1.0,
            label=text(name or policy),
        )
    one.set_xlabel("KV slots freed, % of what dense holds, over decode steps")
    one.set_ylabel("accuracy (± as of the difference from dense)")
    one.set_ylim(-0.03, 1.06)
    light_grid(one, "both")
    if one.get_legend_handles_labels()[0]:
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)

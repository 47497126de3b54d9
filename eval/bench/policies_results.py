# SPDX-License-Identifier: Apache-2.0
"""Rows, table and picture of ``bench-policies``: a policy at one setting, against dense."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from eval.bench.policies_points import CONTROLS, POLICIES, RANDOM_SHARING, SELECTOR, Point, parts
from eval.bench.policies_runs import Runs, Timing
from eval.measures.accuracy import Estimate, accuracy, compare, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.report.style import GREY, LABEL_SIZE, figure, light_grid, save, text
from eval.runs.folder import Cell

#: A policy and the saving that it aims at.
Aim = tuple[str, float]
_TIMED = (
    "throughput_ratio", "throughput_ratios", "step_ms", "dense_step_ms", "scheduler_ms",
    "mean_running", "dense_mean_running", "reproduced",
)  # fmt: skip
_SHOWN = [
    "aim", "policy", "saved", "saved_at_the_end", "accuracy", "accuracy_difference",
    "accuracy_error", "length_ratio", "throughput_ratio", "step_ms", "dense_step_ms",
    "scheduler_ms", "reads_saved",
]  # fmt: skip
# By place in POLICIES; the last are those of all others.
_COLOURS = [*sns.color_palette("colorblind").as_hex(), "#332288"]
_MARKERS = "s^v<oD>PxXh"


def rows(
    points: Sequence[Point], runs: Runs, timings: Mapping[Aim, Timing]
) -> list[dict[str, Any]]:
    """A row (docs/evaluation.md has its fields) for each point that has answers, in the order of
    tables. What was not measured is None."""
    return [
        row_of(point, runs, timings.get((point.policy, point.aim), {}))
        for point in sorted(points, key=lambda point: (point.aim, _rank(point.policy)))
        if runs.cell(point.method).results()
    ]


def row_of(point: Point, runs: Runs, timed: Timing) -> dict[str, Any]:
    cell, dense = runs.cell(point.method), runs.cell(DENSE)
    held = of_cells([cell])
    results, base = (keyed({0: one.results()}) for one in (cell, dense))
    against, scored = compare(results, base), accuracy(results)
    difference = against.difference if against else None
    mine, theirs = cell.answered(), dense.answered()
    both = mine.keys() & theirs.keys()
    longer, whole = (sum(side[n].output_tokens for n in both) for side in (mine, theirs))
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
        "length_ratio": longer / whole if whole else None,
        "leaked_slots": held.leaked_slots,
        **{name: timed.get(name) for name in _TIMED},
        "throughput_saved": timed.get("saved"),
    }


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
    held, read = (sum(one.get(f"positions_{k}", 0) for one in counts) for k in ("held", "read"))
    return 1 - read / held if held else None


def _half(found: Estimate | None) -> float | None:
    if found is None or found.low is None or found.high is None:
        return None
    return (found.high - found.low) / 2


def _rank(policy: str) -> int:
    return POLICIES.index(policy) if policy in POLICIES else len(POLICIES)


def table(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], title: str) -> str:
    """The papers' Table II in shape, as Markdown; columns are fields of a row."""
    frame = pd.DataFrame([{"policy": DENSE, **dense}, *rows]).reindex(columns=_SHOWN)
    shown = frame.astype(object).where(frame.notna(), None)
    lines = shown.to_markdown(index=False, floatfmt=".3f", missingval="-")
    return f"### {title}\n\n{lines}\n"


def picture(rows: Sequence[Mapping[str, Any]], dense: Mapping[str, Any], path: Path) -> None:
    """Accuracy against slots actually freed, a line a policy."""
    made, axes = figure(7.6, 4.8)
    one = axes[0, 0]
    if dense["accuracy"] is not None:
        one.axhline(dense["accuracy"], color=GREY, linestyle="--", linewidth=1, label="dense")
    columns = ["policy", "saved", "accuracy", "accuracy_error"]
    shown = pd.DataFrame(rows, columns=columns).dropna(subset=["saved", "accuracy"])
    for policy, points in shown.groupby("policy", sort=False):
        # A pair has its evictor's colour.
        shares, evictor = parts(str(policy))
        look = min(_rank(evictor), len(_COLOURS) - 1)
        points = points.sort_values("saved")
        one.errorbar(
            100 * points["saved"],
            points["accuracy"],
            yerr=points["accuracy_error"].astype(float).fillna(0),
            color=_COLOURS[look],
            marker="*" if shares else _MARKERS[look],
            linestyle="--" if shares else ":" if policy in CONTROLS else "-",
            linewidth=1.3,
            markersize=6,
            elinewidth=0.8,
            label=text("random sharing" if policy == RANDOM_SHARING else str(policy)),
        )
    one.set_xlabel("KV slots freed, % of what dense holds, over decode steps")
    one.set_ylabel("accuracy (± as of the difference from dense)")
    one.set_ylim(-0.03, 1.06)
    light_grid(one, "both")
    if one.get_legend_handles_labels()[0]:
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)

# SPDX-License-Identifier: Apache-2.0
"""What methods cost and save, against dense, by class of problem, and by KV budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from eval.measures.accuracy import Estimate, accuracy, compare, differ, mean
from eval.report.data import DENSE, Data
from eval.report.markdown import Table, interval, number, spread, words

#: Of the throughput that memory alone allows, 1 / (1 - saving).
GOAL = 0.9

Key = tuple[str, str, str]


def methods(data: Data) -> Table:
    """Everything about every method, in the order of what it saves."""
    rows = []
    for key, group in _groups(data):
        rows.append(
            [
                *_names(key, group),
                interval(accuracy(data.results[key])),
                spread(group["saving"], "{:.1%}"),
                spread(group["final_saving"], "{:.1%}"),
                spread(group["affected"], "{:.1%}"),
                "resumed" if group["resumed"].any() else spread(group["tokens_per_s"]),
                spread(group["problems_per_min"]),
                f"{spread(group['ttft_p50'], '{:.2f}')} / {spread(group['ttft_p99'], '{:.2f}')}",
                f"{spread(1e3 * group['tpot_p50'])} / {spread(1e3 * group['tpot_p99'])}",
                spread(group["mean_running"]),
                f"{spread(group['mean_slots'], '{:.0f}')} / {spread(group['peak_slots'], '{:.0f}')}",
                interval(mean(data.lengths[key]), "{:.0f}"),
            ]
        )
    columns = (
        "run", "task", "method", "accuracy", "saved, decode steps", "saved, end of response",
        "affected", "tokens/s", "problems/min", "TTFT p50 / p99, s", "TPOT p50 / p99, ms",
        "running", "slots mean / peak", "response tokens",
    )  # fmt: skip
    notes = [
        "Accuracy and response tokens with 95% intervals, a problem as a cluster over its "
        "seeds; others: medians over seeds, in brackets the range. Saved: slots saved over "
        "positions held. Affected: tokens touched by sharing over all tokens. TTFT: from sending "
        "to the first text; TPOT: per output token after the first. Resumed: stopped on the way, "
        "so without a throughput. -: the records do not tell."
    ]
    return Table("methods", "Methods", columns, rows, notes)


def against_dense(data: Data) -> Table | None:
    """Accuracy, throughput and lengths on the same problems."""
    rows = []
    for key, group in _groups(data):
        dense = (*key[:2], DENSE)
        if key[2] == DENSE or dense not in data.results:
            continue
        found = compare(data.results[key], data.results[dense])
        against = ["-"] * 6
        if found is not None:
            against = [
                str(found.pairs),
                interval(found.difference.scaled(100), "{:+.1f}"),
                interval(found.kept),
                str(found.only_dense),
                str(found.only_method),
                f"{found.p_value:.2g}",
            ]
        rows.append(
            [
                *_names(key, group),
                *against,
                spread(speedups(data, key), "{:.2f}"),
                number(_goal(group), form="{:.2f}"),
                interval(_length_ratio(data, key, dense)),
            ]
        )
    columns = (
        "run", "task", "method", "pairs", "difference, points", "accuracy kept",
        "b: only dense right", "c: only method right", "McNemar p", "tokens/s ratio",
        f"{GOAL}/(1 - s)", "response length ratio",
    )  # fmt: skip
    notes = [
        "Pairs: problem and seed. Difference: Wilson limits combined with the pairs' correlation. "
        "Accuracy kept and length ratio: over dense's mean, taken as known. McNemar: exact, "
        "two-sided; it takes pairs as independent. Tokens/s ratio: seed by seed, median and range. "
        f"{GOAL}/(1 - s): what is asked of it where memory bounds the load, s the saving over "
        "decode steps."
    ]
    return Table("against_dense", "Against dense", columns, rows, notes) if rows else None


def classes(data: Data) -> Table | None:
    """Accuracy by class of problem."""
    rows = []
    for key, group in _groups(data):
        results = data.results[key]
        for name in sorted({row.group for row in results.values() if row.group}):
            chosen = {at: row for at, row in results.items() if row.group == name}
            share = interval(accuracy(chosen))
            rows.append([*_names(key, group), words(name), str(len(chosen)), share])
    columns = ("run", "task", "method", "class", "answers", "accuracy")
    return Table("classes", "Accuracy by class of problem", columns, rows) if rows else None


def requests(data: Data) -> Table:
    """What was asked, answered, failed and cut."""
    counts = ("legs", "answered", "graded", "failed", "cut", "retractions", "leaked_slots")
    rows = [
        [*_names(key, group), *(number(group[name].sum(), form="{:.0f}") for name in counts)]
        for key, group in _groups(data)
    ]
    columns = (
        "run", "task", "method", "legs", "answered", "graded", "failed attempts", "cut by length",
        "retractions", "leaked slots",
    )  # fmt: skip
    notes = [
        "Over all seeds. Cut by length: ended at max_tokens, at the model's context or where the "
        "KV slots ended; of a replay, those short of the record."
    ]
    return Table("requests", "Requests", columns, rows, notes)


def budgets(data: Data) -> Table | None:
    """Throughput by the KV slots that servers had, where runs differ in it."""
    rows = []
    for (slots, task, method), group in _by_budget(data).groupby(
        ["kv_slots", "task", "method"], sort=False
    ):
        keys = [(run, task, method) for run in group["run"].unique()]
        ratios = pd.concat([speedups(data, key) for key in keys])
        rows.append(
            [
                f"{slots:,.0f}",
                words(task),
                words(group["title"].iloc[0]),
                spread(group["tokens_per_s"]),
                "1" if method == DENSE else spread(ratios, "{:.2f}"),
                spread(group["saving"], "{:.1%}"),
                spread(group["mean_running"]),
                spread(group["mean_slots"], "{:.0f}"),
                spread(group["retractions"], "{:.0f}"),
                number(pd.Series([_accuracy(data, key) for key in keys]).mean(), form="{:.3f}"),
            ]
        )
    columns = (
        "KV slots", "task", "method", "tokens/s", "over dense", "saved, decode steps", "running",
        "mean slots", "retractions", "accuracy",
    )  # fmt: skip
    notes = ["Medians over runs and seeds, and range."]
    return Table("budgets", "KV budget", columns, rows, notes) if rows else None


def random_ratios(data: Data) -> Table | None:
    """How much random sharing was found to save as much as another method."""
    rows = [
        [
            words(run),
            words(at),
            number(found["ratio"], form="{:.4f}"),
            number(found["target"], form="{:.1%}"),
            ", ".join(f"{saving:.1%} at {ratio:g}" for ratio, saving in found["pilots"]),
        ]
        for run, config in data.configs.items()
        for at, found in config.get("random_ratios", {}).items()
    ]
    columns = ("run", "task/method", "ratio", "saving to match", "pilots")
    title = "Random sharing at equal saving"
    return Table("random_ratios", title, columns, rows) if rows else None


def speedups(data: Data, key: Key) -> pd.Series:
    """Tokens/s over dense's, for each seed that both have."""
    rows = data.cells[(data.cells["run"] == key[0]) & (data.cells["task"] == key[1])]
    by_seed = rows.pivot(index="seed", columns="method", values="tokens_per_s").astype(float)
    if DENSE not in by_seed or key[2] not in by_seed:
        return pd.Series(dtype=float)
    return by_seed[key[2]] / by_seed[DENSE]


def _groups(data: Data) -> Iterator[tuple[Key, pd.DataFrame]]:
    """Cells by run, task and method; methods in the order of what they save."""
    for (run, task), cells in data.cells.groupby(["run", "task"], sort=False):
        saving = cells.groupby("method", sort=False)["saving"].median().astype(float)
        for method in saving.fillna(0.0).sort_values(kind="stable").index:
            yield (run, task, method), cells[cells["method"] == method]


def _by_budget(data: Data) -> pd.DataFrame:
    """Cells of tasks that were run with several numbers of KV slots, fewest first."""
    asked = {run for run, config in data.configs.items() if config.get("kv_budget")}
    cells = data.cells[data.cells["run"].isin(asked)]
    if cells.empty:
        return cells
    several = cells.groupby("task")["kv_slots"].transform("nunique") > 1
    return cells[several].sort_values("kv_slots", kind="stable")


def _names(key: Key, group: pd.DataFrame) -> Sequence[str]:
    return words(key[0]), words(key[1]), words(group["title"].iloc[0])


def _accuracy(data: Data, key: Key) -> float | None:
    found = accuracy(data.results[key])
    return found.value if found else None


def _goal(group: pd.DataFrame) -> float | None:
    saving = group["saving"].dropna().astype(float)
    return None if saving.empty else GOAL / (1 - saving.median())


def _length_ratio(data: Data, key: Key, dense: Key) -> Estimate | None:
    keys = [at for at in data.lengths[dense] if at in data.lengths[key]]
    base = mean({at: data.lengths[dense][at] for at in keys})
    sides = ({at: data.lengths[side][at] for at in keys} for side in (key, dense))
    difference = differ(*sides)
    return difference.scaled(1 / base.value, 1.0) if difference and base and base.value else None

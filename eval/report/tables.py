# SPDX-License-Identifier: Apache-2.0
"""What methods cost and save, against dense, by class of problem and KV budget, in Markdown."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.jsonl import one_line
from eval.measures.accuracy import Estimate, Key, accuracy, compare, differ, keyed, mean
from eval.measures.figures import figures
from eval.methods import DENSE
from eval.runs.folder import Result, cells, read_config

#: Run, task and method.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Data:
    """Everything that a report needs of some runs; ``results`` and ``lengths`` (output tokens of
    complete responses) are by run, task and method, over all seeds."""

    # A row a cell: where, title, Figures, kv_slots, legs, answered, graded, cut.
    cells: pd.DataFrame
    timeline: pd.DataFrame  # rows of cells' logs: run, task, method, seed, and Moment
    results: Mapping[Place, Mapping[Key, Result]]
    lengths: Mapping[Place, Mapping[Key, float]]
    configs: Mapping[str, Mapping[str, Any]]  # by run


def load(folders: Sequence[Path]) -> Data:
    """Read run folders. Raises RunError: one is no run folder, or has a broken file."""
    rows: list[dict[str, Any]] = []
    moments: list[dict[str, Any]] = []
    results: dict[Place, dict[Key, Result]] = {}
    lengths: dict[Place, dict[Key, float]] = {}
    configs = {_label(folder, folders): read_config(folder) for folder in folders}
    for run, folder in zip(configs, folders, strict=True):
        details = configs[run].get("method_details", {})
        for cell in cells(folder):
            responses, legs, timeline = cell.responses(), cell.legs(), cell.timeline()
            graded, answered = cell.results(), cell.answered()
            where = {"run": run, "task": cell.task, "method": cell.method, "seed": cell.seed}
            slots = [leg.kv_slots for leg in legs if leg.kv_slots]
            # A replay always ends by length: those that reproduce the record are not cut.
            whole = {row.problem_id for row in graded if row.correct and "_replay" in cell.task}
            cut = [n for n, r in answered.items() if r.finish_reason == "length" and n not in whole]
            title = details.get(cell.method, {}).get("title", cell.method)
            row = {**where, "title": title, **vars(figures(responses, legs, timeline))}
            row["kv_slots"] = min(slots, default=configs[run].get("kv_budget"))
            row["legs"] = len({leg.leg for leg in legs} | {one.leg for one in responses})
            row |= dict(answered=len(answered), graded=len(graded), cut=len(cut))
            rows.append(row)
            moments += [{**where, **vars(moment)} for moment in timeline]
            key = (run, cell.task, cell.method)
            results.setdefault(key, {}).update(keyed({cell.seed: graded}))
            tokens = {(n, cell.seed): float(r.output_tokens) for n, r in answered.items()}
            lengths.setdefault(key, {}).update(tokens)
    frame = pd.DataFrame(rows)
    return Data(frame, pd.DataFrame(moments), results, lengths, configs)


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, with its parent's where others have the same."""
    path = folder.resolve()
    alone = sum(other.resolve().name == path.name for other in folders) == 1
    return path.name if alone else f"{path.parent.name}/{path.name}"


# An underscore inside a word is none of emphasis.
_SPECIAL = re.compile(r"[\\`*{}\[\]<>#|~$&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")
_MAX_CHARS = 160


@dataclass(frozen=True)
class Table:
    """A table of a document; ``rows`` by column, and ``notes`` under it, are safe Markdown.
    ``name`` is its key in ``summary.json``."""

    name: str
    title: str
    rows: Sequence[Mapping[str, str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        columns = list(self.rows[0]) if self.rows else []
        lines = [columns, ["---"] * len(columns), *(row.values() for row in self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"### {self.title}", text, *self.notes]) + "\n"


def words(text: str) -> str:
    """Text as it is, whatever it holds: one line, shortened, nothing in it is Markdown or HTML."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", one_line(text, _MAX_CHARS))


def number(value: float | None, form: str = "{:.1f}") -> str:
    """``-`` where there is none."""
    return "-" if value is None or pd.isna(value) else form.format(value)


def interval(estimate: Estimate | None, form: str = "{:.3f}") -> str:
    if estimate is None:
        return "-"
    text = form.format(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        text += f" ({form.format(estimate.low)} to {form.format(estimate.high)})"
    return text


def spread(values: pd.Series, form: str = "{:.1f}") -> str:
    """A median, and the range where there are several."""
    known = values.dropna().astype(float)
    if known.empty:
        return "-"
    middle, low, high = (form.format(v) for v in (known.median(), known.min(), known.max()))
    return middle if low == high else f"{middle} ({low} to {high})"


#: The share asked for of the throughput that memory alone allows, 1 / (1 - saving).
GOAL = 0.9


def methods(data: Data) -> Table:
    """Everything about every method, in the order of what it saves."""
    rows = [
        {
            **_names(key, group),
            "accuracy": interval(accuracy(data.results[key])),
            "saved, decode steps": spread(group["saving"], "{:.1%}"),
            "saved, end of response": spread(group["final_saving"], "{:.1%}"),
            "affected": spread(group["affected"], "{:.1%}"),
            "tokens/s": "resumed" if group["resumed"].any() else spread(group["tokens_per_s"]),
            "problems/min": spread(group["problems_per_min"]),
            "TTFT p50 / p99, s": _two(group["ttft_p50"], group["ttft_p99"], "{:.2f}"),
            "TPOT p50 / p99, ms": _two(1e3 * group["tpot_p50"], 1e3 * group["tpot_p99"]),
            "running": spread(group["mean_running"]),
            "slots mean / peak": _two(group["mean_slots"], group["peak_slots"], "{:.0f}"),
            "response tokens": interval(mean(data.lengths[key]), "{:.0f}"),
        }
        for key, group in _groups(data)
    ]
    notes = [
        "Accuracy and response tokens with 95% intervals, a problem as a cluster over its "
        "seeds; others: medians over seeds, in brackets the range. Saved: slots saved over "
        "positions held. Affected: tokens touched by sharing over all tokens. TTFT: from sending "
        "to the first text; TPOT: per output token after the first. Resumed: stopped on the way, "
        "so without a throughput. -: the records do not tell."
    ]
    return Table("methods", "Methods", rows, notes)


def against_dense(data: Data) -> Table | None:
    rows = []
    for key, group in _groups(data):
        dense = (*key[:2], DENSE)
        if key[2] == DENSE or dense not in data.results:
            continue
        found = compare(data.results[key], data.results[dense])
        points = found.difference.scaled(100) if found else None
        saving = group["saving"].dropna().astype(float)
        row = {
            **_names(key, group),
            "pairs": str(found.pairs) if found else "-",
            "difference, points": interval(points, "{:+.1f}"),
            "accuracy kept": interval(found.kept if found else None),
            "b: only dense right": str(found.only_dense) if found else "-",
            "c: only method right": str(found.only_method) if found else "-",
            "McNemar p": f"{found.p_value:.2g}" if found else "-",
            "tokens/s ratio": spread(speedups(data, key), "{:.2f}"),
            f"{GOAL}/(1 - s)": number(GOAL / (1 - saving.median()), form="{:.2f}"),
            "response length ratio": interval(_length_ratio(data, key, dense)),
        }
        rows.append(row)
    notes = [
        "Pairs: problem and seed. Difference: Wilson limits combined with the pairs' correlation. "
        "Accuracy kept and length ratio: over dense's mean, taken as known. McNemar: exact, "
        "two-sided; it takes pairs as independent. Tokens/s ratio: seed by seed, median and range. "
        f"{GOAL}/(1 - s): what is asked of it where memory bounds the load, s the saving over "
        "decode steps."
    ]
    return Table("against_dense", "Against dense", rows, notes) if rows else None


def classes(data: Data) -> Table | None:
    rows = []
    for key, group in _groups(data):
        results = data.results[key]
        for name in sorted({row.group for row in results.values() if row.group}):
            chosen = {at: row for at, row in results.items() if row.group == name}
            counts = {"class": words(name), "answers": str(len(chosen))}
            share = interval(accuracy(chosen))
            rows.append({**_names(key, group), **counts, "accuracy": share})
    return Table("classes", "Accuracy by class of problem", rows) if rows else None


def requests(data: Data) -> Table:
    counts = {name: name for name in ("legs", "answered", "graded")}
    counts |= {"failed attempts": "failed", "cut by length": "cut", "retractions": "retractions"}
    counts |= {"leaked slots": "leaked_slots"}
    rows = [
        {
            **_names(key, group),
            **{name: number(group[of].sum(), form="{:.0f}") for name, of in counts.items()},
        }
        for key, group in _groups(data)
    ]
    notes = [
        "Over all seeds. Cut by length: ended at max_tokens, at the model's context or where the "
        "KV slots ended; of a replay, those short of the record."
    ]
    return Table("requests", "Requests", rows, notes)


def budgets(data: Data) -> Table | None:
    """Throughput by the KV slots that servers had, where runs differ in it."""
    rows = []
    by = ["kv_slots", "task", "method"]
    for (slots, task, method), group in _by_budget(data).groupby(by, sort=False):
        keys = [(run, task, method) for run in group["run"].unique()]
        ratios = pd.concat([speedups(data, key) for key in keys])
        found = [one.value for key in keys if (one := accuracy(data.results[key]))]
        row = {
            "KV slots": f"{slots:,.0f}",
            "task": words(task),
            "method": words(group["title"].iloc[0]),
            "tokens/s": spread(group["tokens_per_s"]),
            "over dense": "1" if method == DENSE else spread(ratios, "{:.2f}"),
            "saved, decode steps": spread(group["saving"], "{:.1%}"),
            "running": spread(group["mean_running"]),
            "mean slots": spread(group["mean_slots"], "{:.0f}"),
            "retractions": spread(group["retractions"], "{:.0f}"),
            "accuracy": number(pd.Series(found, dtype=float).mean(), form="{:.3f}"),
        }
        rows.append(row)
    note = "Medians over runs and seeds, and range."
    return Table("budgets", "KV budget", rows, [note]) if rows else None


def random_ratios(data: Data) -> Table | None:
    """How much random sharing was found to save as much as another method."""
    rows = [
        {
            "run": words(run),
            "task/method": words(at),
            "ratio": number(found["ratio"], form="{:.4f}"),
            "saving to match": number(found["target"], form="{:.1%}"),
            "pilots": ", ".join(f"{saving:.1%} at {ratio:g}" for ratio, saving in found["pilots"]),
        }
        for run, config in data.configs.items()
        for at, found in config.get("random_ratios", {}).items()
    ]
    return Table("random_ratios", "Random sharing at equal saving", rows) if rows else None


def speedups(data: Data, key: Place) -> pd.Series:
    """Tokens/s over dense's, for each seed that both have."""
    rows = data.cells[(data.cells["run"] == key[0]) & (data.cells["task"] == key[1])]
    by_seed = rows.pivot(index="seed", columns="method", values="tokens_per_s").astype(float)
    if DENSE not in by_seed or key[2] not in by_seed:
        return pd.Series(dtype=float)
    return by_seed[key[2]] / by_seed[DENSE]


def _groups(data: Data) -> Iterator[tuple[Place, pd.DataFrame]]:
    """Cells by run, task and method; methods in the order of what they save."""
    for (run, task), rows in data.cells.groupby(["run", "task"], sort=False):
        saving = rows.groupby("method", sort=False)["saving"].median().astype(float)
        for method in saving.fillna(0.0).sort_values(kind="stable").index:
            yield (run, task, method), rows[rows["method"] == method]


def _by_budget(data: Data) -> pd.DataFrame:
    """Cells of tasks that were run with several numbers of KV slots, fewest first."""
    asked = {run for run, config in data.configs.items() if config.get("kv_budget")}
    cells = data.cells[data.cells["run"].isin(asked)]
    if cells.empty:
        return cells
    several = cells.groupby("task")["kv_slots"].transform("nunique") > 1
    return cells[several].sort_values("kv_slots", kind="stable")


def _names(key: Place, group: pd.DataFrame) -> dict[str, str]:
    names = (*key[:2], group["title"].iloc[0])
    return dict(zip(("run", "task", "method"), map(words, names), strict=True))


def _two(one: pd.Series, other: pd.Series, form: str = "{:.1f}") -> str:
    return f"{spread(one, form)} / {spread(other, form)}"


def _length_ratio(data: Data, key: Place, dense: Place) -> Estimate | None:
    keys = [at for at in data.lengths[dense] if at in data.lengths[key]]
    base = mean({at: data.lengths[dense][at] for at in keys})
    sides = ({at: data.lengths[side][at] for at in keys} for side in (key, dense))
    difference = differ(*sides)
    return difference.scaled(1 / base.value, 1.0) if difference and base and base.value else None


#: Tables of a report in their order; each is None where there is nothing to say.
ALL: tuple[Callable[[Data], Table | None], ...] = (
    methods, against_dense, classes, requests, budgets, random_ratios,
)  # fmt: skip

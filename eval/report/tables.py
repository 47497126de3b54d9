# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown: what methods cost and save, and how they differ from dense (stock SGLang)."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.jsonl import one_line
from eval.measures.accuracy import Estimate, Key, accuracy, compare, differ, keyed, mean
from eval.measures.figures import of_cell
from eval.methods import DENSE
from eval.runs.folder import Result, cells, read_config

#: Run, task and method.
Place = tuple[str, str, str]


@dataclass(frozen=True)
class Data:
    """A report's data. A cell is one method on one task and seed; ``results`` and ``texts`` join all seeds."""

    cells: pd.DataFrame  # per cell: run, task, method, seed, Figures' fields, answered, graded, cut
    timeline: pd.DataFrame  # per logged decode line: run, task, method, seed, Moment's fields
    results: Mapping[Place, Mapping[Key, Result]]
    texts: Mapping[Place, Mapping[Key, str]]  # complete responses
    configs: Mapping[str, Mapping[str, Any]]  # by run


def load(folders: Sequence[Path]) -> Data:
    """Read run folders. Raises RunError if a folder is no run folder or has a broken file."""
    rows: list[dict[str, Any]] = []
    moments: list[dict[str, Any]] = []
    results: dict[Place, dict[Key, Result]] = defaultdict(dict)
    texts: dict[Place, dict[Key, str]] = defaultdict(dict)
    configs = {str(folder): read_config(folder) for folder in folders}
    for run, folder in zip(configs, folders, strict=True):
        for cell in cells(folder):
            graded = cell.results()
            answered = cell.answered()
            where = {"run": run, "task": cell.task, "method": cell.method, "seed": cell.seed}
            # A replay always ends with reason "length". If it reproduces the record, it does not count as cut.
            whole = {row.problem_id for row in graded if row.correct and "_replay" in cell.task}
            cut = [n for n, r in answered.items() if r.finish_reason == "length" and n not in whole]
            counts = dict(answered=len(answered), graded=len(graded), cut=len(cut))
            rows.append({**where, **vars(of_cell(cell)), **counts})
            moments += [{**where, **vars(moment)} for moment in cell.timeline()]
            key = (run, cell.task, cell.method)
            results[key] |= keyed({cell.seed: graded})
            texts[key] |= {(name, cell.seed): row.text for name, row in answered.items()}
    return Data(pd.DataFrame(rows), pd.DataFrame(moments), results, texts, configs)


# Characters that Markdown or HTML interprets. Underscores inside words are not included: they mark no emphasis.
_SPECIAL = re.compile(r"[\\`*{}\[\]<>#|~$&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")
_MAX_CHARS = 160


@dataclass(frozen=True)
class Table:
    """A table of a report. ``rows`` map column names to text. This text and the ``note`` under the table are
    Markdown and need no escaping. ``name`` is the table's key in ``summary.json``."""

    name: str
    title: str
    rows: Sequence[Mapping[str, str]]
    note: str = ""

    def markdown(self) -> str:
        text = pd.DataFrame(self.rows).to_markdown(index=False, disable_numparse=True)
        return f"### {self.title}\n\n{text}\n\n{self.note}".rstrip() + "\n"


def words(text: str) -> str:
    """Converts any text into one short line, escaped so that nothing in it acts as Markdown or HTML."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", one_line(text, _MAX_CHARS))


def interval(estimate: Estimate | None, form: str = "{:.3f}") -> str:
    if estimate is None:
        return "-"
    text = form.format(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        text += f" ({form.format(estimate.low)} to {form.format(estimate.high)})"
    return text


def spread(values: pd.Series, form: str = "{:.1f}") -> str:
    """The median, with the range if values differ; ``-`` if there are no values."""
    numbers = values.dropna().astype(float)
    if numbers.empty:
        return "-"
    middle, low, high = (form.format(v) for v in (numbers.median(), numbers.min(), numbers.max()))
    return middle if low == high else f"{middle} ({low} to {high})"


def methods(data: Data) -> Table:
    """Accuracy, savings, speed and memory of each method, in the order of :func:`groups`."""
    rows = [
        {
            **_names(key),
            "accuracy": interval(accuracy(data.results[key])),
            "saved, decode steps": spread(group["saving"], "{:.1%}"),
            "saved, end of response": spread(group["final_saving"], "{:.1%}"),
            "affected": spread(group["affected"], "{:.1%}"),
            "tokens/s": spread(group["tokens_per_s"]),
            "TTFT p50 / p99, s": _two(group["ttft_p50"], group["ttft_p99"], "{:.2f}"),
            "TPOT p50 / p99, ms": _two(1e3 * group["tpot_p50"], 1e3 * group["tpot_p99"]),
            "CPU, ms a token": spread(1e3 * group["cpu_per_token"], "{:.2f}"),
            "running / while others wait": _two(
                group["mean_running"], group["running_while_waiting"], "{:.1f}"
            ),
            "slots mean / peak": _two(group["mean_slots"], group["peak_slots"], "{:.0f}"),
            "response tokens": interval(mean(_lengths(data, key)), "{:.0f}"),
        }
        for key, group in groups(data)
    ]
    note = (
        "Accuracy and response tokens have 95% intervals; a problem is a cluster over its seeds. "
        "Other figures are medians over seeds, with the range in brackets. Saved: slots saved over "
        "positions held. While others wait: only decode steps at which requests wait, so that the "
        "last responses do not count. Affected: tokens touched by sharing over all tokens. TTFT: from "
        "sending to first text. TPOT: per output token after the first. -: not in the records."
    )
    return Table("methods", "Methods", rows, note)


def against_dense(data: Data) -> Table | None:
    rows = []
    for key, _ in groups(data):
        dense = (*key[:2], DENSE)
        if key[2] == DENSE or dense not in data.results:
            continue
        comparison = compare(data.results[key], data.results[dense])
        if comparison is None:
            continue
        row = {
            **_names(key),
            "pairs": str(comparison.pairs),
            "as dense": _same_texts(data.texts[key], data.texts[dense]),
            "difference, points": interval(comparison.difference.scaled(100), "{:+.1f}"),
            "accuracy kept": interval(comparison.kept),
            "b: only dense right": str(comparison.only_dense),
            "c: only method right": str(comparison.only_method),
            "McNemar p": f"{comparison.p_value:.2g}",
            "tokens/s ratio": spread(_speedups(data, key), "{:.2f}"),
            "response length ratio": interval(_length_ratio(data, key, dense)),
        }
        rows.append(row)
    note = (
        "A pair is a problem and a seed. As dense: responses equal word for word. Difference: Wilson limits "
        "combined with the pairs' correlation. Accuracy kept and length ratio are over dense's mean, taken as "
        "known. McNemar: exact, two-sided; it assumes independent pairs. Tokens/s ratio: of each seed, median "
        "and range."
    )
    return Table("against_dense", "Against dense", rows, note) if rows else None


def samples(data: Data) -> Table | None:
    """The table of the tasks that ask each problem several times."""
    rows = [
        {
            **_names(key),
            "majorities right": f"{majority(data.results[key].values()):.3f}",
            "of the saving across": spread(group["across"], "{:.1%}"),
        }
        for key, group in groups(data)
        if re.search(r"_x\d+$", key[1]) and data.results[key]
    ]
    note = "Across: slots that another response to the same prompt lends, over decode steps."
    return Table("samples", "Samples of one prompt", rows, note) if rows else None


def majority(results: Iterable[Result]) -> float:
    """For problems asked several times: the share whose most frequent answer is right. Among equally frequent
    answers the first counts."""
    answers: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
    right: dict[tuple[str, str | None], bool] = {}
    for row in results:
        problem = row.problem_id.rpartition(".")[0]
        answers[problem][row.extracted] += 1
        right[problem, row.extracted] = row.correct
    return statistics.mean(
        right[problem, counts.most_common(1)[0][0]] for problem, counts in answers.items()
    )


def requests(data: Data) -> Table:
    counts = {"answered": "answered", "graded": "graded", "failed attempts": "failed"}
    counts |= {"cut by length": "cut", "retractions": "retractions", "leaked slots": "leaked_slots"}
    counts |= {"missed blocks": "missed"}
    rows = [
        {**_names(key), **{name: f"{group[of].sum():.0f}" for name, of in counts.items()}}
        for key, group in groups(data)
    ]
    note = (
        "Sums over all seeds. Cut by length: ended by max_tokens, the model's context or the number of KV "
        "slots; replays count only if they are shorter than the record. Missed: blocks that repeat, but "
        "could not share when SGLang ran short of slots."
    )
    return Table("requests", "Requests", rows, note)


def groups(data: Data) -> Iterator[tuple[Place, pd.DataFrame]]:
    """Cells by run, task and method. In each run and task, the method that saves least comes first."""
    for (run, task), rows in data.cells.groupby(["run", "task"], sort=False):
        saving = rows.groupby("method", sort=False)["saving"].median().astype(float)
        for method in saving.fillna(0.0).sort_values(kind="stable").index:
            yield (run, task, method), rows[rows["method"] == method]


def _speedups(data: Data, key: Place) -> pd.Series:
    """The method's tokens/s divided by dense's, for each seed that was measured with both methods."""
    rows = data.cells[(data.cells["run"] == key[0]) & (data.cells["task"] == key[1])]
    by_seed = rows.pivot(index="seed", columns="method", values="tokens_per_s").astype(float)
    return by_seed[key[2]] / by_seed[DENSE]


def _names(key: Place) -> dict[str, str]:
    return dict(zip(("run", "task", "method"), map(words, key), strict=True))


def _two(left: pd.Series, right: pd.Series, form: str = "{:.1f}") -> str:
    return f"{spread(left, form)} / {spread(right, form)}"


def _lengths(data: Data, key: Place) -> dict[Key, float]:
    """Output tokens of complete responses."""
    return {at: row.output_tokens for at, row in data.results[key].items() if row.output_tokens}


def _same_texts(ours: Mapping[Key, str], dense: Mapping[Key, str]) -> str:
    same = [ours[at] == dense[at] for at in ours.keys() & dense.keys()]
    return f"{statistics.mean(same):.3f}" if same else "-"


def _length_ratio(data: Data, key: Place, dense: Place) -> Estimate | None:
    ours = _lengths(data, key)
    base = _lengths(data, dense)
    both = ours.keys() & base.keys()
    ours, base = ({at: lengths[at] for at in base if at in both} for lengths in (ours, base))
    difference = differ(ours, base)
    stock = mean(base)
    return difference.scaled(1 / stock.value, 1.0) if difference and stock else None


#: Functions that make the tables of a report, in order. A function returns None if it has nothing to show.
ALL: tuple[Callable[[Data], Table | None], ...] = (methods, against_dense, samples, requests)

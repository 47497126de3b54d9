# SPDX-License-Identifier: Apache-2.0
"""The papers' Tables I to IV in their shape, with our numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eval.measures.interval import Spread
from eval.report.data import DENSE, RANDOM, REASONCACHE, Group, Run
from eval.report.markdown import Entry, Table, number, plain, share, spread, words
from eval.tasks.registry import TASKS

#: Rows of Table I; other methods are in Table II.
MAIN = (DENSE, REASONCACHE, "memshare", RANDOM)
STAGES = (DENSE, "cosine", "cosine-structure", REASONCACHE)
#: Percentiles, then encoders, distance and threshold.
PERCENTILES = {"p20": 20, "p50": 50, "p80": 80, "p100": 100}
VARIANTS = (
    DENSE,
    *PERCENTILES,
    REASONCACHE,
    "embedding",
    "sentence-bert",
    "cosine-distance",
    "fixed-0.8",
    "fixed-0.9",
    "memshare",
    "memshare-0.9",
)
#: Savings that differ by less than this share of ReasonCache's are alike.
LIKE = 0.1
_AVERAGES = (
    "Accuracy with 95% interval; tokens/s: median over seeds and range. Averages are plain means "
    "over tasks; AMSR is the average memory saving ratio: slots saved over positions held, over "
    "decode steps."
)


def select(run: Run, methods: Sequence[str], variants: bool = False) -> list[str]:
    """The begun methods of a run among ``methods``, in their order, then those with options.

    A method with options (``random:match=reasoncache``) is one of ``methods`` if its name
    is random, whose share always has to be set, or if ``variants`` are asked for.
    """
    begun = list(dict.fromkeys(method for _, method in run.groups))
    found = [method for method in methods if method in begun]
    for method in begun:
        name, options, _ = method.partition(":")
        if options and name in methods and (variants or name == RANDOM):
            found.append(method)
    return found


def wide(
    name: str,
    title: str,
    runs: Sequence[Run],
    methods: Sequence[str],
    variants: bool = False,
    note: str = "",
) -> Table | None:
    """Models and methods down, tasks across; None if no run has one of the sharing methods."""
    rows: list[list[Entry]] = []
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    for run in runs:
        present = select(run, methods, variants)
        if not set(present) - {DENSE}:
            continue
        for method in present:
            rows.append(
                [words(run.model), words(run.label), words(run.title(method))]
                + [entry for task in tasks for entry in _accuracy_and_speed(run, task, method)]
                + _averages(run, method)
            )
    if not rows:
        return None
    columns = ["model", "run", "method"]
    columns += [f"{plain(task)}: {what}" for task in tasks for what in (_score(task), "tokens/s")]
    columns += ["average accuracy", "average tokens/s", "AMSR"]
    begun = {key[1].partition(":")[0] for run in runs for key in run.groups}
    lacking = [method for method in methods if method not in begun]
    notes = [_AVERAGES]
    if note:
        notes.append(note)
    if lacking:
        notes.append(f"Not run: {', '.join(map(plain, lacking))}.")
    return Table(name, title, columns, rows, notes)


def all_methods(runs: Sequence[Run]) -> Table | None:
    """Table II: everything about every method, in the order of what it saves."""
    rows, notes = [], []
    for run in runs:
        for task in run.tasks:
            found = [group for (name, _), group in run.groups.items() if name == task]
            found.sort(key=lambda group: _saving(group) or 0.0)
            rows += [_full_row(run, group) for group in found]
            if like := _alike(run, found):
                notes.append(like)
    columns = (
        "run", "task", "method", "accuracy", "saved, decode steps", "saved, end of response",
        "affected", "tokens/s", "problems/min", "TTFT p50 / p99, s", "TPOT p50 / p99, ms",
        "running", "slots mean / peak", "retractions", "response tokens",
    )  # fmt: skip
    notes.append(
        "Medians over seeds, in brackets the range. Affected: tokens touched by sharing over all "
        "tokens. TTFT: from sending to the first text; TPOT: per output token after the first."
    )
    if not rows:
        return None
    return Table("table_2", "Table II: all methods, by memory saved", columns, rows, notes)


def _full_row(run: Run, group: Group) -> list[Entry]:
    at = f"{group.task}, {group.method}"
    no_report = f"no server report with this figure ({at})"
    no_leg, no_line = f"no leg record ({at})", f"no timeline ({at})"
    no_speed = group.no_speed()
    no_text = f"no complete response ({at})"
    lengths = group.lengths
    return [
        words(run.label),
        words(group.task),
        words(run.title(group.method)),
        share(group.accuracy, f"no grades ({at})"),
        spread(group.memory("saving"), no_report, "{:.1%}"),
        spread(group.memory("final_saving"), no_report, "{:.1%}"),
        spread(group.memory("affected"), no_report, "{:.1%}"),
        spread(group.speed("tokens_per_s"), no_speed),
        spread(group.speed("problems_per_min"), no_speed),
        _two(group.speed("ttft_p50"), group.speed("ttft_p99"), no_text, 1, "{:.2f}"),
        _two(group.speed("tpot_p50"), group.speed("tpot_p99"), no_text, 1000, "{:.1f}"),
        spread(group.speed("mean_running"), no_line),
        _two(group.memory("mean_slots"), group.memory("peak_slots"), no_line, 1, "{:.0f}"),
        spread(group.memory("retractions"), no_leg, "{:.0f}"),
        number(lengths.mean.value if lengths else None, no_text, "{:.0f}"),
    ]


def _two(one: Spread | None, other: Spread | None, why: str, scale: float, form: str) -> Entry:
    if one is None or other is None:
        return Entry("-", None, why)
    values = [one.median * scale, other.median * scale]
    return Entry(" / ".join(map(form.format, values)), values)


def _alike(run: Run, found: Sequence[Group]) -> str:
    """Which methods save about as much as ReasonCache at the end of a response.

    That is what random sharing is made to match; over decode steps it saves otherwise.
    """
    own = next((_final_saving(group) for group in found if group.method == REASONCACHE), None)
    if not own:
        return ""
    if not any(_final_saving(group) for group in found if group.method != REASONCACHE):
        return ""
    like = [
        f"{plain(run.title(group.method))} ({saving:.1%})"
        for group in found
        if group.method != REASONCACHE
        and (saving := _final_saving(group)) is not None
        and abs(saving - own) <= LIKE * own
    ]
    return (
        f"{plain(run.label)}, {plain(found[0].task)}: at like saving at the end of a response "
        f"(within {LIKE:.0%} of ReasonCache's {own:.1%}): {', '.join(like) or 'none'}."
    )


def _saving(group: Group) -> float | None:
    spread_of = group.memory("saving")
    return None if spread_of is None else spread_of.median


def _final_saving(group: Group) -> float | None:
    spread_of = group.memory("final_saving")
    return None if spread_of is None else spread_of.median


def _score(task: str) -> str:
    """What the mean score of a task is."""
    return TASKS[task].measure if task in TASKS else "accuracy"


def _accuracy_and_speed(run: Run, task: str, method: str) -> list[Entry]:
    group = run.groups.get((task, method))
    at = f"{task}, {method}"
    if group is None:
        return [Entry("-", None, f"not run: {at} in {run.label}")] * 2
    return [
        share(group.accuracy, f"no grades ({at})"),
        spread(group.speed("tokens_per_s"), group.no_speed()),
    ]


def _averages(run: Run, method: str) -> list[Entry]:
    """Accuracy, tokens/s with the gain over dense, and saving, each averaged over tasks."""
    groups = [run.groups.get((task, method)) for task in run.tasks]
    dense = [run.groups.get((task, DENSE)) for task in run.tasks]
    why = f"{method} lacks a task of {run.label}"
    scores = [group.accuracy.value if group and group.accuracy else None for group in groups]
    speed, base = _mean(map(_tokens_per_s, groups)), _mean(map(_tokens_per_s, dense))
    text = "" if speed is None or not base or method == DENSE else f" ({speed / base - 1:+.0%})"
    saving = _mean(_saving(group) if group else None for group in groups)
    speed_entry = number(speed, why)
    return [
        number(_mean(scores), why, "{:.3f}"),
        Entry(speed_entry.text + text, speed, speed_entry.why),
        number(saving, f"no server report with a saving ratio ({method}, {run.label})", "{:.1%}"),
    ]


def _tokens_per_s(group: Group | None) -> float | None:
    found = group.speed("tokens_per_s") if group else None
    return found.median if found else None


def _mean(values: object) -> float | None:
    known = list(values)  # type: ignore[call-overload]
    return None if not known or None in known else statistics.fmean(known)

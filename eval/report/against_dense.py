# SPDX-License-Identifier: Apache-2.0
"""Every method against dense on the same problems, and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eval.measures import accuracy, length
from eval.measures.interval import Spread
from eval.report.data import DENSE, Group, Run
from eval.report.markdown import Entry, Table, number, share, signed, spread, words

#: Of the throughput that memory alone allows, 1 / (1 - saving).
GOAL = 0.9


def quality(runs: Sequence[Run]) -> Table | None:
    """Accuracy against dense, paired."""
    rows = []
    for run, group, dense in _pairs(runs):
        found = accuracy.compare(group.results, dense.results)
        why = f"no problem graded for both ({group.task}, {group.method})"
        rows.append([words(run.label), words(group.task), words(run.title(group.method))])
        if found is None:
            rows[-1] += [Entry("-", None, why)] * 6
            continue
        rows[-1] += [
            number(found.pairs, form="{:d}"),
            signed(found.difference),
            share(found.kept, f"dense scores 0 ({group.task})"),
            number(found.only_dense, form="{:d}"),
            number(found.only_method, form="{:d}"),
            Entry(_p_text(found.p_value), found.p_value),
        ]
    columns = (
        "run", "task", "method", "pairs", "difference, points", "accuracy kept",
        "b: only dense right", "c: only method right", "McNemar p",
    )  # fmt: skip
    notes = [
        "Pairs: problem and seed. Intervals (95%) take a problem as a cluster over its seeds: "
        "Wilson limits at the effective sample size, combined by Newcombe's square-and-add (MOVER) "
        "with the pairs' correlation. Accuracy kept: ratio to dense. McNemar: exact, two-sided; it "
        "takes pairs as independent."
    ]
    return Table("against_dense", "Accuracy against dense", columns, rows, notes) if rows else None


def speed(runs: Sequence[Run]) -> Table | None:
    """Throughput and lengths against dense."""
    rows = []
    for run, group, dense in _pairs(runs):
        at = f"{group.task}, {group.method}"
        ratio = Spread.of(group.speedups(dense))
        saving = group.memory("saving")
        goal = GOAL / (1 - saving.median) if saving and saving.median < 1 else None
        met = None if ratio is None or goal is None else ratio.median >= goal
        lengths = length.compare(group.responses, dense.responses)
        right = length.compare(
            length.correct_only(group.responses, group.results, dense.results),
            length.correct_only(dense.responses, group.results, dense.results),
        )
        rows.append(
            [
                words(run.label),
                words(group.task),
                words(run.title(group.method)),
                spread(ratio, _no_ratio(group, dense), "{:.2f}"),
                number(goal, f"no saving ratio ({at})", "{:.2f}"),
                Entry("-", None, f"no ratio or goal ({at})")
                if met is None
                else Entry("yes" if met else "no", met),
                share(
                    lengths.ratio if lengths else None, f"no response to a problem of dense ({at})"
                ),
                Entry("-")
                if lengths is None
                else Entry("**longer**" if lengths.longer else "no", lengths.longer),
                share(right.ratio if right else None, f"no problem that both have right ({at})"),
            ]
        )
    columns = (
        "run", "task", "method", "tokens/s ratio", f"{GOAL}/(1 - s)", "reached",
        "response length ratio", "answers longer", "the same, both right",
    )  # fmt: skip
    notes = [
        f"Tokens/s ratio: seed by seed, median and range. {GOAL}/(1 - s): what is asked of it where "
        "memory bounds the load, s the saving over decode steps. Length ratio: mean output tokens "
        "over dense's on the same problems, with Fieller's 95% interval; longer: all of it above 1."
    ]
    return (
        Table(
            "speed_against_dense",
            "Throughput and response length against dense",
            columns,
            rows,
            notes,
        )
        if rows
        else None
    )


def classes(runs: Sequence[Run]) -> Table | None:
    """Accuracy by class of problem."""
    rows = [
        [
            words(run.label),
            words(group.task),
            words(name),
            words(run.title(group.method)),
            number(estimate.n, form="{:d}"),
            share(estimate, ""),
        ]
        for run in runs
        for group in run.groups.values()
        for name, estimate in accuracy.by_group(group.results).items()
    ]
    columns = ("run", "task", "class", "method", "answers", "accuracy")
    return Table("classes", "Accuracy by class of problem", columns, rows) if rows else None


def requests(runs: Sequence[Run]) -> Table:
    """What was asked, answered, failed and cut."""
    rows = []
    for run in runs:
        for group in run.groups.values():
            at = f"{group.task}, {group.method}"
            rows.append(
                [
                    words(run.label),
                    words(group.task),
                    words(run.title(group.method)),
                    number(len(group.cells), form="{:d}"),
                    number(group.legs, form="{:d}"),
                    number(len(group.responses), form="{:d}"),
                    number(len(group.results), form="{:d}"),
                    number(group.failed, form="{:d}"),
                    number(group.unanswered, form="{:d}"),
                    number(group.cut, form="{:d}"),
                    spread(group.memory("leaked_slots"), f"not looked at ({at})", "{:.0f}"),
                ]
            )
    columns = (
        "run", "task", "method", "seeds", "legs", "answered", "graded", "failed attempts",
        "never answered", "cut by length", "leaked slots",
    )  # fmt: skip
    notes = [
        "Cut by length: ended at max_tokens, at the model's context or where the KV slots ended; of "
        "a replay, those short of the record."
    ]
    return Table("requests", "Requests", columns, rows, notes)


def _pairs(runs: Sequence[Run]) -> Iterator[tuple[Run, Group, Group]]:
    for run in runs:
        for (task, method), group in run.groups.items():
            dense = run.groups.get((task, DENSE))
            if method != DENSE and dense is not None:
                yield run, group, dense


def _no_ratio(group: Group, dense: Group) -> str:
    at = f"({group.task}, {group.method})"
    if group.resumed or dense.resumed:
        return f"resumed {at}"
    return f"no leg record of a seed that dense has too {at}"


def _p_text(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"

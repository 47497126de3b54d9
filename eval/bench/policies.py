# SPDX-License-Identifier: Apache-2.0
"""``make bench-policies``: cache policies in the same server, at equal saving.

Writes ``policies.json``, ``.md`` and ``.png`` (docs/evaluation.md). Run folders beside them keep
all that was measured: the same command goes on after a stop."""

import argparse
import functools
import hashlib
import itertools
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from eval import command
from eval.bench import AIME, policies_points, sides
from eval.bench.policies_points import (
    CONTROLS,
    POLICIES,
    RANDOM_SHARING,
    SELECTOR,
    Point,
    flags_of,
    installed,
    parts,
)
from eval.bench.serve import pieces_of
from eval.command import commas, option
from eval.jsonl import texts_of
from eval.measures.accuracy import accuracy, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.report.style import GREY, LABEL_SIZE, figure, light_grid, save, text
from eval.runs.folder import Cell, write_whole
from eval.runs.options import RunOptions
from eval.runs.work import run

#: Accuracy on the embedded reasoner: answers that nothing garbled have 751 tokens at most. There is
#: room for all in flight, so that memory does not decide what is answered.
_ANSWERS: dict[str, Any] = {"in_flight": 48, "max_tokens": 1000, "kv_budget": 56_000}
#: Flags for its tasks: KeyDiff's blocks of a long prompt are prefill chunks.
_TASK_FLAGS = {"tiny_reasoner": (), "tiny_reasoner_long": ("--chunked-prefill-size", "128")}
SHORT, LONG = _TASK_FLAGS
#: Evicted positions need attention that skips them; dense gets the same.
_ATTENTION = ("--attention-backend", "reasoncache_cpu")

REPLAY = "aime24_replay"
#: Tokens of the pieces of responses: of unlike lengths, so that requests do not run in waves.
PIECES = (1000, 1300, 1600)
#: Memory decides how many run, of a stock server two or three; a line of the log every 4 steps, for
#: batches last some hundred.
_REPLAYS: dict[str, Any] = {"limit": 8, "kv_budget": 2700, "decode_log_interval": 4}
#: Beside a stock server: each holds up to 3 GB.
_TOGETHER = 3
_TIMED = (
    "throughput_ratio", "throughput_ratios", "step_ms", "dense_step_ms", "scheduler_ms",
    "throughput_saved", "running", "dense_running", "reproduced",
)  # fmt: skip
_SHOWN = [
    "aim", "policy", "saved", "saved_at_the_end", "accuracy", "accuracy_difference",
    "accuracy_error", "length_ratio", "throughput_ratio", "step_ms", "dense_step_ms",
    "scheduler_ms", "reads_saved",
]  # fmt: skip
# By place in POLICIES; the last are those of all others.
_COLOURS = [*sns.color_palette("colorblind").as_hex(), "#332288"]
_MARKERS = "s^v<oD>PxXh"

#: What replays say of a policy at a saving; none for those that were not replayed.
Timings = Mapping[tuple[str, float], Mapping[str, Any]]
say = functools.partial(print, flush=True)


def _below(most: float, kind: type[int] | type[float]) -> Callable[[str], tuple[Any, ...]]:
    def numbers(given: str) -> tuple[Any, ...]:
        found = commas(kind)(given)
        if not all(0 < one < most for one in found):
            raise argparse.ArgumentTypeError(f"must be above 0 and below {most}, got {given}")
        return found

    return numbers


def _policies(given: str) -> tuple[str, ...]:
    found = commas()(given)
    for unknown in filter(None, map(policies_points.missing, found)):
        known = ", ".join(installed())
        raise argparse.ArgumentTypeError(f"no policy {unknown!r}; there are {known}, pairs with +")
    return found


_SHARES = _below(1, float)


@dataclass(frozen=True)
class Options:
    traces: Path = option(text="folder of recorded responses, JSONL")
    out: Path = option(Path("build/bench"), "folder of results")
    policies: tuple[str, ...] = option((), "default: all there are", read=_policies, metavar="A,B")
    saved: tuple[float, ...] = option(policies_points.SAVINGS, "shares to aim at", read=_SHARES)
    problems: int = option(60, "of each policy and saving", least=2)
    budgets: tuple[int, ...] = option(
        (), "on long prompts: 384,256,128", read=_below(policies_points.PROMPT_LENGTH, int)
    )
    rounds: int = option(2, "on replays, 0 for none", least=0)
    timed_saved: tuple[float, ...] = option((0.2,), "shares that replays aim at", read=_SHARES)
    plan: bool = option(False, "say what would be done")

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", self.policies or tuple(installed()))

    @functools.cached_property
    def points(self) -> list[Point]:
        """Settings for the embedded reasoner."""
        return policies_points.points(self.policies, self.saved)[0]

    @functools.cached_property
    def left_out(self) -> list[str]:
        return policies_points.points(self.policies, self.saved)[1]

    @functools.cached_property
    def prompts(self) -> list[Point]:
        """Settings for its long prompts."""
        return policies_points.prompt_points(self.policies, self.budgets)

    @functools.cached_property
    def timed(self) -> dict[float, list[Point]]:
        """Settings for replays, by aim."""
        aims = self.timed_saved if self.rounds else ()
        return policies_points.timed_points(self.policies, aims)

    def cell(self, method: str, task: str = SHORT) -> Cell:
        """The run of a method alone, in a folder whose name a file system takes."""
        digest = hashlib.sha256(method.encode()).hexdigest()[:8]
        home = "prompts" if task == LONG else "accuracy"
        name = f"{re.sub('[^A-Za-z0-9.+=]+', '-', method)[:60]}-{digest}"
        return Cell(self.out / "policies" / f"{home}-{self.problems}" / name, task, method, 0)


def work(options: Options) -> None:
    """Measure what is not there yet and write the results, anew after each part; exits with status 1
    where something could not be measured."""
    answers = {SHORT: options.points, LONG: options.prompts}
    # Methods once each: two savings may lie nearest to the same setting.
    asked = {
        options.cell(method, task): None
        for task, points in answers.items()
        for method in (DENSE, *(point.method for point in points))
        if points
    }
    replayed = [point for chosen in options.timed.values() for point in chosen]
    say(f"{len(asked)} runs of {options.problems} problems; {len(replayed)} policies on replays")
    for sentence in options.left_out:
        say(f"left out: {sentence}")
    if options.plan:
        for point in [*options.points, *options.prompts, *replayed]:
            say(f"{point.policy} at {point.aim:.0%}: {point.method}")
        return
    failed = [cell.method for cell in asked if not answered(cell, options.problems)]
    timings: dict[tuple[str, float], Mapping[str, Any]] = {}
    write(options, timings)
    for (policy, aim), found in replays(options):
        timings[policy, aim] = found
        write(options, timings)
    failed += [p.method for p in replayed if (p.policy, p.aim) not in timings]
    say((options.out / "policies.md").read_text(encoding="utf-8"))
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def answered(cell: Cell, problems: int) -> bool:
    """Ask and grade what is missing of a cell; whether it is whole then."""

    def whole() -> bool:
        return min(len(cell.answered()), len(cell.results())) >= problems

    if not whole():
        flags = (*_ATTENTION, *_TASK_FLAGS[cell.task], *flags_of(cell.method))
        what: dict[str, Any] = {"tasks": (cell.task,), "methods": (cell.method,), "device": "cpu"}
        run(RunOptions(**what, limit=problems, server_flags=flags, **_ANSWERS), cell.run)
    return whole()


def replays(options: Options) -> Any:
    """Pairs of policy with aim, and what :func:`timing` says, of all that could be measured."""
    if not options.timed:
        return
    traces = options.traces / AIME
    model = str(build(MODELS, texts_of([traces])))
    home = options.out / "policies"
    path = home / f"{REPLAY}.jsonl"
    pieces_of(traces, model, PIECES, _REPLAYS["limit"], _REPLAYS["kv_budget"], path)
    asked = {**_REPLAYS, "model": model, "data": {REPLAY: str(path)}, "temperature": 0.0}
    for aim, chosen in options.timed.items():
        for group in groups(chosen):
            methods = [DENSE, *(point.method for point in group)]
            folder = home / f"replay-{options.rounds}-{aim:g}"
            folder /= ",".join(point.policy for point in group)
            for method, seed in itertools.product(methods, range(options.rounds)):
                forget_half(Cell(folder, REPLAY, method, seed))
            flags = (*_ATTENTION, *sides.SERVER_FLAGS, *flags_of(group[0].method))
            how = {**asked, "warm_up": 2, "server_flags": flags}
            cells = sides.in_turns(REPLAY, methods, options.rounds, folder, **how)
            for point in group:
                found = timing(cells[point.method], cells[DENSE])
                if found["throughput_ratios"]:
                    yield (point.policy, point.aim), found


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """Points that take turns with one stock server: few at a time, and of the same flags."""
    alike: dict[tuple[str, ...], list[Point]] = {}
    for point in sorted(points, key=lambda point: flags_of(point.method)):
        alike.setdefault(flags_of(point.method), []).append(point)
    return [g[at : at + _TOGETHER] for g in alike.values() for at in range(0, len(g), _TOGETHER)]


def timing(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """``reproduced``: the share of responses that are the record, word for word."""
    graded = [row.correct for cell in cells for row in cell.results()]
    same = sum(graded) / len(graded) if graded else None
    saved = of_cells(cells).saving
    return {**sides.speeds_of(cells, stock), "throughput_saved": saved, "reproduced": same}


def forget_half(cell: Cell) -> None:
    """Delete a cell that was stopped half-way; gone on with it would have no throughput."""
    known = of_cells([cell]).tokens_per_s is not None
    if cell.folder.is_dir() and (len(cell.answered()) < _REPLAYS["limit"] or not known):
        shutil.rmtree(cell.folder)


def rows(
    points: Sequence[Point], options: Options, timings: Timings, task: str = SHORT
) -> list[dict[str, Any]]:
    """A row (docs/evaluation.md has its fields) for each point that has answers; None: not measured."""
    found = []
    for point in sorted(points, key=lambda point: (point.aim, _rank(point.policy))):
        cell, dense = options.cell(point.method, task), options.cell(DENSE, task)
        if cell.results():
            row = {**point._asdict(), **sides.answers_of([cell], [dense])}
            row["reads_saved"] = _reads_saved(cell, point.policy)
            timed = timings.get((point.policy, point.aim), {})
            found.append({**row, **{name: timed.get(name) for name in _TIMED}})
    return found


def dense_row(cell: Cell) -> dict[str, Any]:
    """What the rows are held against."""
    scored = accuracy(keyed({0: cell.results()}))
    value, count = (scored.value, scored.n) if scored else (None, 0)
    return {"accuracy": value, "accuracy_error": sides.half(scored), "problems": count}


def _reads_saved(cell: Cell, policy: str) -> float | None:
    """The share of positions that attention did not read; None of policies that do not select."""
    if SELECTOR not in policy.split("+"):
        return None
    counts = [leg.report.get("selection") or {} for leg in cell.legs()]
    held, read = (sum(one.get(f"positions_{k}", 0) for one in counts) for k in ("held", "read"))
    return 1 - read / held if held else None


def _rank(policy: str) -> int:
    return POLICIES.index(policy) if policy in POLICIES else len(POLICIES)


def write(options: Options, timings: Timings) -> None:
    """``policies.json``, table and picture of what has been measured so far."""
    dense, long_dense = (dense_row(options.cell(DENSE, task)) for task in (SHORT, LONG))
    found = rows(options.points, options, timings)
    long = rows(options.prompts, options, {}, LONG)
    asked = dict(problems=options.problems, rounds=options.rounds, timed_aims=[*options.timed])
    result = {
        "rows": found,
        "dense": dense,
        "prompt_rows": long,
        "prompt_dense": long_dense,
        "replays": [{"policy": n, "aim": aim, **one} for (n, aim), one in timings.items()],
        "left_out": options.left_out,
        "settings": {**asked, "answers": _ANSWERS, "replays": _REPLAYS},
    }
    sides.keep(options.out / "policies.json", result)
    parts = [table(found, dense, "Policies at equal saving")]
    if long:
        parts.append(table(long, long_dense, "Long prompts under a budget"))
    parts += [f"Left out: {sentence}.\n" for sentence in options.left_out]
    write_whole(options.out / "policies.md", "\n".join(parts))
    picture(found, dense, options.out / "policies.png")


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
        style: dict[str, Any] = dict(color=_COLOURS[look], linewidth=1.3, elinewidth=0.8)
        style["linestyle"] = "--" if shares else ":" if policy in CONTROLS else "-"
        style |= dict(marker="*" if shares else _MARKERS[look], markersize=6)
        label = text("random sharing" if policy == RANDOM_SHARING else str(policy))
        error = points["accuracy_error"].astype(float).fillna(0)
        one.errorbar(100 * points["saved"], points["accuracy"], error, **style, label=label)
    at = "KV slots freed, % of what dense holds, over decode steps"
    one.set(xlabel=at, ylabel="accuracy (± as of the difference from dense)", ylim=(-0.03, 1.06))
    light_grid(one, "both")
    if one.get_legend_handles_labels()[0]:
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)


if __name__ == "__main__":
    # Unwind, so that servers are closed and records completed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command.run(Options, work)

# SPDX-License-Identifier: Apache-2.0
"""``make bench-policies``: cache policies in the same server, at equal saving.

Writes ``policies.json``, ``.md`` and ``.png`` (docs/evaluation.md). Run folders beside them keep
all that was measured: the same command goes on after a stop."""

import argparse
import functools
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns

from eval.bench import AIME, at_least, policies_points, policies_runs
from eval.bench.policies_points import (
    CONTROLS,
    POLICIES,
    RANDOM_SHARING,
    SELECTOR,
    Point,
    installed,
    parts,
)
from eval.bench.policies_runs import LONG, Runs, Timing
from eval.bench.serve import pieces_of
from eval.jsonl import texts_of
from eval.measures.accuracy import Estimate, accuracy, compare, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.report.style import GREY, LABEL_SIZE, figure, light_grid, save, text
from eval.runs.folder import Cell, write_whole

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
    """A row (docs/evaluation.md has its fields) for each point that has answers; None: not measured."""
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
    value, count = (scored.value, scored.n) if scored else (None, 0)
    return {"accuracy": value, "accuracy_error": _half(scored), "problems": count}


def _reads_saved(cell: Cell, policy: str) -> float | None:
    """The share of positions that attention did not read; None of policies that do not select."""
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


# For the estimate, on two cores with nothing else to do.
_START_S, _PROBLEM_S, _ROUND_S = 35, 650 / 1400, 45

say = functools.partial(print, flush=True)


class Options(argparse.Namespace):
    """The command line, and what follows from it."""

    def derive(self) -> None:
        """Policies at settings for the embedded reasoner (``points``), for replays by aim
        (``timed``) and for long prompts; ``left_out`` says what cannot be measured."""
        self.points, self.left_out = policies_points.points(self.policies, self.saved)
        self.prompts = policies_points.prompt_points(self.policies, self.budgets)
        aims = self.timed_saved if self.rounds else []
        self.timed = policies_points.timed_points(self.policies, aims)
        home = self.out / "policies"
        self.runs = Runs(home / f"accuracy-{self.problems}", self.problems)
        self.long_runs = Runs(home / f"prompts-{self.problems}", self.problems, LONG)
        # Methods once each: two savings may lie nearest to the same setting.
        both = ((self.runs, self.points), (self.long_runs, self.prompts))
        methods = [(runs, [DENSE, *(point.method for point in points)]) for runs, points in both]
        self.asked = [(runs, list(dict.fromkeys(one))) for runs, one in methods if len(one) > 1]

    def minutes(self) -> tuple[float, float]:
        """Estimates of accuracy and of replays, without what is there already."""
        todo = sum(not runs.whole(one) for runs, methods in self.asked for one in methods)
        # Runs take each other's processors now and then.
        speed = 0.8 * self.jobs if self.jobs > 1 else 1.0
        each = _START_S + self.problems * _PROBLEM_S
        groups = map(policies_runs.groups, self.timed.values())
        servers = sum(1 + len(group) for several in groups for group in several)
        replays = servers * (_START_S + self.rounds * _ROUND_S)
        return todo * each / speed / 60, replays / 60


def parse(argv: Sequence[str] | None = None) -> Options:
    """Exits with status 2 and a message that names flag, bound and value."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.policies", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("traces", type=Path, help="folder of recorded responses, JSONL")
    add("--out", type=Path, default=Path("build/bench"))
    add("--policies", type=_policies, default=installed(), metavar="A,B", help="default: all")
    savings = [*policies_points.SAVINGS]
    add("--saved", type=_several(float, 1), default=savings, help="shares of the slots to aim at")
    add("--problems", type=at_least(2), default=60, help="of each policy and saving (default 60)")
    budgets = _several(int, policies_points.PROMPT_LENGTH)
    add("--budgets", type=budgets, default=[], help="on long prompts: 384,256,128 (default none)")
    add("--jobs", type=at_least(1), default=2, help="accuracy runs at a time (default 2)")
    add("--rounds", type=at_least(0), default=2, help="on replays (default 2), 0 for none")
    add("--timed-saved", type=_several(float, 1), default=[0.2], help="of replays (default 0.2)")
    add("--plan", action="store_true", help="print what would be done, and how long it takes")
    options = parser.parse_args(argv, namespace=Options())
    options.derive()
    return options


def _several(kind: type[int] | type[float], below: int) -> Callable[[str], list[float]]:
    def numbers(text: str) -> list[float]:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None
        for one in found:
            if not 0 < one < below:
                raise argparse.ArgumentTypeError(f"must be above 0 and below {below}, got {one:g}")
        return _different(found)

    return numbers


def _policies(text: str) -> list[str]:
    found = text.split(",")
    for unknown in filter(None, map(policies_points.missing, found)):
        known = ", ".join(installed())
        raise argparse.ArgumentTypeError(f"no policy {unknown!r}; there are {known}, pairs with +")
    return _different(found)


def _different(given: list[Any]) -> list[Any]:
    if len(set(given)) < len(given):
        raise argparse.ArgumentTypeError(f"must name none twice, got {given}")
    return given


def carry_out(options: Options) -> bool:
    """Measure what is not there yet and write the results, anew after each part; whether all is.
    Raises OSError, ValueError: traces, model or a run folder are unusable."""
    failed: dict[str, str] = {}
    for runs, methods in options.asked:
        failed |= policies_runs.carry_out(runs, methods, options.jobs, say)
    timings: dict[Aim, policies_runs.Timing] = {}
    write(options, timings)
    if options.timed:
        traces = options.traces / AIME
        model = str(build(MODELS, texts_of([traces])))
        path = options.out / "policies" / f"{policies_runs.TASK}.jsonl"
        asked = (policies_runs.PIECES, policies_runs.LIMIT, policies_runs.KV_BUDGET, path)
        pieces_of(traces, model, *asked)
    for aim, chosen in options.timed.items():
        folder = path.with_name(f"replay-{options.rounds}-{aim:g}")
        for group in policies_runs.groups(chosen):
            found = policies_runs.measure(group, path, model, options.rounds, folder)
            for point in group:
                if point.policy in found:
                    timings[point.policy, point.aim] = found[point.policy]
                else:
                    failed[f"{point.method}, replayed"] = f"no throughput; see {folder}"
            write(options, timings)
    for what, why in failed.items():
        say(f"{what} is missing: {why}")
    return not failed


def write(options: Options, timings: dict[Aim, policies_runs.Timing]) -> None:
    """``policies.json``, table and picture of what has been measured so far."""
    dense, long_dense = dense_row(options.runs), dense_row(options.long_runs)
    found = rows(options.points, options.runs, timings)
    long = rows(options.prompts, options.long_runs, {})
    replays = [{"policy": name, "aim": aim, **one} for (name, aim), one in timings.items()]
    asked = dict(problems=options.problems, rounds=options.rounds, timed_aims=[*options.timed])
    used = dict(in_flight=policies_runs.IN_FLIGHT, max_tokens=policies_runs.MAX_TOKENS)
    used["replay_kv_budget"] = policies_runs.KV_BUDGET
    result = {
        "rows": found,
        "dense": dense,
        "prompt_rows": long,
        "prompt_dense": long_dense,
        "replays": replays,
        "left_out": options.left_out,
        "settings": {**asked, **used},
    }
    write_whole(options.out / "policies.json", json.dumps(result, indent=2) + "\n")
    parts = [table(found, dense, "Policies at equal saving")]
    if long:
        parts.append(table(long, long_dense, "Long prompts under a budget"))
    parts += [f"Left out: {sentence}.\n" for sentence in options.left_out]
    write_whole(options.out / "policies.md", "\n".join(parts))
    picture(found, dense, options.out / "policies.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when everything was measured, 1 when not, 2 for a bad command line."""
    options = parse(argv)
    # Unwind, so that servers are closed and records completed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    accuracy, replays = options.minutes()
    count = sum(len(methods) for _, methods in options.asked)
    replayed = [point for chosen in options.timed.values() for point in chosen]
    later = f"{len(replayed)} on replays, about {replays:.0f} minutes at most"
    say(f"{count} runs of {options.problems} problems, about {accuracy:.0f} minutes; {later}")
    for sentence in options.left_out:
        say(f"left out: {sentence}")
    if options.plan:
        for point in [*options.points, *options.prompts, *replayed]:
            say(f"{point.policy} at {point.aim:.0%}: {point.method}")
        return 0
    try:
        whole = carry_out(options)
    except (OSError, ValueError) as error:
        sys.exit(f"bench-policies: {error}")
    except KeyboardInterrupt:
        say("bench-policies: stopped; the same command goes on from here")
        return 130
    say((options.out / "policies.md").read_text(encoding="utf-8"))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``make bench-policies``: cache policies in the same server, at equal saving.

Accuracy on the embedded reasoner's problems, half of whose drafts are wrong, at some 10, 20, 40
and 60% of the slots saved; throughput and step time on replayed AIME responses at some of these.
With ``--budgets`` also accuracy on long prompts, which are kept within a budget block by block.
Writes ``policies.json``, ``policies.md`` and ``policies.png``. Run folders beside them keep all
that was measured: the same command goes on after a stop, and asks only what is new.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.bench import policies_accuracy, policies_speed
from eval.bench.policies_accuracy import Runs
from eval.bench.policies_points import (
    SAVINGS,
    UNTIMED,
    Point,
    PointError,
    installed,
    method_of,
    points,
    prompt_points,
)
from eval.bench.policies_results import Aim, dense_row, picture, rows, table
from eval.redundancy.rows import texts_of
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.runs.folder import write_whole

# For the estimate: two cores with nothing else to do.
_START_S = 35
_TOKENS = 650
_TOKENS_PER_S = 1400
#: Two runs at a time take each other's processors now and then.
_COMPANY = 0.8
_ROUND_S = 45


@dataclass(frozen=True)
class Options:
    """What to measure: policies at settings for the embedded reasoner (``points``), for replays by
    aim (``timed``) and for long prompts; ``left_out`` says what cannot be measured."""

    points: list[Point]
    timed: dict[float, list[Point]]
    prompts: list[Point]
    left_out: list[str]
    problems: int
    rounds: int
    jobs: int
    traces: Path
    out: Path
    plan: bool

    @property
    def runs(self) -> Runs:
        return Runs(self.out / "policies" / f"accuracy-{self.problems}", self.problems)

    @property
    def long_runs(self) -> Runs:
        home = self.out / "policies" / f"prompts-{self.problems}"
        return Runs(home, self.problems, policies_accuracy.LONG_TASK, policies_accuracy.LONG_FLAGS)

    @property
    def asked(self) -> list[tuple[Runs, list[str]]]:
        """Runs with their methods, each once: two savings may lie nearest to the same setting."""
        pairs = [(self.runs, self.points), (self.long_runs, self.prompts)]
        return [
            (runs, list(dict.fromkeys([policies_accuracy.DENSE, *(p.method for p in points)])))
            for runs, points in pairs
            if points
        ]

    def minutes(self) -> tuple[float, float]:
        """Estimates of accuracy and of replays, without what is there already."""
        todo = sum(not runs.whole(one) for runs, methods in self.asked for one in methods)
        speed = self.jobs * (_COMPANY if self.jobs > 1 else 1.0)
        each = _START_S + self.problems * _TOKENS / _TOKENS_PER_S
        timed = self.timed.values() if self.rounds else []
        groups = [group for points in timed for group in policies_speed.groups(points)]
        replays = sum((1 + len(group)) * (_START_S + self.rounds * _ROUND_S) for group in groups)
        return todo * each / speed / 60, replays / 60


def parse(argv: Sequence[str] | None = None) -> Options:
    """Exits with status 2 and a message that names flag, bound and value."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.policies", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("traces", type=Path, help="folder of recorded responses, JSONL")
    add("--out", type=Path, default=Path("build/bench"))
    add("--policies", help=f"default: {','.join(installed())}")
    add("--saved", default=",".join(map(str, SAVINGS)), help="shares of the slots to aim at")
    add("--problems", type=int, default=60, help="of each policy and saving (default 60)")
    add("--budgets", default="", help="on long prompts, of positions: 384,256,128 (default none)")
    add("--jobs", type=int, default=2, help="accuracy runs at a time (default 2)")
    add("--rounds", type=int, default=2, help="on replays (default 2), 0 for none")
    add("--timed-saved", default="0.2", help="what replays aim at, of --saved (default 0.2)")
    add("--plan", action="store_true", help="print what would be done, and how long it takes")
    args = parser.parse_args(argv)
    for name, least in (("problems", 2), ("jobs", 1), ("rounds", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    policies = args.policies.split(",") if args.policies else list(installed())
    try:
        savings = [float(part) for part in args.saved.split(",")]
        budgets = [int(part) for part in args.budgets.split(",") if part]
        aims = [float(part) for part in args.timed_saved.split(",")]
    except ValueError as error:
        parser.error(f"--saved, --timed-saved and --budgets must be numbers: {error}")
    for aim in aims:
        if not 0 < aim < 1:
            parser.error(f"--timed-saved must be above 0 and below 1, got {aim:g}")
    try:
        found, left_out = points(policies, savings)
        prompts = prompt_points(policies, budgets)
    except PointError as error:
        parser.error(str(error))
    known = {name: getattr(args, name) for name in ("problems", "rounds", "jobs", "traces", "out")}
    return Options(found, timed(policies, aims), prompts, left_out, plan=args.plan, **known)


def timed(policies: Sequence[str], aims: Sequence[float]) -> dict[float, list[Point]]:
    """Policies at the settings for replays: long responses leave evictors their usual slack.

    What does not go up to an aim is measured where it gets to.
    """
    found: dict[float, list[Point]] = {}
    for aim in aims:
        chosen: list[Point] = []
        for policy in (policy for policy in policies if policy not in UNTIMED):
            methods = [(near, method_of(policy, near, replayed=True)) for near in (aim, aim / 2)]
            reached = next((Point(policy, near, m) for near, m in methods if m), None)
            if reached and not any(reached in points for points in (chosen, *found.values())):
                chosen.append(reached)
        if chosen:
            found[aim] = chosen
    return found


def carry_out(options: Options) -> bool:
    """Measure what is not there yet and write the results, anew after each part; whether all is.

    Raises:
        OSError, ValueError: traces, model or a run folder are unusable.
    """
    missing: dict[str, str] = {}
    for runs, methods in options.asked:
        missing |= policies_accuracy.carry_out(runs, methods, options.jobs, say)
    timings: dict[Aim, policies_speed.Timing] = {}
    write(options, timings)
    home = options.out / "policies"
    if options.rounds and options.timed:
        model = str(build(MODELS, texts_of([options.traces / policies_speed.TRACES])))
        path = home / f"{policies_speed.TASK}.jsonl"
        policies_speed.write_records(options.traces, model, path)
        for aim, chosen in options.timed.items():
            folder = home / f"replay-{options.rounds}-{aim:g}"
            for group in policies_speed.groups(chosen):
                found = policies_speed.measure(group, path, model, options.rounds, folder)
                for point in group:
                    if point.policy in found:
                        timings[point.policy, point.aim] = found[point.policy]
                    else:
                        missing[f"{point.method}, replayed"] = f"no throughput; see {folder}"
                write(options, timings)
    for what, why in missing.items():
        say(f"{what} is missing: {why}")
    return not missing


def write(options: Options, timings: dict[Aim, policies_speed.Timing]) -> None:
    """``policies.json``, table and picture of what has been measured so far."""
    dense = dense_row(options.runs)
    found = rows(options.points, options.runs, timings)
    long = rows(options.prompts, options.long_runs, {})
    result: dict[str, Any] = {
        "rows": found,
        "dense": dense,
        "prompt_rows": long,
        "prompt_dense": dense_row(options.long_runs),
        "replays": [
            {"policy": policy, "aim": aim, **one} for (policy, aim), one in timings.items()
        ],
        "left_out": options.left_out,
        "settings": {
            "problems": options.problems,
            "rounds": options.rounds,
            "timed_aims": list(options.timed),
            "in_flight": policies_accuracy.IN_FLIGHT,
            "max_tokens": policies_accuracy.MAX_TOKENS,
            "replay_kv_budget": policies_speed.KV_BUDGET,
        },
    }
    write_whole(options.out / "policies.json", json.dumps(result, indent=2) + "\n")
    document = table(found, dense).markdown()
    if long:
        document += (
            "\n" + table(long, result["prompt_dense"], "Long prompts under a budget").markdown()
        )
    for sentence in options.left_out:
        document += f"\nLeft out: {sentence}.\n"
    write_whole(options.out / "policies.md", document)
    picture(found, dense, options.out / "policies.png")


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when everything was measured, 1 when not, 2 for a bad command line."""
    options = parse(argv)
    # Unwind, so that servers are closed and records completed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    accuracy, replays = options.minutes()
    count = sum(len(methods) for _, methods in options.asked)
    replayed = [point for chosen in options.timed.values() for point in chosen]
    say(
        f"{count} runs of {options.problems} problems, about {accuracy:.0f} minutes; "
        f"{len(replayed) if options.rounds else 0} on replays, about {replays:.0f} minutes at most"
    )
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

# SPDX-License-Identifier: Apache-2.0
"""``make bench-policies``: cache policies in the same server, at equal saving.

Writes ``policies.json``, ``policies.md`` and ``policies.png`` (docs/evaluation.md). Run folders
beside them keep all that was measured: the same command goes on after a stop.
"""

import argparse
import functools
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.bench import at_least, policies_points, policies_runs
from eval.bench.policies_points import installed
from eval.bench.policies_results import Aim, dense_row, picture, rows, table
from eval.bench.policies_runs import LONG, Runs
from eval.bench.serve import AIME, pieces_of
from eval.jsonl import texts_of
from eval.methods import DENSE
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.runs.folder import write_whole

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
        self.asked = [
            (runs, list(dict.fromkeys([DENSE, *(point.method for point in points)])))
            for runs, points in ((self.runs, self.points), (self.long_runs, self.prompts))
            if points
        ]

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
    say(
        f"{count} runs of {options.problems} problems, about {accuracy:.0f} minutes; "
        f"{len(replayed)} on replays, about {replays:.0f} minutes at most"
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

# SPDX-License-Identifier: Apache-2.0
"""``make bench-policies``: cache policies in the same server, at equal saving.

Writes ``policies.json``, ``.md`` and ``.png`` (docs/evaluation.md). A run folder beside them keeps what
was measured: the same command goes on after a stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from eval import command
from eval.bench import sides
from eval.command import option
from eval.methods import DENSE
from eval.runs.config import digest_of
from eval.runs.folder import Cell, write_json, write_whole

SHARING = "reasoncache"
#: Say what is lost without any rule: random blocks are redirected, or random positions evicted.
RANDOM_SHARING, RANDOM_EVICTION = "random", "random_eviction"
#: In the order of tables.
POLICIES = (
    SHARING, "streamingllm", "h2o", "snapkv", "keydiff", "rkv", "l2norm", RANDOM_SHARING,
    RANDOM_EVICTION, "reasoncache+rkv",
)  # fmt: skip

TASK = "tiny_reasoner"
#: The embedded reasoner: answers that nothing garbled have 751 tokens at most. There is room for
#: all in flight, so that memory does not decide what is answered. Evicted positions need attention
#: that skips them; dense gets the same. Each server holds up to 3 GB.
_ASKED: dict[str, Any] = {
    "in_flight": 48, "max_tokens": 1000, "kv_budget": 56_000,
    "server_flags": ("--attention-backend", "reasoncache_cpu"), "keep_servers": 4,
}  # fmt: skip
#: Positions of its requests when they begin and when they end; how many are too many before a policy
#: acts.
_START, _END, _SLACK = 45, 580, 8
_SHOWN = [
    "aim", "policy", "saved", "saved_at_the_end", "accuracy", "accuracy_difference",
    "accuracy_error", "length_ratio", "throughput_ratio", "step_ms", "dense_step_ms",
    "scheduler_ms",
]  # fmt: skip

#: What sharing saves on the embedded reasoner's responses, over decode steps, by percentile:
#: 22% is the most that its steps allow (docs/benchmarks.md).
_PERCENTILES = {0.1: 30, 0.2: 80}
#: Blocks of the shortest steps stay whole, so more of the others are redirected than is aimed at.
_RANDOM_RATIO = 1.2
#: The most that a policy can save: what repeats allows; SnapKV gives up nothing but prompt.
_MOST = {SHARING: max(_PERCENTILES), "snapkv": 0.1}


class Point(NamedTuple):
    """A policy at one setting: ``aim`` is the share of the slots that it is to save, ``method`` as
    in ``eval.run``."""

    policy: str
    aim: float
    method: str


def points(policies: Sequence[str], savings: Sequence[float]) -> list[Point]:
    """Every policy at every saving that it can reach."""
    each = ((policy, aim, method_of(policy, aim)) for aim in savings for policy in policies)
    return [Point(policy, aim, method) for policy, aim, method in each if method is not None]


def method_of(policy: str, saving: float) -> str | None:
    """The method that aims at a saving; None where the policy cannot reach it."""
    evictor = policy.removeprefix(f"{SHARING}+")
    if saving > _MOST.get(evictor, 1.0):
        return None
    if policy == SHARING:
        nearest = min(_PERCENTILES, key=lambda known: abs(known - saving))
        return f"reasoncache:percentile={_PERCENTILES[nearest]}"
    if policy == RANDOM_SHARING:
        return f"random:random_ratio={min(1.0, _RANDOM_RATIO * saving):g}"
    # Leaves out that share of the positions of a growing request, averaged over its steps. A pair
    # has its evictor's, so that the two can be compared at it.
    budget = round(_END - math.sqrt(saving * (_END**2 - _START**2)))
    options = "share=0.5" if evictor == "snapkv" else f"budget={budget}:slack={_SLACK}"
    name = "random" if evictor == RANDOM_EVICTION else evictor
    return f"reasoncache:policy={f'{SHARING}+' if evictor != policy else ''}{name}:{options}"


@dataclass(frozen=True)
class Options:
    out: Path = option(Path("build/bench"), "folder of results")
    policies: tuple[str, ...] = option(POLICIES, "names, pairs with +")
    saved: tuple[float, ...] = option(
        (0.1, 0.2, 0.4, 0.6), "shares to aim at", least=0.01, most=0.99
    )
    problems: int = option(60, "of each policy and saving", least=2)


def measure(chosen: Sequence[Point], problems: int, home: Path) -> dict[str, list[Cell]]:
    """The cells of dense and of some points by method, in a folder named after them."""
    # Two savings may lie nearest to the same setting.
    methods = list(dict.fromkeys([DENSE, *(point.method for point in chosen)]))
    asked = {**_ASKED, "limit": problems}
    return sides.in_turns(TASK, methods, 1, home / digest_of([methods, asked]), **asked)


def rows_of(chosen: Sequence[Point], cells: Mapping[str, list[Cell]]) -> list[dict[str, Any]]:
    """A row of :func:`sides.row_of` for each point."""
    return [
        {**point._asdict(), **sides.row_of(cells[point.method], cells[DENSE])} for point in chosen
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The papers' Table II in shape, as Markdown; columns are fields of a row."""
    frame = pd.DataFrame(rows).reindex(columns=_SHOWN)
    shown = frame.astype(object).where(frame.notna(), None)
    told = shown.to_markdown(index=False, floatfmt=".3f", missingval="-")
    return f"### Policies at equal saving\n\n{told}\n"


def picture(rows: Sequence[Mapping[str, Any]], dense: float, path: Path) -> None:
    """Accuracy against slots actually freed, a line a policy."""
    sns.set_palette("colorblind")
    made = Figure(figsize=(7.6, 4.8), layout="constrained")
    one = made.subplots()
    one.spines[["top", "right"]].set_visible(False)
    one.axhline(dense, color="#555555", linestyle="--", linewidth=1, label="dense")
    shown = pd.DataFrame(rows)
    shown["saved"] = 100 * shown["saved"].astype(float)
    looks: dict[str, Any] = {"hue": "policy", "style": "policy", "markers": True, "dashes": False}
    sns.lineplot(shown, x="saved", y="accuracy", errorbar=None, ax=one, **looks)
    at = "KV slots freed, % of what dense holds, over decode steps"
    one.set(xlabel=at, ylabel="accuracy", ylim=(-0.03, 1.06))
    one.grid(color="#EBEBEB", linewidth=0.8)
    one.legend(fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    made.savefig(path, dpi=150)


def work(options: Options) -> None:
    """Measure what is not there yet and write the results. Raises RunError: a cell could not be
    measured."""
    chosen = points(options.policies, options.saved)
    cells = measure(chosen, options.problems, options.out / "policies")
    dense, rows = sides.row_of(cells[DENSE], cells[DENSE]), rows_of(chosen, cells)
    told = table([{"policy": DENSE, **dense}, *rows])
    picture(rows, dense["accuracy"], options.out / "policies.png")
    write_json(options.out / "policies.json", {"dense": dense, "rows": rows})
    write_whole(options.out / "policies.md", told)
    print(told)


if __name__ == "__main__":
    command.run(Options, work)

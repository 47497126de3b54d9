# SPDX-License-Identifier: Apache-2.0
"""What ``bench-policies`` measures: each policy at settings chosen beforehand, one for each saving."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_reasoncache import registry

#: Shares of the slots that settings aim at.
SAVINGS = (0.1, 0.2, 0.4, 0.6)
SHARING, SELECTOR, _PROMPT_ONLY = "reasoncache", "quest", "snapkv"
#: Say what is lost without any rule: random blocks are redirected, or random positions evicted.
CONTROLS = RANDOM_SHARING, RANDOM_EVICTION = "random", "random_eviction"
_EVICTORS = ("streamingllm", "h2o", _PROMPT_ONLY, "keydiff", "rkv", "l2norm", SELECTOR)
#: In the order of tables.
POLICIES = (SHARING, *_EVICTORS, *CONTROLS, "reasoncache+rkv")
#: That KeyDiff's paper compares on long prompts, and the control.
_ON_PROMPTS = ("streamingllm", "h2o", _PROMPT_ONLY, "keydiff", RANDOM_EVICTION)
#: Positions of a prompt of the long-prompt task, on average.
PROMPT_LENGTH = 600
#: Not replayed, for the time it takes: the controls, and what costs no more than KeyDiff.
_UNTIMED = (*CONTROLS, "l2norm")

#: What sharing saves on the embedded reasoner's responses, over decode steps, by percentile:
#: 22% is the most that its steps allow (docs/benchmarks.md).
_PERCENTILES = {0.1: 30, 0.2: 80}
#: Blocks of the shortest steps stay whole, so more of the others are redirected than is aimed at.
_RANDOM_RATIO = 1.2
#: The most that a policy can save, and why.
_MOST = {
    SHARING: (max(_PERCENTILES), "what repeats allows some 20% over decode steps"),
    _PROMPT_ONLY: (0.1, "it gives up nothing but prompt, and prompts are short here"),
}
#: Quest reads whole pages. Its paper reads the first two layers of 32 whole; here it is one of 4.
_SELECTOR_FLAGS, _SELECTOR_OPTIONS = ("--page-size", "16"), "whole_layers=1"


class _Load(NamedTuple):
    """Positions of a request when it begins and when it ends, how many are too many before a
    policy acts, and settings of the filter: small enough for the steps of recorded responses."""

    start: int
    end: int
    slack: int
    sharing: str


_EMBEDDED, _REPLAYED = _Load(45, 580, 8, ""), _Load(150, 1500, 32, ",block=8,warmup=32")


class Point(NamedTuple):
    """A policy at one setting: ``aim`` is the share of the slots that it is to save, ``method`` as
    in ``eval.run``."""

    policy: str
    aim: float
    method: str


def installed() -> list[str]:
    """Those of :data:`POLICIES` that this version's registry has."""
    return [name for name in POLICIES if missing(name) is None]


def missing(policy: str) -> str | None:
    """The part of a policy's name that the registry does not have."""
    evictor = parts(policy)[1]
    if policy in (SHARING, *CONTROLS) or evictor == RANDOM_EVICTION:
        return None
    return None if evictor != "random" and evictor in registry.BUILT_IN else evictor


def parts(policy: str) -> tuple[bool, str]:
    """Whether a pair begins with sharing, and the other part."""
    pair = policy.startswith(f"{SHARING}+")
    return pair, policy.removeprefix(f"{SHARING}+") if pair else policy


def points(policies: Sequence[str], savings: Sequence[float]) -> tuple[list[Point], list[str]]:
    """Every policy at every saving that it can reach, and a sentence on each that it cannot."""
    found, left_out = [], []
    for policy in policies:
        for saving in savings:
            method = method_of(policy, saving)
            if method is None:
                left_out.append(f"{policy} at {saving:.0%}: {_MOST[parts(policy)[1]][1]}")
            else:
                found.append(Point(policy, saving, method))
    return found, left_out


def prompt_points(policies: Sequence[str], budgets: Sequence[int]) -> list[Point]:
    """Policies on long prompts, under budgets that hold during prefill too. As in KeyDiff's paper
    nothing is protected; SnapKV keeps its window, H2O half of the budget."""
    found = []
    for policy in policies:
        name = "random" if policy == RANDOM_EVICTION else policy
        own = "" if policy == _PROMPT_ONLY else ":slack=0:recent=1"
        for budget in budgets if policy in _ON_PROMPTS else ():
            method = f"reasoncache:policy={name}:budget={budget}:prompt=true{own}"
            found.append(Point(policy, 1 - budget / PROMPT_LENGTH, method))
    return found


def timed_points(policies: Sequence[str], aims: Sequence[float]) -> dict[float, list[Point]]:
    """Policies at the settings for replays, by aim; one that does not go up to an aim is measured
    where it gets to."""
    found: dict[float, list[Point]] = {}
    for aim in aims:
        for policy in (policy for policy in policies if policy not in _UNTIMED):
            methods = [(near, method_of(policy, near, _REPLAYED)) for near in (aim, aim / 2)]
            reached = next((Point(policy, near, m) for near, m in methods if m), None)
            if reached and not any(reached in chosen for chosen in found.values()):
                found.setdefault(aim, []).append(reached)
    return found


def method_of(policy: str, saving: float, load: _Load = _EMBEDDED) -> str | None:
    """The method that aims at a saving; None where the policy cannot reach it."""
    shares, evictor = parts(policy)
    if saving > _MOST.get(evictor, (1.0,))[0]:
        return None
    if policy == SHARING:
        nearest = min(_PERCENTILES, key=lambda known: abs(known - saving))
        return f"reasoncache:percentile={_PERCENTILES[nearest]}{load.sharing}"
    if policy == RANDOM_SHARING:
        return f"random:random_ratio={min(1.0, _RANDOM_RATIO * saving):g}{load.sharing}"
    # Leaves out that share of the positions of a growing request, averaged over its steps. A pair
    # has its evictor's, so that the two can be compared at it.
    budget = round(load.end - math.sqrt(saving * (load.end**2 - load.start**2)))
    options = f"budget={budget}:slack={load.slack}"
    if evictor == _PROMPT_ONLY:
        options = "share=0.5"
    elif evictor == SELECTOR:
        options = f"budget={budget}:{_SELECTOR_OPTIONS}"
    name = "random" if evictor == RANDOM_EVICTION else evictor
    if shares:
        return f"reasoncache:policy={SHARING}+{name}:{options}{load.sharing}"
    return f"reasoncache:policy={name}:{options}"


def flags_of(method: str) -> tuple[str, ...]:
    return _SELECTOR_FLAGS if f"policy={SELECTOR}" in method or f"+{SELECTOR}" in method else ()

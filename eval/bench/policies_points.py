# SPDX-License-Identifier: Apache-2.0
"""What ``bench-policies`` measures: each policy at settings chosen beforehand, one for each saving.

A setting aims at a saving; what a row of the result tells is the saving that the server counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_reasoncache import registry

#: Shares of the slots that settings aim at.
SAVINGS = (0.1, 0.2, 0.4, 0.6)
#: What sharing saves on the embedded reasoner's responses, over decode steps, by percentile:
#: 22% is the most that its steps allow (docs/benchmarks.md).
_PERCENTILES = {0.1: 30, 0.2: 80}
#: Blocks of the shortest steps stay whole, so more of the others are redirected than is aimed at.
_RANDOM_RATIO = 1.2
#: A policy acts when this many slots are too many. The default, 32, is made for long
#: responses; those of the embedded reasoner have 500 tokens.
_SLACK, _REPLAYED_SLACK = 8, 32
#: Small enough for the steps of the recorded responses, and ready to share within the first of them.
_REPLAYED = ",block=8,warmup=32"

#: SnapKV gives up nothing but prompt, the share of it that is given; prompts are 8% of these
#: problems' positions.
_PROMPT_ONLY, _PROMPT_SAVES, _PROMPT_SHARE = "snapkv", 0.1, 0.5

SHARING = "reasoncache"
#: Redirects random blocks; the evictor of that name is ``random_eviction`` here.
RANDOM_SHARING, RANDOM_EVICTION = "random", "random_eviction"
SELECTOR = "quest"
#: Quest reads whole pages. Its paper reads the first two layers of 32 whole; here it is one of 4.
SELECTOR_FLAGS = ("--page-size", "16")
_SELECTOR_OPTIONS = "whole_layers=1"
#: Positions of a request when it begins and when it ends, embedded and replayed: a budget stays
#: the same while a request grows, as in the papers.
_GROWS, _REPLAYED_GROWS = (45, 580), (150, 1500)
#: Why a policy cannot reach a saving.
_WHY_NOT = {SHARING: f"what repeats allows some {max(_PERCENTILES):.0%} over decode steps"}
_PROMPTS = "it gives up nothing but prompt, and prompts are short here"
#: In the order of tables.
POLICIES = (
    SHARING,
    "streamingllm",
    "h2o",
    "snapkv",
    "keydiff",
    "rkv",
    "l2norm",
    SELECTOR,
    RANDOM_SHARING,
    RANDOM_EVICTION,
    "reasoncache+rkv",
)
#: Say what is lost without any rule.
CONTROLS = (RANDOM_SHARING, RANDOM_EVICTION)
#: That KeyDiff's paper compares on long prompts, and the control.
ON_PROMPTS = ("streamingllm", "h2o", _PROMPT_ONLY, "keydiff", RANDOM_EVICTION)
#: Positions of a prompt of the long-prompt task, on average.
PROMPT_LENGTH = 600
#: Not replayed, for the time it takes: the controls, and what costs no more than KeyDiff.
UNTIMED = (*CONTROLS, "l2norm")


class PointError(ValueError):
    """A policy or saving that cannot be measured; the message names the option."""


@dataclass(frozen=True)
class Point:
    """A policy at one setting.

    ``aim`` is the share of the slots that it is to save, ``method`` as in ``eval.run``.
    """

    policy: str
    aim: float
    method: str


def installed() -> tuple[str, ...]:
    """Those of :data:`POLICIES` that this version's registry has."""
    return tuple(name for name in POLICIES if _missing(name) is None)


def points(policies: Sequence[str], savings: Sequence[float]) -> tuple[list[Point], list[str]]:
    """Every policy at every saving that it can reach, and a sentence on each that it cannot.

    Raises:
        PointError: an unknown policy, one given twice, or a saving out of bounds.
    """
    for saving in savings:
        if not 0 < saving < 1:
            raise PointError(f"--saved must be above 0 and below 1, got {saving:g}")
    for name, given in (("--policies", policies), ("--saved", savings)):
        if not given or len(set(given)) < len(given):
            raise PointError(f"{name} must name at least one, none twice, got {list(given)}")
    found, left_out = [], []
    for policy in policies:
        missing = _missing(policy)
        if missing is not None:
            known = ", ".join(installed())
            raise PointError(f"--policies: no policy {missing!r}; there are {known}, pairs with +")
        for saving in savings:
            method = method_of(policy, saving)
            if method is None:
                left_out.append(f"{policy} at {saving:.0%}: {_WHY_NOT.get(policy, _PROMPTS)}")
            else:
                found.append(Point(policy, saving, method))
    return found, left_out


def prompt_points(policies: Sequence[str], budgets: Sequence[int]) -> list[Point]:
    """Those of :data:`ON_PROMPTS` among the policies, under budgets that hold during prefill too.

    As in KeyDiff's paper: evicted down to the budget after each block of the prompt and then at
    each poll, and nothing is protected. SnapKV keeps its window, H2O half of the budget.

    Raises:
        PointError: a budget out of bounds.
    """
    for budget in budgets:
        if not 0 < budget < PROMPT_LENGTH:
            raise PointError(f"--budgets must be above 0 and below {PROMPT_LENGTH}, got {budget}")
    found = []
    for policy in policies:
        if policy not in ON_PROMPTS:
            continue
        name = {RANDOM_EVICTION: "random"}.get(policy, policy)
        own = "" if policy == _PROMPT_ONLY else ":slack=0:recent=1"
        for budget in budgets:
            method = f"reasoncache:policy={name}:budget={budget}:prompt=true{own}"
            found.append(Point(policy, 1 - budget / PROMPT_LENGTH, method))
    return found


def method_of(policy: str, saving: float, replayed: bool = False) -> str | None:
    """The method that aims at a saving; None where the policy cannot reach it.

    ``replayed`` is for replays, whose model has no settings of its own.
    """
    blocks = _REPLAYED if replayed else ""
    if policy == SHARING:
        if saving > max(_PERCENTILES):
            return None
        nearest = min(_PERCENTILES, key=lambda known: abs(known - saving))
        return f"reasoncache:percentile={_PERCENTILES[nearest]}{blocks}"
    if policy == RANDOM_SHARING:
        return f"random:random_ratio={min(1.0, _RANDOM_RATIO * saving):g}{blocks}"
    sharing, evictor = parts(policy)
    prefix, blocks = (f"{SHARING}+", blocks) if sharing else ("", "")
    if evictor == _PROMPT_ONLY:
        if saving > _PROMPT_SAVES:
            return None
        return f"reasoncache:policy={prefix}{evictor}:share={_PROMPT_SHARE}{blocks}"
    name = {RANDOM_EVICTION: "random"}.get(evictor, evictor)
    # A pair has its evictor's budget, so that the two can be compared at it.
    budget = _budget(saving, *(_REPLAYED_GROWS if replayed else _GROWS))
    slack = f"slack={_REPLAYED_SLACK if replayed else _SLACK}"
    options = f"budget={budget}:{_SELECTOR_OPTIONS if evictor == SELECTOR else slack}"
    return f"reasoncache:policy={prefix}{name}:{options}{blocks}"


def _budget(saving: float, start: int, end: int) -> int:
    """The budget that leaves out that share of the positions of a request that grows from start to
    end, averaged over its steps."""
    return round(end - math.sqrt(saving * (end**2 - start**2)))


def flags_of(method: str) -> tuple[str, ...]:
    """Server flags that a method needs besides those of all."""
    return SELECTOR_FLAGS if f"policy={SELECTOR}" in method or f"+{SELECTOR}" in method else ()


def parts(policy: str) -> tuple[bool, str]:
    """Whether a pair begins with sharing, and the other part."""
    first, plus, second = policy.partition("+")
    return (True, second) if plus and first == SHARING else (False, policy)


def _missing(policy: str) -> str | None:
    """The part of a policy's name that the registry does not have."""
    if policy in (SHARING, *CONTROLS):
        return None
    evictor = parts(policy)[1]
    if evictor == RANDOM_EVICTION or (evictor != "random" and evictor in registry.BUILT_IN):
        return None
    return evictor

# SPDX-License-Identifier: Apache-2.0
"""Parses names of arms. An arm is a way to edit KV while a model reads a response; see docs/fidelity.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reasoncache import policy_options
from sglang_reasoncache.config import (
    ConfigError,
    ReasonCacheConfig,
    filter_config,
    parse_settings,
)
from sglang_reasoncache.filter.settings import PRESETS, FilterConfig

POOLS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: With random sharing, each block reads a random earlier block with this probability.
RANDOM_RATIO = 0.3
#: Presets that are arms. The arms ``newest-...`` and ``random-evict`` are not presets.
PAPERS = tuple(name for name in PRESETS if name not in ("newest", "random"))
#: Measures of KV distance; the papers take the first.
METRICS = ("euclidean", "cosine", "norms")
#: Ends the name of a policy that evicts for each layer and KV head on its own.
BY_HEAD = "-by-head"
_QUEST = re.compile(r"quest(?::(?P<page>[1-9]\d{0,3}))?")
_OPTION = re.compile(
    r"(?P<match>runs|steps|random)|(?P<cached>cached)|(?P<block>\d+)"
    r"|(?P<pool>e4m3|e5m2)|age(?P<min_age>\d+)|p(?P<percentile>\d+)|run(?P<min_run>\d+)|need(?P<need>\d+)"
    r"|(?P<quotes>quotes)"
)
_GRAMMAR = (
    "newest or oldest, runs, steps or random, block[, cached][, e4m3 or e5m2][, ageN][, runN][, pN]"
    "[, needN][, quotes], as newest-runs-8; or e4m3 or e5m2 alone; or a preset, as memshare:align=index"
)


@dataclass(frozen=True)
class Arm:
    """A way to edit a KV cache. ``filter`` holds settings of the plugin's filter, which finds blocks to share.
    ``evictor`` is an eviction policy; callers set its budget. ``pool`` is the fp8 dtype of KV, if not None.
    ``quest``: positions in a page of Quest; 0 if the arm is another."""

    name: str
    filter: FilterConfig | None = None
    corrected: bool = True  # keys are rotated to the positions that read them
    percentile: float = 100.0  # pairs up to this percentile of KV distances share; 100: all
    evictor: Any = None
    need: float = 1.0  # pairs share, least KV distance first, until this part of positions is saved
    pool: torch.dtype | None = None
    encoder: str = ""  # compares steps: see eval/fidelity/encoders.py; "": counts of tokens
    metric: str = METRICS[0]  # of KV distances
    by_head: bool = False  # the evictor chooses positions for each layer and KV head
    quest: int = 0

    @property
    def follows(self) -> bool:
        """Whether the arm saves as much as another arm, which shares."""
        return self.evictor is not None or self.quest > 0


def parse(name: str) -> Arm:
    """Returns the arm of this name. Raises a ValueError that says what is wrong with the name."""
    if name in POOLS:
        return Arm(name, pool=POOLS[name])
    if name.partition(":")[0] in PAPERS:
        return _preset(name)
    if quest := _QUEST.fullmatch(name):
        return Arm(name, quest=int(quest["page"] or 16))
    direction, *options = name.split("-")
    if direction not in ("newest", "oldest"):
        return _evictor(name)
    matches = [match for option in options if (match := _OPTION.fullmatch(option))]
    values: dict[str, Any] = {str(m.lastgroup): m[str(m.lastgroup)] for m in matches}
    if len(values) < len(options) or not {"match", "block"} <= values.keys():
        raise ValueError(f"{name!r}: an arm that shares is {_GRAMMAR}")
    cached = values.pop("cached", None)
    match = values.pop("match")
    quotes = values.pop("quotes", None) is not None
    pool = POOLS.get(values.pop("pool", ""))
    knobs: dict[str, Any] = {field: int(value) for field, value in values.items()}
    percentile = knobs.pop("percentile", 100)
    need = knobs.pop("need", 100)
    knobs["random_ratio"] = RANDOM_RATIO if match == "random" else None
    knobs["match"] = "steps" if match == "random" else match
    if direction == "oldest":
        knobs.setdefault("min_age", 0)  # as in the ReasonCache paper, which has no minimum age
    try:
        config = ReasonCacheConfig(
            direction=direction, percentile=percentile, reads_prompt=quotes, **knobs
        )
    except ConfigError as error:
        raise ValueError(f"{name!r}: {error}") from error
    if not 0 < need <= 100:
        raise ValueError(f"{name!r}: needN must be between 1 and 100, got {need}")
    rule = filter_config(config)
    return Arm(name, rule, cached is None, percentile, need=need / 100, pool=pool)


def _preset(name: str) -> Arm:
    """The arm of ``PRESET[:key=value:...]``: a preset of the plugin, with settings of the plugin."""
    preset, *settings = name.split(":")
    # What only this program has.
    only = {"encoder": "", "metric": METRICS[0]}
    for setting in tuple(settings):
        key, equals, value = setting.partition("=")
        if key in only and equals:
            only[key] = value
            settings.remove(setting)
    if only["metric"] not in METRICS:
        raise ValueError(f"{name!r}: metric must be one of {', '.join(METRICS)}")
    try:
        values = parse_settings(",".join(settings)) if settings else {}
        config = ReasonCacheConfig.from_mapping({"preset": preset, **values})
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    rule = filter_config(config)
    if only["encoder"] and rule.match != "steps":
        raise ValueError(f"{name!r}: encoder needs match=steps, got {rule.match}")
    return Arm(
        name,
        rule,
        config.positions != "as-cached",
        config.percentile,
        encoder=only["encoder"],
        metric=only["metric"],
    )


def _evictor(name: str) -> Arm:
    alone = name.removesuffix("-evict")
    policy = alone.removesuffix(BY_HEAD)
    try:
        evictors = policy_options.parse(f"{policy}{',' if ':' in policy else ':'}budget=1").evictors
    except policy_options.PolicyError as error:
        raise ValueError(
            f"{name!r} is neither {_GRAMMAR}; nor quest or quest:PAGE; nor a policy: must be {error}"
        ) from error
    if len(evictors) != 1 or evictors[0].policy.queries:
        raise ValueError(f"{name!r} is two policies, or reads queries, not recorded here")
    return Arm(name, evictor=evictors[0].policy, by_head=alone.endswith(BY_HEAD))


def default_name() -> str:
    """The name of the arm with the plugin's default settings; this arm rotates keys."""
    config = ReasonCacheConfig()
    name = f"{config.direction}-{config.match}-{config.block}"
    if config.direction == "oldest" and config.min_age:
        name += f"-age{config.min_age}"
    return name if config.percentile >= 100 else f"{name}-p{config.percentile:.0f}"


def default_names() -> list[str]:
    """The names of the arms that are measured unless ``--arms`` names others."""
    names = ["newest-runs-8", "newest-steps-8", "oldest-steps-8", "oldest-cached-steps-8"]
    names += ["newest-runs-8-p80", "random-evict", "streamingllm", "keydiff"]
    return names if default_name() in names else [default_name(), *names]


def parse_all(names: Sequence[str], like: str) -> list[Arm]:
    """Returns the arms with these names; arms that evict come last. Raises ValueError if a name is bad or given
    twice, or if some arm evicts or is Quest and ``like`` names none of the arms that share."""
    arms = sorted(map(parse, names), key=lambda arm: arm.follows)
    if len(set(names)) < len(names):
        raise ValueError(f"--arms must name none twice, got {', '.join(names)}")
    sharing = [arm.name for arm in arms if arm.filter is not None]
    if arms[-1].follows and like not in sharing:
        raise ValueError(f"--like must be an arm that shares ({', '.join(sharing)}), got {like!r}")
    return arms

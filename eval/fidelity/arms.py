# SPDX-License-Identifier: Apache-2.0
"""Arms by name: what is done to one KV cache while a response is read.

``newest-runs-8``: direction, match and block of sharing, as in the settings of the same names, with
options behind: ``age0`` (``min_age``; the shipped one for newest, 0 for oldest), ``cached`` (keys
as cached), ``p80`` (distance threshold). ``newest-random-8`` pairs blocks at random. Any other name
is a policy of ``--reasoncache-policy`` that evicts; ``random-evict`` is its ``random``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_reasoncache import registry
from sglang_reasoncache.config import ConfigError, ReasonCacheConfig, filter_config
from sglang_reasoncache.eviction.policies.contract import ATTENTION
from sglang_reasoncache.filter.settings import FilterConfig

#: Share of the blocks that random sharing redirects.
RANDOM_RATIO = 0.3
_OPTION = re.compile(r"(runs|steps|random|cached)|(age|p|)(\d+)")
_FIELDS = {"age": "min_age", "p": "percentile", "": "block"}
_GRAMMAR = (
    "DIRECTION-MATCH-BLOCK as newest-runs-8, with -cached, -ageN, -pN, or a policy that evicts"
)


class ArmError(ValueError):
    """A name that says no arm, or arms that cannot be compared."""


@dataclass(frozen=True)
class Arm:
    """One KV cache's treatment.

    Attributes:
        filter: Which blocks share; None where the arm evicts.
        corrected: Keys are rotated to where they are used.
        percentile: Of KV distances, 100 for no threshold.
        evictor: With a budget that is to be replaced; None where the arm shares.
    """

    name: str
    filter: FilterConfig | None = None
    corrected: bool = True
    percentile: float = 100.0
    evictor: Any = None


def parse(name: str) -> Arm:
    """The arm of a name.

    Raises:
        ArmError: says what is wrong.
    """
    direction, *options = name.split("-")
    if direction not in ("newest", "oldest"):
        return _evictor(name)
    values: dict[str, Any] = {"direction": direction, "percentile": 100.0}
    for option in options:
        found = _OPTION.fullmatch(option)
        if found is None:
            raise ArmError(f"{name!r}: {option!r} is no part of {_GRAMMAR}")
        word, field, number = found.groups()
        if word is None:
            field, value = _FIELDS[field], int(number)
        else:
            field, value = ("positions", "as-cached") if word == "cached" else ("match", word)
        if field in values and field != "percentile":
            raise ArmError(f"{name!r}: {field} is given twice")
        values[field] = value
    if not {"match", "block"} <= values.keys():
        raise ArmError(f"{name!r}: an arm of sharing is {_GRAMMAR}")
    if direction == "oldest":
        values.setdefault("min_age", 0)
    if values["match"] == "random":
        values |= {"match": "steps", "random_ratio": RANDOM_RATIO}
    try:
        config = ReasonCacheConfig(**values)
        rule = filter_config(config, config.block, 1)
    except ConfigError as error:
        raise ArmError(f"{name!r}: {error}") from error
    return Arm(name, rule, config.positions != "as-cached", config.percentile)


def _evictor(name: str) -> Arm:
    text = name.removesuffix("-evict")
    try:
        found = registry.parse(f"{text}{',' if ':' in text else ':'}budget=1").evictors
    except registry.PolicyError as error:
        raise ArmError(f"{name!r} is neither {_GRAMMAR}: must be {error}") from error
    if len(found) != 1:
        raise ArmError(f"{name!r} does not evict")
    policy = found[0].policy
    if ATTENTION in policy.needs:
        raise ArmError(f"{name!r} needs attention weights, which are not recorded here")
    return Arm(name, evictor=policy)


def default_name() -> str:
    """The arm of the settings that an operator gets without setting any."""
    config = ReasonCacheConfig()
    name = f"{config.direction}-{config.match}-{config.block}"
    if config.direction == "oldest" and config.min_age:
        name += f"-age{config.min_age}"
    if config.positions == "as-cached":
        name += "-cached"
    return name if config.percentile >= 100 else f"{name}-p{config.percentile:.0f}"


def default_names(block: int) -> list[str]:
    """The arms that are measured unless others are named."""
    sharing = ("newest-runs", "newest-steps", "oldest-steps", "oldest-cached-steps")
    names = [f"{name}-{block}" for name in sharing]
    names += ["random-evict", "streamingllm", "keydiff"]
    return names if default_name() in names else [default_name(), *names]


def parse_all(names: Sequence[str], like: str) -> list[Arm]:
    """The arms of some names, those first that share.

    Raises:
        ArmError: a bad name, one given twice, or evictors that are to save as much as ``like``,
            which is not among the arms that share.
    """
    arms = sorted(map(parse, names), key=lambda arm: arm.filter is None)
    if not arms or len(set(names)) < len(names):
        raise ArmError(f"--arms must name at least one, none twice, got {list(names)}")
    sharing = [arm.name for arm in arms if arm.filter is not None]
    if len(sharing) < len(arms) and like not in sharing:
        raise ArmError(f"--like must be one of the arms that share ({sharing}), got {like!r}")
    return arms

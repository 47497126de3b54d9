# SPDX-License-Identifier: Apache-2.0
"""Policies by name, and the text of ``--reasoncache-policy``.

Options are separated by ``,`` or ``:``, so that the text can stand inside another list:
``reasoncache+keydiff:budget=512,recent=64`` is ``reasoncache+keydiff:budget=512:recent=64``.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import pkgutil
import re
import types
import typing
from collections.abc import Mapping, Set
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from sglang_reasoncache.arguments import value_of
from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    KEYS,
    UNROTATED_KEYS,
    NamedPolicy,
    StatisticsNeeds,
)
from sglang_reasoncache.policy_options import OptionError
from sglang_reasoncache.selection.contract import NamedSelector

#: Every evictor and selector of this package: a policy is one line here.
BUILT_IN: Mapping[str, str] = types.MappingProxyType(
    {
        "streamingllm": "sglang_reasoncache.eviction.policies.by_position:StreamingLLM",
        "random": "sglang_reasoncache.eviction.policies.by_position:RandomEviction",
        "l2norm": "sglang_reasoncache.eviction.policies.by_keys:L2Norm",
        "keydiff": "sglang_reasoncache.eviction.policies.by_keys:KeyDiff",
        "h2o": "sglang_reasoncache.eviction.policies.by_attention:H2O",
        "snapkv": "sglang_reasoncache.eviction.policies.by_attention:SnapKV",
        "rkv": "sglang_reasoncache.eviction.policies.by_attention:RKV",
        "quest": "sglang_reasoncache.selection.contract:Quest",
    }
)
#: Where other packages register theirs, ``name = "package.module:Class"``.
ENTRY_POINTS = "sglang_reasoncache.policies"
#: Sharing between similar steps, and nothing at all.
SHARING, NOTHING = "reasoncache", "none"
_LONGEST = 1000
_NEEDS = frozenset({KEYS, UNROTATED_KEYS, ATTENTION})


class PolicyError(ValueError):
    """The text is wrong; the message continues ``must be``."""


@dataclass(frozen=True)
class PolicyChoice:
    """What ``--reasoncache-policy`` asks for; evictors are applied one after the other."""

    shares: bool
    evictors: tuple[NamedPolicy, ...] = ()
    selector: NamedSelector | None = None


@functools.lru_cache(maxsize=64)
def parse(text: str) -> PolicyChoice:
    """``NAME[:key=value,...][+NAME...]``. Raises PolicyError for anything else."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise PolicyError(f"a text of at most {_LONGEST} characters")
    parts = [part.strip().partition(":") for part in text.split("+")]
    names = [name for name, _, _ in parts]
    for name, _, options in parts:
        if name and names.count(name) > 1:
            raise PolicyError(f"with {name} once")
        if name in (NOTHING, SHARING) and options:
            raise PolicyError(f"with {name} without options (sharing has flags of its own)")
        if name == NOTHING and len(parts) > 1:
            raise PolicyError(f"{NOTHING} alone, or without it")
    made = [(name, _make(name, text)) for name, _, text in parts if name not in (NOTHING, SHARING)]
    evictors = tuple(NamedPolicy(*named) for named in made if hasattr(named[1], "evict"))
    selectors = [NamedSelector(*named) for named in made if not hasattr(named[1], "evict")]
    if len(selectors) > 1:
        raise PolicyError(f"with one of {' and '.join(name for name, _ in selectors)}")
    return PolicyChoice(SHARING in names, evictors, next(iter(selectors), None))


def _make(name: str, options: str) -> Any:
    kind = _class_of(name)
    fields = [field.name for field in dataclasses.fields(kind)]
    try:
        types_of = typing.get_type_hints(kind)
    except Exception as error:
        raise PolicyError(f"with policies whose types resolve; {name} has {error!r}") from error
    given: dict[str, Any] = {}
    for part in re.split("[,:]", options) if options else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        key = key.replace("-", "_")
        if not equals or not value:
            raise PolicyError(f"with key=value for {name} instead of {part!r}")
        if key not in fields:
            raise PolicyError(f"with options of {name} among {', '.join(fields)}, not {key!r}")
        if key in given:
            raise PolicyError(f"with {key} of {name} once")
        try:
            given[key] = _value(types_of[key], value)
        except ValueError as error:
            raise PolicyError(f"with {key} of {name} {error}, not {value!r}") from error
    try:
        policy = kind(**given)
    except OptionError as error:
        raise PolicyError(f"with {error.key} of {name} {error.bound}") from error
    except Exception as error:
        # Another package's policy may say it in its own way.
        raise PolicyError(f"with options that {name} takes ({error!r})") from error
    try:
        missing = _missing(policy) if hasattr(policy, "evict") else ""
    except Exception as error:
        missing = f"what can be asked of it ({error!r})"
    if missing:
        raise PolicyError(f"with policies that have {missing}; {name} does not")
    return policy


def _missing(policy: Any) -> str:
    """What an evictor lacks, which would be found out in a live server."""
    if not callable(policy.evict) or not callable(getattr(policy, "excess", None)):
        return "methods evict and excess"
    slack = getattr(policy, "slack", None)
    if not isinstance(slack, numbers.Integral) or slack < 0:
        return "a slack, an integer of at least 0"
    needs = getattr(policy, "needs", None)
    if not isinstance(needs, Set) or not needs <= _NEEDS:
        return f"needs, a set of {', '.join(sorted(_NEEDS))} or an empty one"
    found = getattr(policy, "statistics_needs", None)
    if ATTENTION in needs and not isinstance(found, StatisticsNeeds):
        return f"statistics_needs, a StatisticsNeeds, as {ATTENTION} is needed"
    return ""


def _class_of(name: str) -> Any:
    if name in BUILT_IN:
        return pkgutil.resolve_name(BUILT_IN[name])
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in others:
        known = ", ".join((NOTHING, SHARING, *BUILT_IN, *sorted(others)))
        raise PolicyError(f"with every NAME one of {known}, not {name!r}")
    try:
        kind = others[name].load()
    except Exception as error:
        raise PolicyError(f"with policies that load; {name} does not ({error!r})") from error
    if not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
        raise PolicyError(f"with policies that are dataclasses; {name} is {kind!r}")
    if not (hasattr(kind, "evict") or hasattr(kind, "keep")):
        raise PolicyError(f"with policies that evict or keep something; {name} is {kind!r}")
    return kind


def _value(kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if kind not in (bool, int, float, str):
        raise ValueError(f"of a type that can be written; it is a {kind}")
    # Python reads 1_0 as 10.
    is_plain = kind is str or (text.isascii() and "_" not in text)
    return value_of(text if is_plain else "", kind)

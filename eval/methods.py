# SPDX-License-Identifier: Apache-2.0
"""Methods by name: what a server is started with so that it shares as one row of a table says."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_reasoncache.arguments import arguments_of
from sglang_reasoncache.config import SETTINGS, ConfigError, ReasonCacheConfig, parse_setting
from sglang_reasoncache.filter.settings import PRESETS


class MethodError(ValueError):
    """A method's specification is wrong; the message names ``--methods`` and the fault."""


@dataclass(frozen=True)
class Method:
    """One way to serve."""

    name: str  # the specification as given, and the name of its folder
    title: str  # for tables and pictures
    values: Mapping[str, Any] = field(default_factory=dict)  # settings, {} of a stock server
    match: str = ""  # whose saving this one must reach: its random_ratio is found during the run
    more: tuple[str, ...] = ()  # further words of the server's command line

    @property
    def shares(self) -> bool:
        return bool(self.values)

    @property
    def flags(self) -> list[str]:
        """The flags of this method's server, on top of those that all methods of a run get."""
        words = ["--enable-reasoncache", *arguments_of(self.values)] if self.shares else []
        return [*words, *self.more]


_TITLES = {
    "newest": "Newest copy",
    "reasoncache": "ReasonCache",
    "memshare": "MemShare",
    "memshare-0.9": "MemShare, threshold 0.9",
    "cosine": "Cosine only",
    "cosine-structure": "Cosine + structure",
    "random": "Random sharing",
}

DENSE = "dense"
RANDOM = "random"  # whose saving can be made equal to another's
#: Titles of all methods; every method but dense is a preset of the plugin.
METHODS: dict[str, str] = {DENSE: "Dense", **{name: _TITLES.get(name, name) for name in PRESETS}}

# Commas belong to the other method only if it has options.
_MATCH = re.compile(r"(?:^|,)match=([^,:]+:.+|[^,:]+)")
_NAME = re.compile(r"[A-Za-z0-9._:=,+/-]{1,200}")


def find_method(spec: str, defaults: Mapping[str, Any] | None = None) -> Method:
    """The method that ``NAME[:key=value,...]`` stands for; ``defaults`` are settings that a sharing
    one leaves open. Of ``random`` a key may be ``match``, another's specification, which ends the
    list. Raises MethodError: unknown name or key, or a bad value."""
    name, colon, rest = spec.partition(":")
    if name not in METHODS or not _NAME.fullmatch(spec):
        known = ", ".join(METHODS)
        raise MethodError(f"--methods: {spec!r} is no method; known are {known}")
    other = _MATCH.search(rest) if name == RANDOM else None
    if other is not None:
        before, after = rest[: other.start()], rest[other.end() :]
        colon = colon if before or after else ""
        rest = before + after if before else after[1:]
    pairs = dict(_pair(spec, part) for part in rest.split(",")) if colon else {}
    if name == DENSE:
        if pairs:
            raise MethodError(f"--methods: {spec!r}: {name} takes no options")
        return Method(spec, METHODS[name])
    try:
        given = {key: parse_setting(key, text) for key, text in pairs.items()}
        values = {"preset": name, **(defaults or {}), **given}
        ReasonCacheConfig.from_mapping(values)
    except ConfigError as error:
        raise MethodError(f"--methods: {spec!r}: {error}") from error
    if other is not None and "random_ratio" in pairs:
        raise MethodError(f"--methods: {spec!r}: match and random_ratio exclude each other")
    detail = f" ({', '.join(f'{key}={text}' for key, text in pairs.items())})" if pairs else ""
    match = other[1] if other is not None else ""
    return Method(spec.replace("/", "_"), METHODS[name] + detail, values, match)


def find_methods(specs: Sequence[str], defaults: Mapping[str, Any] | None = None) -> list[Method]:
    """All methods of a run, each random one with the method that it matches. Raises MethodError: as
    :func:`find_method`; a name given twice; a match that is not in the run."""
    methods = [find_method(spec, defaults) for spec in specs]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise MethodError(f"--methods: {name!r} is given twice")
    return [_matched(method, methods) for method in methods]


def with_ratio(method: Method, ratio: float) -> Method:
    """A random method that redirects this share of blocks."""
    return dataclasses.replace(method, values={**method.values, "random_ratio": round(ratio, 4)})


def _matched(method: Method, methods: Sequence[Method]) -> Method:
    if method.name.partition(":")[0] != RANDOM or "random_ratio" in method.values:
        return method
    match = method.match.replace("/", "_") or "reasoncache"
    target = next((other for other in methods if other.name == match), None)
    if target is None or target is method or not target.shares or target.match:
        how = "method of the same run; else give random:match=METHOD or random:random_ratio=R"
        what = f"{method.name!r} shares as much as {match!r}, which must be a sharing {how}"
        raise MethodError(f"--methods: {what}")
    return dataclasses.replace(method, match=match)


def _pair(spec: str, part: str) -> tuple[str, str]:
    key, equals, text = part.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key or not text:
        raise MethodError(f"--methods: {spec!r}: {part!r} is not key=value")
    if key not in SETTINGS or key == "preset":
        known = ", ".join(name for name in SETTINGS if name != "preset")
        raise MethodError(f"--methods: {spec!r}: no option {key!r}; known are {known}")
    return key, text

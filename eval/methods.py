# SPDX-License-Identifier: Apache-2.0
"""Methods by name: what a server is started with so that it shares as one row of a table says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_reasoncache.config import ConfigError, ReasonCacheConfig, flag_of, type_of
from sglang_reasoncache.filter.presets import PRESETS


class MethodError(ValueError):
    """A method's specification is wrong; the message names ``--methods`` and the fault."""


@dataclass(frozen=True)
class Method:
    """One way to serve.

    Attributes:
        name: the specification as given, and the name of its folder.
        title: for tables and pictures.
        flags: of the server, on top of those that all methods of a run get.
        match: the method whose saving this one must reach, "" for none. Its
            ``--reasoncache-random-ratio`` is found during the run.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()
    match: str = ""

    @property
    def shares(self) -> bool:
        return bool(self.flags)


_TITLES = {
    "reasoncache": "ReasonCache",
    "memshare": "MemShare",
    "memshare-0.9": "MemShare, threshold 0.9",
    "cosine": "Cosine only",
    "cosine-structure": "Cosine + structure",
    "random": "Random sharing",
    "sentence-bert": "Encoder Sentence-BERT",
    "embedding": "Encoder embedding layer",
    "cosine-distance": "Cosine distance",
}

DENSE = "dense"
#: The method whose saving can be made equal to another's.
RANDOM = "random"
#: Titles of all methods. Those but dense are presets of the plugin.
METHODS: dict[str, str] = {DENSE: "Dense", **{name: _TITLES.get(name, name) for name in PRESETS}}

_FIELDS = tuple(field.name for field in dataclasses.fields(ReasonCacheConfig))
_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
# Commas belong to the other method only if it has options.
_MATCH = re.compile(r"(?:^|,)match=([^,:]+:.+|[^,:]+)")
_NAME = re.compile(r"[A-Za-z0-9._:=,+/-]{1,200}")


def find_method(spec: str, embedded_flags: Sequence[str] = ()) -> Method:
    """The method that ``NAME[:key=value,...]`` stands for.

    A key is an option ``--reasoncache-KEY`` of the server, without that prefix; of
    ``random`` also ``match``, the specification of another method, which ends the list:
    options of ``random`` itself come before it.

    Args:
        spec: as in ``--methods``.
        embedded_flags: flag and value in turn, for every sharing method whose
            specification leaves them open.

    Raises:
        MethodError: unknown name or key, or a value out of bounds.
    """
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
    match = other[1] if other is not None else ""
    if name == DENSE:
        if pairs:
            raise MethodError(f"--methods: {spec!r}: {name} takes no options")
        return Method(spec, METHODS[name])
    values: dict[str, object] = {
        "preset": name,
        **{key: _value(spec, key, text) for key, text in pairs.items()},
    }
    given = {flag_of(key) for key in values}
    flags = ["--enable-reasoncache", *_spell(values)]
    for flag, value in zip(embedded_flags[::2], embedded_flags[1::2], strict=True):
        if flag not in given:
            flags += [flag, value]
            values[flag_key(flag)] = _value(spec, flag_key(flag), value)
    try:
        ReasonCacheConfig.from_mapping(values)
    except ConfigError as error:
        raise MethodError(f"--methods: {spec!r}: {error}") from error
    if match and "random_ratio" in pairs:
        raise MethodError(f"--methods: {spec!r}: match and random_ratio exclude each other")
    detail = f" ({', '.join(f'{key}={text}' for key, text in pairs.items())})" if pairs else ""
    return Method(spec.replace("/", "_"), METHODS[name] + detail, tuple(flags), match)


def find_methods(specs: Sequence[str], embedded_flags: Sequence[str] = ()) -> list[Method]:
    """All methods of a run, each random one with the method that it matches.

    Raises:
        MethodError: as :func:`find_method`; a name given twice; a match that is not in the run.
    """
    methods = [find_method(spec, embedded_flags) for spec in specs]
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise MethodError(f"--methods: {name!r} is given twice")
    return [_matched(method, methods) for method in methods]


def with_ratio(method: Method, ratio: float) -> Method:
    """A random method that redirects this share of blocks."""
    return dataclasses.replace(
        method, flags=(*method.flags, flag_of("random_ratio"), f"{ratio:.4f}")
    )


def flag_key(flag: str) -> str:
    """``--reasoncache-fixed-tau`` -> ``fixed_tau``."""
    return flag.removeprefix("--reasoncache-").replace("-", "_")


def _matched(method: Method, methods: Sequence[Method]) -> Method:
    if method.name.partition(":")[0] != RANDOM or flag_of("random_ratio") in method.flags:
        return method
    match = method.match.replace("/", "_") or "reasoncache"
    target = next((other for other in methods if other.name == match), None)
    if target is None or target is method or not target.shares or target.match:
        raise MethodError(
            f"--methods: {method.name!r} shares as much as {match!r}, which must be a sharing "
            "method of the same run; else give random:match=METHOD or random:random_ratio=R"
        )
    return dataclasses.replace(method, match=match)


def _pair(spec: str, part: str) -> tuple[str, str]:
    key, equals, text = part.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key or not text:
        raise MethodError(f"--methods: {spec!r}: {part!r} is not key=value")
    return key, text


def _value(spec: str, key: str, text: str) -> object:
    if key not in _FIELDS or key == "preset":
        known = ", ".join(name for name in _FIELDS if name != "preset")
        raise MethodError(f"--methods: {spec!r}: no option {key!r}; known are {known}")
    kind = type_of(key)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise MethodError(f"--methods: {spec!r}: {key} must be true or false, got {text!r}")
        return _BOOLEANS[text.lower()]
    try:
        return kind(text)
    except ValueError as error:
        raise MethodError(
            f"--methods: {spec!r}: {key} must be {kind.__name__}, got {text!r}"
        ) from error


def _spell(values: Mapping[str, object]) -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        if isinstance(value, bool):
            flags.append(flag_of(key) if value else flag_of(key).replace("--", "--no-", 1))
        else:
            flags += [flag_of(key), str(value)]
    return flags

# SPDX-License-Identifier: Apache-2.0
"""Methods by name: what a server is started with so that it shares as one row of a table says."""

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
    values: Mapping[str, Any] = field(default_factory=dict)  # settings, {} of a stock server
    more: tuple[str, ...] = ()  # further words of the server's command line

    @property
    def shares(self) -> bool:
        return bool(self.values)

    @property
    def flags(self) -> list[str]:
        """The flags of this method's server, on top of those that all methods of a run get."""
        words = ["--enable-reasoncache", *arguments_of(self.values)] if self.shares else []
        return [*words, *self.more]


DENSE = "dense"
#: Every method but dense is a preset of the plugin.
METHODS = (DENSE, *PRESETS)
#: A method's name is a folder's, too.
_NAME = re.compile(r"[A-Za-z0-9._:=,+-]{1,200}")


def find_method(spec: str, defaults: Mapping[str, Any] | None = None) -> Method:
    """The method that ``NAME[:key=value,...]`` stands for; ``defaults`` are settings that a sharing
    one leaves open. Raises MethodError: unknown name or key, or a bad value."""
    name, colon, rest = spec.partition(":")
    if name not in METHODS or not _NAME.fullmatch(spec):
        known = ", ".join(METHODS)
        raise MethodError(f"--methods: {spec!r} is no method; known are {known}")
    pairs = dict(_pair(spec, part) for part in rest.split(",")) if colon else {}
    if name == DENSE:
        if pairs:
            raise MethodError(f"--methods: {spec!r}: {name} takes no options")
        return Method(spec)
    try:
        given = {key: parse_setting(key, text) for key, text in pairs.items()}
        values = {"preset": name, **(defaults or {}), **given}
        ReasonCacheConfig.from_mapping(values)
    except ConfigError as error:
        raise MethodError(f"--methods: {spec!r}: {error}") from error
    return Method(spec, values)


def find_methods(specs: Sequence[str], defaults: Mapping[str, Any] | None = None) -> list[Method]:
    """All methods of a run. Raises MethodError: as :func:`find_method`."""
    return [find_method(spec, defaults) for spec in specs]


def _pair(spec: str, part: str) -> tuple[str, str]:
    key, equals, text = part.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key or not text:
        raise MethodError(f"--methods: {spec!r}: {part!r} is not key=value")
    if key not in SETTINGS or key == "preset":
        known = ", ".join(name for name in SETTINGS if name != "preset")
        raise MethodError(f"--methods: {spec!r}: no option {key!r}; known are {known}")
    return key, text

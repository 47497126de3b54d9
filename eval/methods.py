# SPDX-License-Identifier: Apache-2.0
"""Methods by name. A method says with which flags a server starts, and so how the server shares KV slots."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_reasoncache.arguments import arguments_of
from sglang_reasoncache.config import ReasonCacheConfig, parse_settings
from sglang_reasoncache.filter.settings import PRESETS


class MethodError(ValueError):
    """A method's specification is wrong; the message names ``--methods`` and the fault."""


@dataclass(frozen=True)
class Method:
    """A way to start a server."""

    name: str  # the specification as given; folders of results have this name
    values: Mapping[str, Any] = field(default_factory=dict)  # plugin settings; {} for stock SGLang
    more: tuple[str, ...] = ()  # further arguments for the server's command line

    @property
    def shares(self) -> bool:
        return bool(self.values)

    @property
    def flags(self) -> list[str]:
        """The flags that this method adds to the flags that all servers of a run get."""
        words = ["--enable-reasoncache", *arguments_of(self.values)] if self.shares else []
        return [*words, *self.more]


DENSE = "dense"
#: Every method except dense is a preset of the plugin.
METHODS = (DENSE, *PRESETS)
#: A specification must match this pattern, because result folders are named after it.
_NAME = re.compile(r"[A-Za-z0-9._:=,+-]{1,200}")


def find_method(spec: str, defaults: Mapping[str, Any] | None = None) -> Method:
    """The method that ``NAME[:key=value,...]`` stands for. If it is not dense, ``defaults`` fill in settings
    that the specification leaves out. Raises MethodError if a name, key or value is bad."""
    name, colon, rest = spec.partition(":")
    if name not in METHODS or not _NAME.fullmatch(spec):
        known = ", ".join(METHODS)
        raise MethodError(f"--methods: {spec!r} is no method; known are {known}")
    if name == DENSE:
        if colon:
            raise MethodError(f"--methods: {spec!r}: {name} takes no options")
        return Method(spec)
    try:
        given = parse_settings(rest) if colon else {}
        if "preset" in given:
            raise ValueError("the name is the preset")
        values = {"preset": name, **(defaults or {}), **given}
        ReasonCacheConfig.from_mapping(values)
    except ValueError as error:
        raise MethodError(f"--methods: {spec!r}: {error}") from error
    return Method(spec, values)

# SPDX-License-Identifier: Apache-2.0
"""Methods by name. A method says with which flags and environment variables a server starts, and so how the
server uses its KV slots."""

import math
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
    """A way to start a server.

    Attributes:
        name: The specification as given; folders of results have this name.
        values: Plugin settings; {} for stock SGLang.
        stock: Settings of SGLang itself: ``clip`` and the names of ``_FLAGS``.
        more: Further arguments for the server's command line.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    stock: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()

    @property
    def shares(self) -> bool:
        return bool(self.values)

    @property
    def is_tuned(self) -> bool:
        """Whether ``eval.runs.tuning`` completes :attr:`stock`."""
        return self.name.partition(":")[0] == TUNED

    @property
    def flags(self) -> list[str]:
        """The flags that this method adds to the flags that all servers of a run get."""
        words = ["--enable-reasoncache", *arguments_of(self.values)] if self.shares else []
        stock = [
            word
            for name in _FLAGS
            if name in self.stock
            for word in (_FLAGS[name], self.stock[name])
        ]
        return [*words, *stock, *self.more]

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that this method sets."""
        return {_CLIP: self.stock["clip"]} if "clip" in self.stock else {}

    @property
    def slot_bytes(self) -> float:
        """Bytes of a KV slot, as a fraction of those of a slot in the model's own data type."""
        return 0.5 if "fp8" in self.stock.get("kv", "") else 1.0


DENSE = "dense"
TUNED = "tuned"
#: The option ``clip`` of ``dense``: this variable limits for how many tokens of a request's future output
#: SGLang reserves slots.
_CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
#: The other options of ``dense``, which methods that share take, too.
_FLAGS = {
    "conservativeness": "--schedule-conservativeness",
    "kv": "--kv-cache-dtype",
    "reserved": "--num-reserved-decode-tokens",
}
#: What ``tuned`` tries: operators set these two when memory is short.
CANDIDATES = tuple(
    f"{DENSE}:clip={clip}:conservativeness={conservativeness}"
    for clip in (8, 64, 256, 4096)
    for conservativeness in (0.1, 0.3, 1.0)
)
#: Every method except dense and tuned is a preset of the plugin. ``tuned`` is stock SGLang with the best of
#: :data:`CANDIDATES`, which ``eval.runs.tuning`` finds.
METHODS = (DENSE, TUNED, *PRESETS)
#: A specification must match this pattern, because result folders are named after it.
_NAME = re.compile(r"[A-Za-z0-9._:=,+-]{1,200}")


def find_method(spec: str, defaults: Mapping[str, Any] | None = None) -> Method:
    """The method that ``NAME[:key=value,...]`` stands for. If it shares, ``defaults`` fill in settings
    that the specification leaves out. Raises MethodError if a name, key or value is bad."""
    name, colon, rest = spec.partition(":")
    if name not in METHODS or not _NAME.fullmatch(spec):
        names = ", ".join(METHODS)
        raise MethodError(f"--methods: {spec!r} is no method; known are {names}")
    try:
        if name in (DENSE, TUNED):
            return Method(spec, stock=_stock_settings(name, rest))
        parts = rest.split(",") if colon else []
        stock = [part for part in parts if part.partition("=")[0] in _FLAGS]
        ours = [part for part in parts if part not in stock]
        settings = parse_settings(",".join(ours)) if ours else {}
        if "preset" in settings:
            raise ValueError("the name is the preset")
        values = {"preset": name, **(defaults or {}), **settings}
        ReasonCacheConfig.from_mapping(values)
        return Method(spec, values, _stock_settings(name, ",".join(stock)))
    except ValueError as error:
        raise MethodError(f"--methods: {spec!r}: {error}") from error


def _stock_settings(name: str, text: str) -> dict[str, str]:
    """The settings in ``key=value:key=value``. Raises ValueError if one is unknown, bad or given twice."""
    keys = {DENSE: ("clip", *_FLAGS), TUNED: ("kv",)}.get(name, tuple(_FLAGS))
    settings: dict[str, str] = {}
    for part in filter(None, re.split("[:,]", text)):
        key, _, value = part.partition("=")
        if key not in keys or key in settings:
            raise ValueError(f"{name} takes each of {', '.join(keys)} at most once, got {part!r}")
        if key in ("clip", "reserved") and not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
        if key == "conservativeness" and not 0 < float(value) < math.inf:
            raise ValueError(f"conservativeness must be above 0, got {value!r}")
        if not value:
            raise ValueError(f"{key} needs a value")
        settings[key] = value
    return settings

# SPDX-License-Identifier: Apache-2.0
"""Hooks that SGLang is made to apply at once; it only logs where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang_reasoncache import compat


def apply(hooks: Mapping[str, tuple[Callable[..., Any], Any]]) -> None:
    """Hook what is not hooked yet: SGLang's function by its path -> our hook and its ``HookType``."""
    registry = compat.HookRegistry
    for target, (function, kind) in hooks.items():
        if target not in registry._patched:
            registry.register(target, function, kind)
    registry.apply_hooks()
    check_applied(hooks)


def check_applied(targets: Iterable[str]) -> None:
    """Raises RuntimeError when SGLang could not apply a hook (it only logs that)."""
    missing = [target for target in targets if target not in compat.HookRegistry._patched]
    if missing:
        names = ", ".join(missing)
        raise RuntimeError(f"sglang-reasoncache: SGLang did not apply the hooks {names}")

# SPDX-License-Identifier: Apache-2.0
"""Attaches to SGLang through its own entry points; nothing is patched or copied."""

from __future__ import annotations

import os

#: Set while a server with the flag starts, for its child processes: they load plugins before
#: they see any argument.
ENABLED_ENV = "SGLANG_REASONCACHE_ENABLED"


def register() -> None:
    """Entry point ``sglang.srt.plugins``, called in every SGLang process, which swallows what it
    raises: refusals come from the flag hook and the cache factory."""
    from sglang_reasoncache.plugin import cpu_attention, flags, hooks

    flags.install()
    cpu_attention.install()
    if os.environ.get(ENABLED_ENV) == "1":
        hooks.install()

# SPDX-License-Identifier: Apache-2.0
"""Attaches to SGLang through SGLang's own entry points; nothing is patched or copied."""

import os


def register() -> None:
    """Entry point ``sglang.srt.plugins``, called in every SGLang process. SGLang swallows exceptions from here,
    so settings are refused later, in the flag hook and the cache factory."""
    from sglang_reasoncache.plugin import cpu_attention, flags, hooks

    flags.install()
    cpu_attention.install()
    if os.environ.get(flags.ENABLED_ENV) == "1":
        hooks.install()

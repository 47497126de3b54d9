# SPDX-License-Identifier: Apache-2.0
"""Attaches reasoncache to SGLang through SGLang's own entry points, hooks and registries."""

import os


def register() -> None:
    """Entry point ``sglang.srt.plugins``, called by ``load_plugins()`` of SGLang. SGLang only logs exceptions
    that are raised here, so bad settings are refused later, in ``flags.py`` and ``server.py``."""
    from sglang_reasoncache.cpu import attention as cpu_attention
    from sglang_reasoncache.cpu import packed
    from sglang_reasoncache.plugin import flags, hooks

    flags.install()
    cpu_attention.install()
    packed.install()
    if os.environ.get(flags.ENABLED_ENV) == "1":
        hooks.install()

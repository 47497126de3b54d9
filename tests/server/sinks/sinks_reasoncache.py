# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: SGLang accepts for gpt-oss only attention backends that know sinks, from a list
of names. This project's CPU backend knows them, too."""

from typing import Any


def register() -> None:
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.model_hook import attention_backends_of

    def listed(view: Any) -> tuple[str, ...]:
        return tuple(
            "triton" if name == "reasoncache_cpu" else name for name in attention_backends_of(view)
        )

    setattr(model_hook, "attention_backends_of", listed)  # noqa: B010

# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test: the platform has a KV pool of its own, as hardware vendors' platforms do. It may
differ from SGLang's in ways that we do not know, so nothing is shared."""

from typing import Any


def register() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_reasoncache.cpu.platform import TorchCpuPlatform

    class OwnPool(MHATokenToKVPool):
        """Has SGLang's buffers, under another name."""

    def pool_class(_platform: Any, *, kind: str) -> type | None:
        return OwnPool if kind == "mha" else None

    setattr(TorchCpuPlatform, "get_kv_pool_cls", pool_class)  # noqa: B010

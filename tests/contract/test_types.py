# SPDX-License-Identifier: Apache-2.0
"""SGLang's classes have the attributes that our protocols name."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest

from sglang_reasoncache.compat import types

#: Protocol -> dotted path of the class.
CLASSES: dict[type, str] = {
    types.RequestKV: "sglang.srt.managers.schedule_batch.ReqKvInfo",
    types.Request: "sglang.srt.managers.schedule_batch.Req",
    types.RadixKey: "sglang.srt.mem_cache.radix_cache.RadixKey",
    types.TreeNode: "sglang.srt.mem_cache.radix_cache.TreeNode",
    types.KVPool: "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    types.ReqToTokenPool: "sglang.srt.mem_cache.memory_pool.ReqToTokenPool",
    types.SlotAllocator: "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
    types.PrefixTree: "sglang.srt.mem_cache.radix_cache.RadixCache",
    types.ServerArgs: "sglang.srt.server_args.ServerArgs",
    types.ModelConfig: "sglang.srt.configs.model_config.ModelConfig",
    types.ModelRunner: "sglang.srt.model_executor.model_runner.ModelRunner",
    types.AttentionLayer: "sglang.srt.layers.radix_attention.RadixAttention",
    types.ForwardMode: "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    types.ForwardBatch: "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    types.ScheduleBatch: "sglang.srt.managers.schedule_batch.ScheduleBatch",
    types.CacheInitParams: "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
    types.TpWorker: "sglang.srt.managers.tp_worker.TpModelWorker",
    types.TreeCacheBuildContext: "sglang.srt.mem_cache.registry.TreeCacheBuildContext",
}


def attributes_of(protocol: type) -> Iterator[str]:
    """What the protocol says an object has."""
    yield from protocol.__annotations__
    yield from (name for name in vars(protocol) if not name.startswith("_"))


CASES = [(protocol, attribute) for protocol in CLASSES for attribute in attributes_of(protocol)]


def test_every_protocol_has_a_class() -> None:
    """A new protocol is checked as well."""
    protocols = {
        value
        for value in vars(types).values()
        if getattr(value, "_is_protocol", False) and value.__module__ == types.__name__
    }
    assert protocols == set(CLASSES)


@pytest.mark.parametrize(
    ("protocol", "attribute"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_attribute_exists(protocol: type, attribute: str) -> None:
    """Set by the class, by one it inherits from, or declared there."""
    found = pkgutil.resolve_name(CLASSES[protocol])
    sources = [base for base in found.__mro__ if base.__module__.startswith("sglang")]
    declared = {name for base in sources for name in getattr(base, "__annotations__", ())}
    assigned = re.compile(rf"\bself\.{attribute}\b[^=\n]*(:[^=\n]+)?=[^=]")
    assert (
        hasattr(found, attribute)
        or attribute in declared
        or any(assigned.search(inspect.getsource(base)) for base in sources)
    ), f"{found.__name__} has no {attribute}"

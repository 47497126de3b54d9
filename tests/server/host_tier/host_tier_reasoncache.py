# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test without a GPU: PyTorch code replaces the CUDA kernels that copy KV between host
and device in SGLang's hierarchical cache. SGLang still decides which radix nodes are copied, and when."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch


def register() -> None:
    setattr(torch, "get_device_module", lambda device=None: torch.cpu)  # noqa: B010
    # SGLang waits for the device before it copies retracted requests of a decode server to the host.
    torch.cuda.synchronize = lambda *_, **__: None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang calls the function ``target`` before it creates the radix cache, which creates the host pool.
    target = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(target, _replace, HookType.BEFORE)


def _replace(model_runner: Any, *_: object, **__: object) -> None:
    if model_runner.server_args.disaggregation_transfer_backend == "mooncake":
        conn: Any = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
        # Pinned indices and a CUDA event.
        conn.MooncakeKVSender.supports_host_tensor_indices = False
    for kind in ("mha", "mla"):
        pools: Any = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{kind}")
        pools.transfer_kv_direct = copy
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_: None
    # SGLang would keep ten gigabytes of host memory free, which a test machine may not have.
    base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.host_memory_budget_bytes = lambda *_: 1 << 30
    # Pinned memory needs a GPU.
    base.HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)


def copy(
    src_layers: Sequence[torch.Tensor], dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int,
) -> None:  # fmt: skip
    """Replaces ``transfer_kv_direct``: copies slots from each source tensor to the matching target tensor."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]

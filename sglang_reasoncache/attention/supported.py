# SPDX-License-Identifier: Apache-2.0
"""What our attention computes, checked when a server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reasoncache import compat

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import AttentionLayer, ModelRunner


def check_supported(model_runner: ModelRunner, requested_by: str) -> None:
    """Refuse what our attention kernels do not compute.

    Args:
        model_runner: SGLang's runner, its model and pool already there.
        requested_by: The flags that request our attention, the beginning of every message.

    Raises:
        ValueError: naming the first thing in the way.
    """
    if model_runner.use_mla_backend:
        raise ValueError(f"{requested_by} does not support multi-head latent attention")
    if model_runner.model_config.is_encoder_decoder:
        raise ValueError(f"{requested_by} does not support encoder-decoder models")
    if not model_runner.spec_algorithm.is_none():
        raise ValueError(f"{requested_by} does not support --speculative-algorithm")
    pool = model_runner.token_to_kv_pool
    if type(pool) is not compat.MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise ValueError(
            f"{requested_by} reads one plain multi-head KV pool in NHD layout, this server uses "
            f"{type(pool).__name__} ({getattr(pool, 'kv_cache_layout', 'own layout')})"
        )
    if pool.is_quantized_kv_cache:
        raise ValueError(f"{requested_by} does not read block-quantised KV caches")
    for layer in attention_layers(model_runner.model):
        for name, found, supported in (
            ("sliding window", layer.sliding_window_size, (-1, None)),
            ("cross attention", layer.is_cross_attention, (False,)),
            ("attention type", layer.attn_type, (compat.AttentionType.DECODER,)),
            ("position encoding", layer.pos_encoding_mode, ("NONE",)),
            ("logit capping", layer.logit_capping_method, ("tanh",)),
            ("attention temperature length", layer.xai_temperature_len, (-1,)),
        ):
            if found not in supported:
                raise ValueError(
                    f"{requested_by}: layer {layer.layer_id} has {name} {found}, supported: {supported[0]}"
                )


def attention_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """SGLang's attention layers of a model."""
    return [module for module in model.modules() if isinstance(module, compat.RadixAttention)]

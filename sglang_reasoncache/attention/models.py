# SPDX-License-Identifier: Apache-2.0
"""Decides whether a model is served, by its KV pool, its attention layers and flags that some models exclude.
``plugin/refusals.py`` checks the other flags."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.attention.families import REFUSED, WITHOUT_ROTATED
from sglang_reasoncache.errors import CannotShare

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from sglang_reasoncache.compat.types import (
        AttentionLayer,
        ModelRunner,
        ServerArgs,
        TreeCacheBuildContext,
    )

_FLAG = "--enable-reasoncache"
#: The end of messages that name a flag with which keys can be rotated.
IT_WORKS = "it works"

#: What our kernels require of a layer: a feature's name, its attribute in SGLang's layer, supported values.
LAYER_ATTRIBUTES = (
    ("cross attention", "is_cross_attention", (False,)),
    ("attention type", "attn_type", ("decoder",)),
    ("position encoding", "pos_encoding_mode", ("NONE",)),
    ("logit capping", "logit_capping_method", ("tanh",)),
    ("attention temperature length", "xai_temperature_len", (-1,)),
)
#: Attribute of a model's modules -> why our kernels cannot serve the model: a way of its own to write or read
#: KV, which asks SGLang's backend for its plan or gives the backend more than queries, keys and values.
OWN_WAYS = {
    "_fused_kv_store": "attention that writes keys and values itself (Muse Spark)",
    "rel_logits_proj": "attention with relative logits (Inkling)",
}
#: Attribute of SGLang's Transformers fallback: layer id -> its attention layer.
FALLBACK = "attention_instances"
#: Values of --moe-a2a-backend with which SGLang may run decode steps of a group of DP attention as prefills.
DECODES_AS_PREFILLS = ("pplx", "deepep_v2")


def check_pool(pool: Any, requested_by: str = _FLAG, drafts: bool = False) -> None:
    """Raises CannotShare unless buffers are ``[slots, heads, head_dim]`` or latent rows, and a layer without a
    window has some, which a draft model need not have.

    ``requested_by``: the flag that needs such buffers; the message begins with this flag."""
    several = type(pool) in (compat.SWAKVPool, compat.HybridLinearKVPool)
    if several and not drafts and not compat.shared_layers(pool):
        raise CannotShare(f"{requested_by}: no attention layer without a window has KV to share")
    if type(pool) is compat.SWAKVPool:
        if compat.latent_rank(pool.swa_kv_pool):
            raise CannotShare(
                f"{requested_by} does not support latent attention with windows in a pool of their own"
            )
        check_pool(pool.swa_kv_pool, requested_by)
        pool = pool.full_kv_pool
    if type(pool) is compat.HybridLinearKVPool:
        pool = pool.full_kv_pool  # the pool of the attention layers; state layers have no KV
    if type(pool) is compat.MLATokenToKVPool:
        if not pool.qk_rope_head_dim:
            raise CannotShare(f"{requested_by} does not support it: {_reason(WITHOUT_ROTATED)}")
        return
    if type(pool) is compat.DSATokenToKVPool:
        raise _sparse(requested_by)
    layout = getattr(pool, "kv_cache_layout", "own layout")
    is_plain = type(pool) is compat.MHATokenToKVPool and not pool.is_quantized_kv_cache
    if not is_plain or layout != "nhd":
        raise CannotShare(
            f"{requested_by} supports models with one plain multi-head KV pool in NHD layout without "
            f"block quantisation (--kv-cache-dtype), this server uses {type(pool).__name__} ({layout})"
        )


def what_rows_keep(rows: Any) -> str | None:
    """What SGLang keeps for each request beside the slots of its row, so that neither other slots nor KV that
    comes back from the host has it. None if that is nothing."""
    kept = getattr(rows, "_aux_cache", None)
    return None if kept is None else f"SGLang keeps {type(kept).__name__} for each request"


def why_only_copied(pool: Any) -> str | None:
    """Why KV in ``pool`` is not shared, although all that a request keeps there can go to the host and back
    (``cache/swap.py``). None for other pools."""
    if type(pool) is compat.DSATokenToKVPool and not pool.kpool_use_compress:
        return str(_sparse(_FLAG))
    return None


def check_kind(context: TreeCacheBuildContext) -> None:
    """Raises CannotShare for a model with DeepSeek sparse attention (DSA)."""
    if context.is_dsa:
        raise _sparse(_FLAG)


def _sparse(requested_by: str) -> CannotShare:
    return CannotShare(f"{requested_by} does not support sparse attention: {_reason('sparse')}")


def _reason(kind: str) -> str:
    """Why attention of this kind shares nothing."""
    return REFUSED[kind].removeprefix("nothing shared: ")


def window_age(context: TreeCacheBuildContext) -> int:
    """Distance from a row's end, in tokens, at which SGLang has surely freed a position's slot in the window
    pool; 0 without a window pool."""
    if not context.is_hybrid_swa:
        return 0
    interval: int = compat.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
    # The tokens of two more steps, of the one in flight and the next, and whole pages at both ends.
    steps = 2 * max(compat.drafted_tokens(context.tp_worker.model_runner), 1)
    pages = 2 * (context.params.page_size - 1)
    return context.params.sliding_window_size + interval + steps + pages


def check_latent(pool: Any, args: ServerArgs) -> None:
    """Raises ValueError for flags that cannot be combined with latent attention if SGLang's kernels run all its
    prefills. They do not rotate keys, so a prefill must not read shared slots."""
    reads = "a prefill would read keys of shared slots as they are cached"
    given = {
        "--enable-mixed-chunk": (args.enable_mixed_chunk, reads),
        "--moe-a2a-backend with DP attention": (
            compat.get_parallel().attn_dp_size > 1 and args.moe_a2a_backend in DECODES_AS_PREFILLS,
            reads,
        ),
    }
    for flag, (is_set, reason) in given.items():
        if is_set and compat.latent_rank(pool):
            raise ValueError(f"{_FLAG} does not support {flag} beside latent attention: {reason}")


def check_attention(model_runner: ModelRunner, requested_by: str) -> None:
    """Raises ValueError if the model needs a feature that our attention kernels lack, and names the feature."""
    if model_runner.model_config.is_encoder_decoder:
        raise ValueError(f"{requested_by} does not support encoder-decoder models")
    if getattr(model_runner.model_config, "is_local_attention_model", False):
        raise ValueError(f"{requested_by} does not support attention in chunks (Llama 4)")
    if any(
        getattr(module, "enable_sink_attention", False) for module in model_runner.model.modules()
    ):
        raise ValueError(
            f"{requested_by} does not support sinks that a model applies itself (IQuest-Q1)"
        )
    modules = list(model_runner.model.modules())
    if any(getattr(module, "learnable_sink_param", None) is not None for module in modules):
        raise ValueError(f"{requested_by} does not support sinks of latent attention (Hunyuan 4)")
    for attribute, way in OWN_WAYS.items():
        if any(hasattr(module, attribute) for module in modules):
            raise ValueError(f"{requested_by} does not support {way}")
    check_pool(model_runner.token_to_kv_pool, requested_by, model_runner.is_draft_worker)
    layers = attention_layers(model_runner)
    if not layers:
        raise ValueError(f"{requested_by}: no attention layers were found in the model")
    latent = compat.latent_rank(model_runner.token_to_kv_pool)
    windows = compat.window_layers(model_runner.token_to_kv_pool)
    multimodal = getattr(model_runner.model_config, "is_multimodal", False)
    if multimodal and any(map(reach_of, layers)):
        raise ValueError(
            f"{requested_by}: beside sliding windows images are not supported, whose tokens may see each "
            f"other; with --language-model-only, or without --enable-multimodal, {IT_WORKS}"
        )
    for layer in layers:
        if latent and layer.k_scale_float not in (None, 1.0):
            raise ValueError(
                f"{requested_by}: layer {layer.layer_id} has latent rows divided by "
                f"{layer.k_scale_float}"
            )
        if windows and (layer.layer_id in windows) != bool(reach_of(layer)):
            raise ValueError(
                f"{requested_by}: layer {layer.layer_id} has a window and no window pool, or a window pool "
                "and no window"
            )
        for name, attribute, supported in LAYER_ATTRIBUTES:
            value = getattr(layer, attribute)
            value = getattr(value, "value", value)  # the value of an enum
            if value not in supported:
                raise ValueError(
                    f"{requested_by}: layer {layer.layer_id} has {name} {value}, "
                    f"supported: {supported[0]}"
                )


def check_window_of_decode(model_runner: ModelRunner, requested_by: str) -> None:
    """Raises ValueError if layers have another window than the model. For backends whose decode steps in SGLang
    read the model's window: ours read each layer's, so sharing would change what a response reads."""
    of_model = model_runner.sliding_window_size
    for layer in attention_layers(model_runner):
        if reach_of(layer) and layer.sliding_window_size != of_model:
            raise ValueError(
                f"{requested_by}: layer {layer.layer_id} has the window {layer.sliding_window_size}, SGLang's "
                f"decode steps read {of_model} here; with --attention-backend fa3 or trtllm_mha they read the "
                "layer's"
            )


def check_drafts_in_windows(
    model_runner: ModelRunner, requested_by: str, *, reads_windows: bool
) -> None:
    """Raises ValueError for speculation with a model whose sliding windows have too few positions, or whose
    verifications in SGLang do not read them (``reads_windows`` false): FlashInfer's in SGLang 0.5.22 and 0.5.23
    read a row's first positions (``generate_attn_arg_prefill`` is not told where windows begin)."""
    drafted = compat.drafted_tokens(model_runner)
    smallest = min(windows_of(model_runner), default=0)
    if drafted and smallest and not reads_windows:
        raise ValueError(
            f"{requested_by}: SGLang's verification of drafted tokens reads other positions than those of the "
            "model's sliding windows; with --attention-backend triton or fa3 it reads these"
        )
    if 0 < smallest <= drafted:
        raise ValueError(
            f"{requested_by}: --speculative-num-draft-tokens {drafted} must be below the model's sliding "
            f"window of {smallest} positions"
        )


def attention_layers(model_runner: ModelRunner) -> list[AttentionLayer]:
    """SGLang's attention layers that read the pool. Leaves out ``RadixAttention`` modules of state layers and,
    with latent attention, those that attend to the expanded keys and values of a prefill. Layers of SGLang's
    Transformers fallback are no modules of the model (:func:`fallback_layers`)."""
    pool = model_runner.token_to_kv_pool
    numbers = set(compat.layer_ids(pool))
    rank = compat.latent_rank(pool)
    modules = itertools.chain(model_runner.model.modules(), fallback_layers(model_runner.model))
    return [
        module
        for module in modules
        if isinstance(module, compat.RadixAttention)
        and module.layer_id in numbers
        and (not rank or is_absorbed(module, rank))
    ]


def is_absorbed(layer: Any, rank: int) -> bool:
    """Whether a layer attends to latent rows of ``rank`` dims, not to what is expanded from them."""
    return bool(layer.v_head_dim == rank and layer.tp_k_head_num == 1)


def owners_of(
    model: torch.nn.Module, layers: Collection[int] | None = None
) -> list[tuple[str, torch.nn.Module]]:
    """Name and module, for each module that has one of SGLang's attention layers as a child. ``layers``: ids of
    the layers with KV; None for all. State layers may have such a child, too (lightning attention)."""
    return [each for each in model.named_modules() if attention_of(each[1], layers)]


def attention_of(owner: torch.nn.Module, layers: Collection[int] | None = None) -> list[Any]:
    """SGLang's attention layers among the children of ``owner``, as far as their ids are among ``layers``."""
    return [
        child
        for child in owner.children()
        if isinstance(child, compat.RadixAttention) and (layers is None or child.layer_id in layers)
    ]


def fallback_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model that SGLang runs by Hugging Face's code (its Transformers fallback). They
    lie in a dict, where no module of the model knows them. Empty for other models."""
    held: Mapping[int, AttentionLayer] = getattr(model, FALLBACK, {})
    return list(held.values())


def windows_of(model_runner: ModelRunner) -> set[int]:
    """The sizes of the model's sliding windows, in positions."""
    return {reach_of(layer) for layer in attention_layers(model_runner)} - {0}


def reach_of(layer: AttentionLayer) -> int:
    """Number of positions that a query of the layer sees, including its own; 0 if the layer has no window."""
    window = layer.sliding_window_size
    return 0 if window is None else max(window, -1) + 1

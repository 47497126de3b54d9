# SPDX-License-Identifier: Apache-2.0
"""Decides whether a model is served, and whether its shared keys can be rotated to other positions. Both
depend on the model's KV pool, attention layers and rotary embedding. ``plugin/refusals.py`` checks flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.kernels.rotation import KeyRotation

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import (
        AttentionLayer,
        ModelRunner,
        ServerArgs,
        TreeCacheBuildContext,
    )

_FLAG = "--enable-reasoncache"
_CORRECTED = "--reasoncache-positions corrected"

#: End of messages about window pools, whose slots SGLang frees as the window moves on.
BESIDE_WINDOWS = (
    "beside layers with sliding windows in a pool of their own; --disable-hybrid-swa-memory puts all layers "
    "into one pool, which takes more memory a token"
)
#: Kind of attention -> reason why the server refuses the model or shares nothing.
REFUSED = {
    "other windows": "nothing shared: rotations unknown",
    "latent, lightning": "nothing shared: lightning layers have a rotary embedding of their own",
    "sparse": "the model also caches index keys, which choose what is read and are not rotated with the others",
}


class Family(NamedTuple):
    """A row of the table in docs/index.md. ``tried``: which models were run, on which device."""

    models: str
    attention: str
    tried: str

    @property
    def answer(self) -> str:
        """``served``, or why not."""
        return REFUSED.get(self.attention, "served")


#: Rows of the table in docs/index.md. ``attention``: a key of ``REFUSED``, or attention that is served.
FAMILIES = (
    Family(
        "Llama, Qwen2, Qwen3, Mistral and others", "full", "two small ones: CPU; an 8B shape: H100"
    ),
    Family("Qwen3-Next, Qwen3.5 without images", "full, gated delta net", "tiny ones: CPU"),
    Family("LFM2", "full, short convolution", "tiny: CPU"),
    Family("Nemotron-H", "full without positions, Mamba 2", "tiny: CPU"),
    Family("Granite-H", "full without positions, Mamba 2", "tiny: CPU"),
    Family("Falcon-H1", "full, Mamba 2", "tiny: CPU"),
    Family("DeepSeek-R1, V2 and V3, Kimi-K2, GLM-4.7-Flash", "latent", "tiny V2, V3 (TP 2): CPU"),
    Family("Kimi-Linear", "latent without positions, Kimi delta", "tiny: CPU"),
    Family("Ring", "latent, lightning", ""),
    Family("DeepSeek-V3.2, GLM-5", "sparse", ""),
    Family("Gemma 2 and 3, EXAONE 4, OLMo 3", "full, windows", "tiny Gemma 3 and OLMo 3: CPU"),
    Family("Mellum 2", "full, windows in their own pool", "tiny: CPU"),
    Family("gpt-oss", "full, windows in their own pool", "not tried"),
    Family("Gemma 4, MiMo-V2, Step-3.5, Llama 4", "other windows", ""),
)

#: What our kernels require of a layer: a feature's name, its attribute in SGLang's layer, supported values.
LAYER_ATTRIBUTES = (
    ("cross attention", "is_cross_attention", (False,)),
    ("attention type", "attn_type", ("decoder",)),
    ("position encoding", "pos_encoding_mode", ("NONE",)),
    ("logit capping", "logit_capping_method", ("tanh",)),
    ("attention temperature length", "xai_temperature_len", (-1,)),
)
#: Rotary modules with one table of angles that are linear in the position. (The three positions of
#: MRotaryEmbedding are equal in requests without images; requests with images do not share.)
ROTARY_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
    "MRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
)
#: Attention module that may multiply each dim of a key by a learned weight after the rotation -> the attribute
#: that switches this on. Such a key cannot be rotated again.
SCALES_ROTATED_KEYS = {"HunYuanAttention": "use_qk_norm"}
#: Attention module -> start of the class names of models that can use this module without a rotary embedding.
#: Cached keys then have no positions: only the state layers of such a model depend on positions.
WITHOUT_POSITIONS = {
    "NemotronHAttention": "NemotronH",
    "GraniteMoeHybridAttention": "GraniteMoeHybrid",
    "DeepseekV2AttentionMLA": "KimiLinear",
}
#: Attention modules whose keys can be rotated to other positions in models with sliding windows. Each module
#: rotates keys by its own rotary embedding, unless :func:`_rotation_of` says otherwise.
WINDOWED = (
    *("Gemma2Attention", "Gemma3Attention", "Exaone4Attention", "Olmo2Attention"),
    *("GptOssAttention", "MellumAttention"),
)
#: Dims that SGLang's FlashInfer backend supports: of a head; of the latent and the rotated part of a row.
#: For other dims SGLang's Triton backend is chosen.
FLASHINFER_DIMS, FLASHINFER_LATENT = (64, 128, 256), (512, 64)


def check_pool(pool: Any, requested_by: str = _FLAG) -> None:
    """Raises ValueError unless buffers are ``[slots, heads, head_dim]`` or latent rows, and for a window pool
    with a page size above 1.

    ``requested_by``: the flag that needs such buffers; the message begins with this flag."""
    if type(pool) is compat.SWAKVPool:
        if pool.page_size > 1:
            told = f"--page-size {pool.page_size} (1 is the default of --attention-backend triton)"
            raise ValueError(f"{requested_by} does not support {told} {BESIDE_WINDOWS}")
        check_pool(pool.swa_kv_pool, requested_by)
        pool = pool.full_kv_pool
    if type(pool) is compat.HybridLinearKVPool:
        pool = pool.full_kv_pool  # the pool of the attention layers; state layers have no KV
    if type(pool) is compat.MLATokenToKVPool and pool.qk_rope_head_dim:
        return
    if type(pool).__name__ == "DSATokenToKVPool":
        raise _sparse(requested_by)
    layout = getattr(pool, "kv_cache_layout", "own layout")
    is_plain = type(pool) is compat.MHATokenToKVPool and not pool.is_quantized_kv_cache
    if not is_plain or layout != "nhd":
        raise ValueError(
            f"{requested_by} supports models with one plain multi-head KV pool in NHD layout without "
            f"block quantisation (--kv-cache-dtype), this server uses {type(pool).__name__} ({layout})"
        )


def check_kind(context: TreeCacheBuildContext) -> None:
    """Raises ValueError for a model with DeepSeek sparse attention (DSA)."""
    if context.is_dsa:
        raise _sparse(_FLAG)


def _sparse(requested_by: str) -> ValueError:
    return ValueError(f"{requested_by} does not support sparse attention: {REFUSED['sparse']}")


def window_age(context: TreeCacheBuildContext) -> int:
    """Distance from a row's end, in tokens, at which SGLang has surely freed a position's slot in the window
    pool; 0 without a window pool. Raises ValueError for a flag that cannot be combined with such a pool."""
    if not context.is_hybrid_swa:
        return 0
    if context.enable_hierarchical_cache:
        raise ValueError(f"{_FLAG} does not support --enable-hierarchical-cache {BESIDE_WINDOWS}")
    interval: int = compat.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
    # Two more tokens, for the step in flight and for the next step.
    return context.params.swa_retain_window + interval + 2


def check_latent(pool: Any, args: ServerArgs) -> None:
    """Raises ValueError for flags that cannot be combined with latent attention. On a GPU SGLang's kernels
    run its prefills. They do not rotate keys, so a prefill must not read shared slots."""
    reads = "a prefill would read keys of shared slots as they are cached"
    given = {
        "--enable-mixed-chunk": (args.enable_mixed_chunk, reads),
        # With these backends a DP group decodes by SGLang's prefill code while another group prefills.
        "--moe-a2a-backend with DP attention": (
            compat.get_parallel().attn_dp_size > 1
            and args.moe_a2a_backend in ("pplx", "deepep_v2"),
            reads,
        ),
    }
    for flag, (found, reason) in given.items():
        if found and compat.latent_rank(pool):
            raise ValueError(f"{_FLAG} does not support {flag} beside latent attention: {reason}")


def cuda_backend_of(model: Any, latent: bool, has_flashinfer: bool) -> str | None:
    """Name of the SGLang backend that our mixin extends on CUDA if the operator has not named a backend. None
    leaves the choice to SGLang.

    ``model``: SGLang's ModelConfig, before the model is loaded. ``latent``: whether the model has multi-head
    latent attention."""
    if model.is_encoder_decoder or model.is_hybrid_swa:
        return None
    even = model.head_dim == model.v_head_dim and model.head_dim in FLASHINFER_DIMS
    if latent:
        # SGLang's FlashInfer backend needs ``model.scaling``; its prefill takes other dims than Sarvam passes.
        even = (model.kv_lora_rank, model.qk_rope_head_dim) == FLASHINFER_LATENT
        names = getattr(model.hf_config, "architectures", None) or ()
        even = even and hasattr(model, "scaling") and not any("Sarvam" in name for name in names)
    return "flashinfer" if has_flashinfer and even and not model.has_attention_sinks else "triton"


def caches_without_positions(hf_config: Any) -> bool:
    """Like :func:`is_without_positions`, but judges a model that is not loaded yet by its configuration."""
    [name, *_] = getattr(hf_config, "architectures", None) or [""]
    rotates = getattr(hf_config, "position_embedding_type", None) == "rope"
    return name.startswith(tuple(WITHOUT_POSITIONS.values())) and not rotates


def check_attention(model_runner: ModelRunner, requested_by: str) -> None:
    """Raises ValueError if the model needs a feature that our attention kernels lack, and names the feature."""
    if model_runner.model_config.is_encoder_decoder:
        raise ValueError(f"{requested_by} does not support encoder-decoder models")
    if not model_runner.spec_algorithm.is_none():
        raise ValueError(f"{requested_by} does not support --speculative-algorithm")
    check_pool(model_runner.token_to_kv_pool, requested_by)
    latent = compat.latent_rank(model_runner.token_to_kv_pool)
    windows = compat.window_layers(model_runner.token_to_kv_pool)
    for layer in attention_layers(model_runner):
        if latent and layer.k_scale_float not in (None, 1.0):
            scales = f"latent rows divided by {layer.k_scale_float}"
            raise ValueError(f"{requested_by}: layer {layer.layer_id} has {scales}")
        if windows and (layer.layer_id in windows) != bool(reach_of(layer)):
            where = "a window and no window pool, or a window pool and no window"
            raise ValueError(f"{requested_by}: layer {layer.layer_id} has {where}")
        for name, attribute, supported in LAYER_ATTRIBUTES:
            found = getattr(layer, attribute)
            found = getattr(found, "value", found)  # the value of an enum
            if found not in supported:
                raise ValueError(
                    f"{requested_by}: layer {layer.layer_id} has {name} {found}, "
                    f"supported: {supported[0]}"
                )


def is_without_positions(model: torch.nn.Module) -> bool:
    """Whether ``model`` caches keys without positions, so that any position may read a key as cached."""
    owners = [type(owner).__name__ for _, owner in _owners(model)]
    return set(owners) <= set(WITHOUT_POSITIONS) and bool(owners) and not _rotary_modules(model)


def attention_layers(model_runner: ModelRunner) -> list[AttentionLayer]:
    """SGLang's attention layers that read the pool. Leaves out ``RadixAttention`` modules of state layers and,
    with latent attention, those that attend to the expanded keys and values of a prefill."""
    pool = model_runner.token_to_kv_pool
    numbers, rank = set(compat.layer_ids(pool)), compat.latent_rank(pool)
    return [
        module
        for module in model_runner.model.modules()
        if isinstance(module, compat.RadixAttention)
        and module.layer_id in numbers
        and (not rank or (module.v_head_dim == rank and module.tp_k_head_num == 1))
    ]


def reach_of(layer: AttentionLayer) -> int:
    """Number of positions that a query of the layer sees, including its own; 0 if the layer has no window."""
    window = layer.sliding_window_size
    return 0 if window is None else max(window, -1) + 1


def key_rotations(model_runner: ModelRunner, latent_dims: int | None) -> dict[int, KeyRotation]:
    """Layer id -> rotation of the layer's keys, on the pool's device. Layers of equal rotation share an object.

    Raises the errors of :func:`key_rotation`. Layers of a model with sliding windows may differ in rotation.
    For such a model, multimodal input or an attention module not in ``WINDOWED`` raises ValueError, too.
    """
    model, most = model_runner.model, model_runner.model_config.context_len
    device = model_runner.req_to_token_pool.req_to_token.device
    if not any(map(reach_of, attention_layers(model_runner))):
        one = key_rotation(model, most, latent_dims).to(device)
        return dict.fromkeys(compat.layer_ids(model_runner.token_to_kv_pool), one)
    if getattr(model_runner.model_config, "is_multimodal", False):
        raise ValueError(
            f"{_CORRECTED}: beside sliding windows --enable-multimodal is not supported, because tokens "
            "of an image may see each other"
        )
    made: dict[Any, KeyRotation] = {}
    found = {}
    for name, owner in _owners(model):
        kind = type(owner).__name__
        if kind not in WINDOWED:
            raise ValueError(
                f"{_CORRECTED}: {name} ({kind}) is beside sliding windows, and how such layers rotate "
                f"keys is known of {', '.join(WINDOWED)}; as-cached works"
            )
        _check_rotated_keys(name, owner, latent_dims)
        embedding, turns = _rotation_of(owner, model)
        if (embedding, turns) not in made:
            rotation = _gemma3_rotation(embedding, most)
            rotation = rotation or key_rotation(torch.nn.ModuleList([embedding]), most)
            made[embedding, turns] = (rotation if turns else rotation.none()).to(device)
        for layer in owner.children():
            if isinstance(layer, compat.RadixAttention):
                found[layer.layer_id] = made[embedding, turns]
    return found


def _rotation_of(owner: Any, model: torch.nn.Module) -> tuple[Any, bool]:
    """The rotary embedding of the attention module ``owner``, and whether the module rotates keys at all."""
    kind = type(owner).__name__
    if kind == "Gemma3Attention":
        # SGLang does not use the module's own rotary embedding, which lacks RoPE scaling.
        [text] = (m for m in model.modules() if hasattr(m, "rotary_emb_local"))
        return (text.rotary_emb_local if owner.is_sliding else text.rotary_emb), True
    never = kind == "Exaone4Attention" and owner.sliding_window_pattern and not owner.is_sliding
    return owner.rotary_emb, not never


def _gemma3_rotation(embedding: Any, max_positions: int) -> KeyRotation | None:
    """The rotation of SGLang's Gemma3RotaryEmbedding, which has no table; None for another embedding."""
    if type(embedding).__name__ != "Gemma3RotaryEmbedding":
        return None
    if embedding.rope_type not in ("default", "linear"):
        raise ValueError(f"{_CORRECTED}: Gemma 3 with rope_type {embedding.rope_type}")
    positions = torch.arange(max_positions, device=embedding.inv_freq.device)
    angles = positions[:, None] * embedding.inv_freq.float()
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=1), angles.shape[1] * 2, True)


def key_rotation(
    model: torch.nn.Module, max_positions: int, latent_dims: int | None = None
) -> KeyRotation:
    """The rotation of keys, read from the rotary embedding that all attention layers share.

    ``latent_dims``: number of rotated dims, which are the last dims of a latent row; None if attention is not
    latent.

    Raises:
        ValueError: the model has no rotary embedding, or several; angles are not linear in the position; keys
            are not rotated, or are changed after the rotation; the table is shorter than the context.
    """
    found = _rotary_modules(model)
    kinds = {type(m).__name__ for m in found}
    if len(kinds) != 1 or not kinds <= set(ROTARY_KINDS):
        raise ValueError(
            f"{_CORRECTED} needs one plain rotary embedding per model, "
            f"found {sorted(kinds) or 'none'}; as-cached works without"
        )
    for name, owner in _owners(model):
        _check_rotated_keys(name, owner, latent_dims)
    table, *others = (m._compute_cos_sin_cache().float() for m in found)
    if any(not torch.equal(other, table) for other in others):
        raise ValueError(f"{_CORRECTED} needs the same rotary embedding in every layer")
    if len(table) < max_positions:
        raise ValueError(
            f"{_CORRECTED}: the rotary table holds {len(table)} positions, "
            f"--context-length is {max_positions}"
        )
    return KeyRotation(table, found[0].rotary_dim, found[0].is_neox_style)


def _rotary_modules(model: torch.nn.Module) -> list[Any]:
    """The rotary modules of a model, including SGLang's that do not derive from RotaryEmbedding (LongRoPE,
    dual chunk). Vision layers are skipped, because they cache no keys."""
    package = compat.RotaryEmbedding.__module__.rpartition(".")[0] + "."
    found = [child for _, owner in _owners(model) for child in owner.children()]
    return [
        module
        for module in dict.fromkeys(found or model.modules())
        if isinstance(module, compat.RotaryEmbedding) or type(module).__module__.startswith(package)
    ]


def _owners(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Name and module, for each module that has one of SGLang's attention layers as a child."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(isinstance(child, compat.RadixAttention) for child in module.children())
    ]


def _check_rotated_keys(name: str, owner: torch.nn.Module, latent_dims: int | None) -> None:
    """Raises ValueError if the attention module ``owner`` caches keys that are not rotated, or are changed
    after their rotation."""
    children = list(owner.children())
    heads = {latent_dims or c.qk_head_dim for c in children if isinstance(c, compat.RadixAttention)}
    kind = type(owner).__name__
    # A rotary module for a part of the head is refused, because nothing tells which dims are rotated.
    sizes = {c.head_size for c in children if isinstance(c, compat.RotaryEmbedding)}
    if not sizes:
        raise ValueError(
            f"{_CORRECTED} needs a rotary embedding in every attention layer, {name} ({kind}) has "
            "none; as-cached works without"
        )
    if sizes != heads:
        raise ValueError(
            f"{_CORRECTED}: {name} ({kind}) rotates a part of {sizes} dims "
            f"placed by the model itself in heads of {heads}; as-cached works"
        )
    flag = SCALES_ROTATED_KEYS.get(kind)
    if flag is not None and getattr(owner, flag, True):
        raise ValueError(
            f"{_CORRECTED}: {name} ({kind}, {flag}) scales keys after "
            "their rotation, so they cannot be rotated any more; as-cached works"
        )

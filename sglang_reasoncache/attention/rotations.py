# SPDX-License-Identifier: Apache-2.0
"""Finds how a model's cached keys are rotated from one position to another, or says why they cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.models import (
    attention_layers,
    attention_of,
    fallback_layers,
    owners_of,
    reach_of,
)
from sglang_reasoncache.kernels.rotation import KeyRotation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from sglang_reasoncache.compat.types import ModelRunner

_CORRECTED = "--reasoncache-positions corrected"

#: Rotary modules with one table of angles that are linear in the position. (The three positions of the modules
#: with M are equal in requests without images; requests with images do not share.)
ROTARY_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DeepseekScalingRotaryEmbedding",
    "MRotaryEmbedding",
    "YaRNScalingMRotaryEmbedding",
    "Ernie4_5_VLRotaryEmbedding",
    "BailingMRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
)
#: Rotary module with two tables: one as long as no response is longer than the model was first trained on, one
#: for all requests once a longer one runs.
LONGROPE = "Phi3LongRoPEScaledRotaryEmbedding"
#: Attention module that may multiply each dim of a key by a learned weight after the rotation -> the attribute
#: that switches this on. Such a key cannot be rotated again.
SCALES_ROTATED_KEYS = {"HunYuanAttention": "use_qk_norm"}
#: Attention modules that models can use without a rotary embedding, themselves or classes that extend them.
#: Cached keys then have no positions: only the state layers of such a model depend on positions.
WITHOUT_POSITIONS = (
    "NemotronHAttention",
    "GraniteMoeHybridAttention",
    "DeepseekV2AttentionMLA",  # of Kimi-Linear, Kimi-K3 and, with use_mla_nope, Ling 3
    "MiniCPMAttention",  # of MiniCPM-SALA
)
#: Attention modules that have a rotary embedding and rotate keys in some layers only -> whether a module does.
ROTATES: dict[str, Callable[[Any], bool]] = {
    "AfmoeAttention": lambda owner: owner.is_local_attention,
    "Cohere2MoeAttention": lambda owner: owner.is_sliding or owner.force_rope,
    "CohereAttention": lambda owner: owner.v1 or owner.sliding_window_size > 0,
    "Exaone4Attention": lambda owner: not owner.sliding_window_pattern or owner.is_sliding,
    "ExaoneMoEAttention": lambda owner: owner.sliding_window or owner.apply_rope_all_layers,
}
#: Attention modules whose keys can be rotated to other positions in models with sliding windows. Each module
#: rotates keys by its own rotary embedding, unless ``ROTATES`` or :func:`_embedding_of` says otherwise.
WINDOWED = (
    "AfmoeAttention",
    "Cohere2MoeAttention",
    "CohereAttention",
    "Exaone4Attention",
    "ExaoneMoEAttention",
    "Gemma2Attention",
    "Gemma3Attention",
    "GptOssAttention",
    "JetNemotronAttention",
    "LagunaAttention",
    "MellumAttention",
    "MiMoV2Attention",
    "Olmo2Attention",
    "Spark2_5Attention",
    "Step3p5Attention",
)


def is_without_positions(model: torch.nn.Module, layers: Collection[int] | None = None) -> bool:
    """Whether ``model`` caches keys without positions, so that any position may read a key as cached.
    ``layers``: ids of the layers with KV; None for all."""
    owners = [owner for _, owner in owners_of(model, layers)]
    lack = bool(owners) and all(map(_lacks_positions, owners))
    return lack and not _rotary_modules(model, layers)


def _lacks_positions(owner: torch.nn.Module) -> bool:
    """Whether the attention module ``owner`` caches keys as they are projected. ``rotary_emb`` is the attribute
    by which the modules of ``WITHOUT_POSITIONS`` rotate, if they do."""
    if not _rotates(owner):
        return True
    names = _names(owner)
    return not names.isdisjoint(WITHOUT_POSITIONS) and getattr(owner, "rotary_emb", None) is None


def _rotates(owner: torch.nn.Module) -> bool:
    """False if ``ROTATES`` says that the attention module ``owner`` never uses its rotary embedding."""
    return all(ROTATES[name](owner) for name in _names(owner) & ROTATES.keys())


def _names(owner: torch.nn.Module) -> set[str]:
    """The names of a module's class and of those it extends."""
    return {base.__name__ for base in type(owner).__mro__}


def finds_no_rotary(model: torch.nn.Module, layers: Collection[int] | None = None) -> bool:
    """Whether none of the attention layers found in ``model`` has a rotary embedding nearby. False if none is
    found. ``layers``: ids of the layers with KV; None for all."""
    return bool(owners_of(model, layers)) and not _rotary_modules(model, layers)


def key_rotations(model_runner: ModelRunner, latent_dims: int | None) -> dict[int, KeyRotation]:
    """Layer id -> rotation of the layer's keys, on the pool's device. Layers of equal rotation share an object.

    Raises the errors of :func:`key_rotation`, and ValueError for the Transformers fallback. Layers may differ
    in rotation if all attention modules are in ``WINDOWED``. Beside sliding windows, other modules raise
    ValueError.
    """
    model = model_runner.model
    max_positions = model_runner.model_config.context_len
    device = model_runner.req_to_token_pool.req_to_token.device
    if fallback_layers(model):
        raise ValueError(
            f"{_CORRECTED}: SGLang runs this model by Hugging Face's code (Transformers fallback): its layers "
            "are not modules, and how they rotate keys is unknown; as-cached works"
        )
    layers = compat.layer_ids(model_runner.token_to_kv_pool)
    owners = owners_of(model, layers)
    others = [(name, owner) for name, owner in owners if type(owner).__name__ not in WINDOWED]
    has_windows = any(map(reach_of, attention_layers(model_runner)))
    if not has_windows and (others or not owners):
        shared = key_rotation(model, max_positions, latent_dims, layers).to(device)
        still = [owner for _, owner in owners if not _rotates(owner)]
        ids = [each.layer_id for owner in still for each in attention_of(owner, layers)]
        return dict.fromkeys(layers, shared) | (dict.fromkeys(ids, shared.none()) if ids else {})
    if others:
        name, owner = others[0]
        raise ValueError(
            f"{_CORRECTED}: {name} ({type(owner).__name__}) is beside sliding windows, and how such layers "
            f"rotate keys is known of {', '.join(WINDOWED)}; as-cached works"
        )
    made: dict[Any, KeyRotation] = {}
    of_layer = {}
    for name, owner in owners:
        turns = _rotates(owner)
        if turns:
            _check_rotated_keys(name, owner, latent_dims)
        embedding = _embedding_of(owner, model)
        if (embedding, turns) not in made:
            rotation = _gemma3_rotation(embedding, max_positions)
            rotation = rotation or key_rotation(torch.nn.ModuleList([embedding]), max_positions)
            made[embedding, turns] = (rotation if turns else rotation.none()).to(device)
        for layer in attention_of(owner, layers):
            of_layer[layer.layer_id] = made[embedding, turns]
    return of_layer


def _embedding_of(owner: Any, model: torch.nn.Module) -> Any:
    """The rotary embedding of the attention module ``owner``."""
    if type(owner).__name__ == "Gemma3Attention":
        # SGLang does not use the module's own rotary embedding, which lacks RoPE scaling.
        [text] = (m for m in model.modules() if hasattr(m, "rotary_emb_local"))
        return text.rotary_emb_local if owner.is_sliding else text.rotary_emb
    return owner.rotary_emb


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
    model: torch.nn.Module,
    max_positions: int,
    latent_dims: int | None = None,
    layers: Collection[int] | None = None,
) -> KeyRotation:
    """The rotation of keys, read from the rotary embedding that all attention layers share.

    ``latent_dims``: number of rotated dims, which are the last dims of a latent row; None if attention is not
    latent. ``layers``: ids of the layers with KV; None for all.

    Raises:
        ValueError: the model has no rotary embedding, or several; angles are not linear in the position; keys
            are not rotated, or are changed after the rotation; the table is shorter than the context.
    """
    modules = _rotary_modules(model, layers)
    kinds = {type(m).__name__ for m in modules}
    if len(kinds) != 1 or not kinds <= {*ROTARY_KINDS, LONGROPE}:
        raise ValueError(
            f"{_CORRECTED} needs one plain rotary embedding per model, "
            f"found {sorted(kinds) or 'none'}; as-cached works without"
        )
    for name, owner in owners_of(model, layers):
        _check_rotated_keys(name, owner, latent_dims)
    table, is_neox = _table(modules[0], max_positions)
    for module in modules[1:]:
        other, pairs_halves = _table(module, max_positions)
        if pairs_halves != is_neox or not torch.equal(other, table):
            raise ValueError(f"{_CORRECTED} needs the same rotary embedding in every layer")
    if len(table) < max_positions:
        raise ValueError(
            f"{_CORRECTED}: the rotary table holds {len(table)} positions, "
            f"--context-length is {max_positions}"
        )
    return KeyRotation(table, modules[0].rotary_dim, is_neox)


def _table(module: Any, max_positions: int) -> tuple[torch.Tensor, bool]:
    """The rotary table of a module from position 0 on, in fp32, and whether it pairs the halves of the dims."""
    if type(module).__name__ == LONGROPE:
        short = module.original_max_position_embeddings
        if max_positions > short:
            raise ValueError(
                f"{_CORRECTED}: {LONGROPE} has other angles once a request is longer than {short} positions; "
                f"--context-length {short} works"
            )
        return module._compute_cos_sin_cache(short, module.short_factor, module.short_mscale), True
    # BailingMRotaryEmbedding begins with negative positions, which parts of images have.
    first = -getattr(module, "position_start", 0)
    table = module._compute_cos_sin_cache().float()[first:]
    plain = compat.RotaryEmbedding._compute_cos_sin_cache
    if len(table) < max_positions and type(module)._compute_cos_sin_cache is plain:
        # SGLang lengthens its own table when it starts, by the same angles for classes that compute it so.
        frequencies = module._compute_inv_freq(module.base).float()
        positions = torch.arange(max_positions, device=frequencies.device)
        angles = positions[:, None] * frequencies
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table, module.is_neox_style


def _rotary_modules(model: torch.nn.Module, layers: Collection[int] | None) -> list[Any]:
    """The rotary modules of a model, without those that attention modules never use. Vision layers are skipped,
    because they cache no keys."""
    owners = [owner for _, owner in owners_of(model, layers)]
    children = [child for owner in owners if _rotates(owner) for child in owner.children()]
    return list(filter(_is_rotary, dict.fromkeys(children if owners else model.modules())))


def _is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module is a rotary embedding. Some of SGLang's do not derive from RotaryEmbedding (LongRoPE,
    dual chunk)."""
    package = compat.RotaryEmbedding.__module__.rpartition(".")[0] + "."
    return isinstance(module, compat.RotaryEmbedding) or type(module).__module__.startswith(package)


def _check_rotated_keys(name: str, owner: torch.nn.Module, latent_dims: int | None) -> None:
    """Raises ValueError if the attention module ``owner`` caches keys that are not rotated, or by other angles
    than those of its rotary embedding, or are changed after their rotation. Nothing is checked if ``ROTATES``
    says that they are not rotated."""
    if not _rotates(owner):
        return
    children = list(owner.children())
    heads = {latent_dims or c.qk_head_dim for c in children if isinstance(c, compat.RadixAttention)}
    kind = type(owner).__name__
    rotary: list[Any] = list(filter(_is_rotary, children))
    # A rotary module for a part of the head is refused, because nothing tells which dims are rotated.
    sizes = {module.head_size for module in rotary}
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
    scaled = {type(module).__name__ for module in rotary} - {"RotaryEmbedding"}
    if scaled and getattr(owner, "use_fused_qk_norm_rope", False):
        raise ValueError(
            f"{_CORRECTED}: with --enable-fused-qk-norm-rope {name} ({kind}) takes its angles from the model's "
            f"config, which may not be those of {scaled.pop()}; without the flag it works"
        )
    flags = {SCALES_ROTATED_KEYS[each] for each in _names(owner) & SCALES_ROTATED_KEYS.keys()}
    for flag in flags:
        if getattr(owner, flag, True):
            raise ValueError(
                f"{_CORRECTED}: {name} ({kind}, {flag}) scales keys after "
                "their rotation, so they cannot be rotated any more; as-cached works"
            )

# SPDX-License-Identifier: Apache-2.0
"""Finds how a model's cached keys are rotated from one position to another, or says why they cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.models import attention_layers, fallback_layers, reach_of
from sglang_reasoncache.kernels.rotation import KeyRotation

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import ModelRunner

_CORRECTED = "--reasoncache-positions corrected"

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
#: Attention modules that models can use without a rotary embedding, themselves or classes that extend them.
#: Cached keys then have no positions: only the state layers of such a model depend on positions.
WITHOUT_POSITIONS = (
    "NemotronHAttention",
    "GraniteMoeHybridAttention",
    "DeepseekV2AttentionMLA",  # of Kimi-Linear, Kimi-K3 and, with use_mla_nope, Ling 3
)
#: Attention modules whose keys can be rotated to other positions in models with sliding windows. Each module
#: rotates keys by its own rotary embedding, unless :func:`_rotation_of` says otherwise.
WINDOWED = (
    "Gemma2Attention",
    "Gemma3Attention",
    "Exaone4Attention",
    "Olmo2Attention",
    "GptOssAttention",
    "MellumAttention",
)


def is_without_positions(model: torch.nn.Module) -> bool:
    """Whether ``model`` caches keys without positions, so that any position may read a key as cached."""
    owners = [owner for _, owner in _owners(model)]
    return bool(owners) and all(map(_lacks_positions, owners)) and not _rotary_modules(model)


def _lacks_positions(owner: torch.nn.Module) -> bool:
    """Whether the attention module ``owner`` caches keys as they are projected. ``rotary_emb`` is the attribute
    by which the modules of ``WITHOUT_POSITIONS`` rotate, if they do."""
    names = {base.__name__ for base in type(owner).__mro__}
    return not names.isdisjoint(WITHOUT_POSITIONS) and getattr(owner, "rotary_emb", None) is None


def finds_no_rotary(model: torch.nn.Module) -> bool:
    """Whether none of the attention layers found in ``model`` has a rotary embedding nearby. False if none is
    found."""
    return bool(_owners(model)) and not _rotary_modules(model)


def key_rotations(model_runner: ModelRunner, latent_dims: int | None) -> dict[int, KeyRotation]:
    """Layer id -> rotation of the layer's keys, on the pool's device. Layers of equal rotation share an object.

    Raises the errors of :func:`key_rotation`, and ValueError for the Transformers fallback. Layers of a model
    with sliding windows may differ in rotation. For such a model, multimodal input or an attention module not
    in ``WINDOWED`` raises ValueError, too.
    """
    model = model_runner.model
    max_positions = model_runner.model_config.context_len
    device = model_runner.req_to_token_pool.req_to_token.device
    if fallback_layers(model):
        raise ValueError(
            f"{_CORRECTED}: SGLang runs this model by Hugging Face's code (Transformers fallback): its layers "
            "are not modules, and how they rotate keys is unknown; as-cached works"
        )
    if not any(map(reach_of, attention_layers(model_runner))):
        shared = key_rotation(model, max_positions, latent_dims).to(device)
        return dict.fromkeys(compat.layer_ids(model_runner.token_to_kv_pool), shared)
    if getattr(model_runner.model_config, "is_multimodal", False):
        raise ValueError(
            f"{_CORRECTED}: beside sliding windows --enable-multimodal is not supported, because tokens "
            "of an image may see each other"
        )
    made: dict[Any, KeyRotation] = {}
    of_layer = {}
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
            rotation = _gemma3_rotation(embedding, max_positions)
            rotation = rotation or key_rotation(torch.nn.ModuleList([embedding]), max_positions)
            made[embedding, turns] = (rotation if turns else rotation.none()).to(device)
        for layer in owner.children():
            if isinstance(layer, compat.RadixAttention):
                of_layer[layer.layer_id] = made[embedding, turns]
    return of_layer


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
    modules = _rotary_modules(model)
    kinds = {type(m).__name__ for m in modules}
    if len(kinds) != 1 or not kinds <= set(ROTARY_KINDS):
        raise ValueError(
            f"{_CORRECTED} needs one plain rotary embedding per model, "
            f"found {sorted(kinds) or 'none'}; as-cached works without"
        )
    for name, owner in _owners(model):
        _check_rotated_keys(name, owner, latent_dims)
    table = modules[0]._compute_cos_sin_cache().float()
    others = (module._compute_cos_sin_cache().float() for module in modules[1:])
    if any(not torch.equal(other, table) for other in others):
        raise ValueError(f"{_CORRECTED} needs the same rotary embedding in every layer")
    if len(table) < max_positions:
        raise ValueError(
            f"{_CORRECTED}: the rotary table holds {len(table)} positions, "
            f"--context-length is {max_positions}"
        )
    return KeyRotation(table, modules[0].rotary_dim, modules[0].is_neox_style)


def _rotary_modules(model: torch.nn.Module) -> list[Any]:
    """The rotary modules of a model, including SGLang's that do not derive from RotaryEmbedding (LongRoPE,
    dual chunk). Vision layers are skipped, because they cache no keys."""
    package = compat.RotaryEmbedding.__module__.rpartition(".")[0] + "."
    children = [child for _, owner in _owners(model) for child in owner.children()]
    return [
        module
        for module in dict.fromkeys(children or model.modules())
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

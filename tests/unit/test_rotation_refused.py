# SPDX-License-Identifier: Apache-2.0
"""Models whose cached keys cannot be rotated by a difference of positions, refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.hunyuan import HunYuanAttention
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from transformers import Phi3Config

from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.unit.rotation_models import fresh_rotary_modules as fresh_rotary_modules

pytestmark = pytest.mark.usefixtures("fresh_rotary_modules")


def rotary_of(**changes: Any) -> Any:
    arguments: dict[str, Any] = dict(
        head_size=64, rotary_dim=64, max_position=256, base=10_000, dtype=torch.float32
    )
    return factory.get_rope(**{**arguments, **changes})


def longrope() -> Any:
    """Phi-3's: one table up to 4,096 tokens, another for longer responses."""
    rope = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=256)
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
        original_max_position_embeddings=256,
        rope_parameters=rope | dict(short_factor=[1.0] * 32, long_factor=[4.0] * 32),
    )
    theta, rope = get_rope_config(config)
    return rotary_of(max_position=512, base=theta, rope_scaling=rope)


SECTIONS = {"mrope_section": [8, 12, 12]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
#: Kinds that are not linear in the position, by their class.
KINDS: dict[str, Any] = {
    "Phi3LongRoPEScaledRotaryEmbedding": longrope,
    "MRotaryEmbedding": lambda: rotary_of(rope_scaling={"rope_type": "default", **SECTIONS}),
    "YaRNScalingMRotaryEmbedding": lambda: rotary_of(rope_scaling={**YARN, **SECTIONS}),
    "Gemma4RotaryEmbedding": lambda: rotary_of(
        rope_scaling={"rope_type": "proportional"}, partial_rotary_factor=0.5
    ),
}


@pytest.mark.parametrize(
    ("message", "modules"),
    [
        *((f"'{kind}'", lambda made=made: [made()]) for kind, made in KINDS.items()),
        *((f"'{kind}'", lambda made=made: [made(), rotary_of()]) for kind, made in KINDS.items()),
        ("none", lambda: [torch.nn.Linear(2, 2)]),
        ("LinearScaling", lambda: [rotary_of(), rotary_of(rope_scaling=LINEAR)]),
        ("same rotary embedding in every layer", lambda: [rotary_of(), rotary_of(base=500_000)]),
        ("holds 63 positions, --context-length is 64", lambda: [rotary_of(max_position=63)]),
    ],
)
def test_refused_by_name(message: str, modules: Any) -> None:
    with pytest.raises(ValueError, match=f"--reasoncache-positions corrected.*{message}"):
        KeyRotation.from_model(torch.nn.ModuleList(modules()), 64)


def test_layers_may_share_one_module() -> None:
    shared = rotary_of()
    KeyRotation.from_model(torch.nn.ModuleList([shared, shared]), 64)


class Attention(torch.nn.Module):
    """A layer as SGLang's models build it."""

    def __init__(self, rotary: torch.nn.Module | None) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.attn = RadixAttention(1, 64, 1.0, 1, layer_id=0)


def test_layers_without_rotation_are_refused_by_name() -> None:
    """Llama 4 and others leave it out in some layers, whose keys must not be rotated."""
    layers = [Attention(rotary_of()), Attention(rotary_of())]
    KeyRotation.from_model(torch.nn.ModuleList(layers), 64)
    layers.append(Attention(None))
    with pytest.raises(ValueError, match=r"--reasoncache-positions corrected.*2 \(Attention\)"):
        KeyRotation.from_model(torch.nn.ModuleList(layers), 64)


@pytest.mark.parametrize("use_qk_norm", [False, True])
def test_keys_scaled_after_their_rotation_are_refused(use_qk_norm: bool) -> None:
    """Hunyuan's norm has a weight for each dim: turning its keys would turn the weights too."""
    layer = HunYuanAttention.__new__(HunYuanAttention)
    torch.nn.Module.__init__(layer)
    layer.rotary_emb, layer.use_qk_norm = rotary_of(), use_qk_norm
    layer.attn = RadixAttention(1, 64, 1.0, 1, layer_id=0)
    if not use_qk_norm:
        KeyRotation.from_model(torch.nn.ModuleList([layer]), 64)
        return
    with pytest.raises(ValueError, match=r"0 \(HunYuanAttention, use_qk_norm\) scales keys"):
        KeyRotation.from_model(torch.nn.ModuleList([layer]), 64)


def test_parts_of_a_head_that_a_model_places_itself_are_refused() -> None:
    """XLLM's rotated dims are neither the first ones of a head nor side by side."""
    part = Attention(rotary_of(head_size=32, rotary_dim=32))
    with pytest.raises(ValueError, match=r"0 \(Attention\) rotates a part of \{32\} dims.*\{64\}"):
        KeyRotation.from_model(torch.nn.ModuleList([part]), 64)
    # The usual way: of a head's first dims, told by the rotary module.
    usual = Attention(rotary_of(rotary_dim=32))
    assert KeyRotation.from_model(torch.nn.ModuleList([usual]), 64).rotary_dim == 32

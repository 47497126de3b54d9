# SPDX-License-Identifier: Apache-2.0
"""Rotating a cached key against Hugging Face's rotary modules.

A key rotated for position s and then by t - s must be the key rotated for t,
with SGLang's table on our side and Hugging Face's own frequencies on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory
from transformers.models.glm import modeling_glm
from transformers.models.glm.configuration_glm import GlmConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig

from sglang_reasoncache.kernels.rotation import KeyRotation

HEADS, HEAD_DIM = 3, 32
CONTEXT = 4096
BASE = 10_000
POSITIONS = [0, 1, 19, 989, 1024, 4000, 4095]

#: fp32 angles are products rounded to 24 bits: an angle of up to CONTEXT radians
#: is off by CONTEXT * 2**-24, and three of them (s, t, t - s) meet here.
FP32 = 3 * CONTEXT * 2.0**-24
#: A bf16 key carries 8 bits and is rounded once when it was stored, once after rotation.
BF16 = 2 * 2.0**-8

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}

Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """One rotary variant, in SGLang's words and in Hugging Face's."""

    name: str
    scaling: dict[str, Any] | None = None
    partial: float = 1.0
    is_neox: bool = True
    table: int = CONTEXT
    hf: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def sglang(self) -> Any:
        return factory.get_rope(
            HEAD_DIM,
            HEAD_DIM,
            self.table,
            BASE,
            self.is_neox,
            self.scaling,
            torch.float32,
            self.partial,
        )

    def hugging_face(self) -> Apply:
        """``(keys [tokens, heads, dim], positions [tokens])`` to rotated keys."""
        rope = {
            "rope_theta": float(BASE),
            "partial_rotary_factor": self.partial,
            **(self.scaling or {"rope_type": "default"}),
        }
        common: dict[str, Any] = dict(
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            rope_parameters=rope,
        )
        module: Any
        made: Any
        if not self.is_neox:
            module, made = modeling_glm, modeling_glm.GlmRotaryEmbedding(GlmConfig(**common))
        elif self.partial < 1:
            made = modeling_gpt_neox.GPTNeoXRotaryEmbedding(GPTNeoXConfig(**common))
            module = modeling_gpt_neox
        else:
            made = modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**common))
            module = modeling_llama

        def apply(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = made(keys, positions[None])
            batch = keys.transpose(0, 1)[None]
            return module.apply_rotary_pos_emb(batch, batch, cos, sin)[1][0].transpose(0, 1)

        return apply


KINDS = [
    Kind("plain"),
    Kind("linear", LINEAR, table=CONTEXT // 4),
    Kind("llama3", LLAMA3),
    Kind("yarn", YARN, table=CONTEXT // 4),
    Kind("partial-quarter", partial=0.25),
    Kind("partial-half", partial=0.5),
    Kind("interleaved", is_neox=False),
    Kind("interleaved-partial", partial=0.5, is_neox=False),
]


@pytest.fixture(autouse=True)
def out_of_tree_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's rotary module asks for a CUDA kernel elsewhere than on a platform like ours."""
    from sglang.srt.layers.rotary_embedding import base

    from sglang_reasoncache.cpu_platform import TorchCpuPlatform

    monkeypatch.setattr(base, "current_platform", TorchCpuPlatform())


def rotation_of(kind: Kind) -> KeyRotation:
    return KeyRotation.from_model(torch.nn.ModuleList([kind.sglang(), kind.sglang()]), CONTEXT)


def random_keys(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, HEADS, HEAD_DIM, generator=generator)


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every (cached at, used at) of POSITIONS: no shift, small ones, large ones, both signs."""
    grid = torch.cartesian_prod(torch.tensor(POSITIONS), torch.tensor(POSITIONS))
    return grid[:, 0], grid[:, 1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rotated_key_is_the_key_computed_there(kind: Kind) -> None:
    rotation, apply = rotation_of(kind), kind.hugging_face()
    cached_at, used_at = all_pairs()
    keys = random_keys(len(cached_at))
    rotated = rotation.rotate(apply(keys, cached_at), rotation.angles(used_at - cached_at))
    expected = apply(keys, used_at)
    assert rotated.dtype == torch.float32
    scale = float(expected.abs().max())
    torch.testing.assert_close(rotated, expected, rtol=0, atol=FP32 * scale)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rotated_bf16_key_is_off_by_its_roundings(kind: Kind) -> None:
    rotation, apply = rotation_of(kind), kind.hugging_face()
    cached_at, used_at = all_pairs()
    keys = random_keys(len(cached_at))
    cached = apply(keys, cached_at).bfloat16()
    rotated = rotation.rotate(cached, rotation.angles(used_at - cached_at)).bfloat16()
    expected = apply(keys, used_at)
    scale = float(expected.abs().max())
    torch.testing.assert_close(rotated.float(), expected, rtol=0, atol=(BF16 + FP32) * scale)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_shift_changes_no_bit(kind: Kind) -> None:
    """Also with an attention factor: what is in the key already is not applied again."""
    rotation = rotation_of(kind)
    keys = random_keys(7)
    rotated = rotation.rotate(keys, rotation.angles(torch.zeros(7, dtype=torch.int32)))
    assert torch.equal(rotated, keys)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_length_is_kept_and_other_dims_are_untouched(kind: Kind) -> None:
    rotation = rotation_of(kind)
    rotary = int(HEAD_DIM * kind.partial)
    assert rotation.rotary_dim == rotary
    keys = random_keys(4)
    rotated = rotation.rotate(keys, rotation.angles(torch.tensor([3, -3, 4000, -4000])))
    assert torch.equal(rotated[..., rotary:], keys[..., rotary:])
    assert not torch.equal(rotated[..., :rotary], keys[..., :rotary])
    torch.testing.assert_close(rotated.norm(dim=-1), keys.norm(dim=-1), rtol=1e-6, atol=0)


def test_yarn_key_carries_its_attention_factor() -> None:
    """The cached key is longer than the raw one, and a factor applied twice would show."""
    (yarn,) = [kind for kind in KINDS if kind.name == "yarn"]
    keys = random_keys(1)
    cached = yarn.hugging_face()(keys, torch.tensor([17]))
    factor = float(cached.norm() / keys.norm())
    assert factor == pytest.approx(1.1386, abs=1e-4)
    rotated = rotation_of(yarn).rotate(cached, rotation_of(yarn).angles(torch.tensor([900])))
    assert float(rotated.norm() / keys.norm()) == pytest.approx(factor, rel=1e-6)


def test_shift_there_and_back_is_no_shift() -> None:
    rotation = rotation_of(KINDS[0])
    keys = random_keys(5)
    shift = torch.tensor([1, -19, 989, -4000, 4095], dtype=torch.int32)
    back = rotation.rotate(rotation.rotate(keys, rotation.angles(shift)), rotation.angles(-shift))
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-6)


def test_angles_take_any_shape_and_can_be_selected() -> None:
    rotation = rotation_of(KINDS[0])
    shift = torch.tensor([[0, 5], [-7, 9], [11, -13]], dtype=torch.int32)
    angles = rotation.angles(shift)
    assert angles.cos.shape == angles.sin.shape == (3, 2, HEAD_DIM // 2)
    keys = random_keys(6).view(3, 2, HEADS, HEAD_DIM)
    rotated = rotation.rotate(keys, angles)
    chosen = torch.tensor([2, 0])
    assert torch.equal(rotation.rotate(keys[chosen], angles.select(chosen)), rotated[chosen])


def test_keys_may_be_a_strided_view() -> None:
    rotation = rotation_of(KINDS[0])
    both = random_keys(12).view(6, 2, HEADS, HEAD_DIM)
    angles = rotation.angles(torch.arange(6))
    assert torch.equal(
        rotation.rotate(both[:, 1], angles), rotation.rotate(both[:, 1].clone(), angles)
    )


def test_angles_come_from_fp32_whatever_serving_uses() -> None:
    """SGLang casts its table to the model's dtype on the CPU."""
    half = factory.get_rope(HEAD_DIM, HEAD_DIM, CONTEXT, BASE, True, None, torch.bfloat16)
    rotation = KeyRotation.from_model(torch.nn.ModuleList([half]), CONTEXT)
    shift = torch.tensor(POSITIONS)
    frequency = BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    exact = shift[:, None] * frequency
    torch.testing.assert_close(rotation.angles(shift).cos.double(), exact.cos(), rtol=0, atol=FP32)


# -- models that cannot be corrected ---------------------------------------------


def rope(**changes: Any) -> Any:
    arguments: dict[str, Any] = dict(
        head_size=HEAD_DIM, rotary_dim=HEAD_DIM, max_position=64, base=BASE, dtype=torch.float32
    )
    return factory.get_rope(**{**arguments, **changes})


MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [4, 6, 6]}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (lambda: [torch.nn.Linear(2, 2)], "none"),
        (lambda: [rope(), rope(rope_scaling=LINEAR)], "LinearScalingRotaryEmbedding"),
        (lambda: [rope(), rope(base=500_000)], "same rotary embedding in every layer"),
        (lambda: [rope(max_position=63)], "holds 63 positions, --context-length is 64"),
        (lambda: [rope(rope_scaling=MROPE)], "MRotaryEmbedding"),
    ],
    ids=["no-rope", "two-kinds", "two-bases", "short-table", "sections"],
)
def test_refused_with_the_flag_named(modules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"--reasoncache-positions corrected.*{message}"):
        KeyRotation.from_model(torch.nn.ModuleList(modules()), 64)


def test_layers_that_share_one_module_are_served() -> None:
    shared = rope()
    KeyRotation.from_model(torch.nn.ModuleList([shared, shared]), 64)

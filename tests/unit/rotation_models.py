# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of published models, by Hugging Face's own modules and by SGLang's."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from transformers import (
    CohereConfig,
    Glm4Config,
    GptOssConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    StableLmConfig,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.stablelm import modeling_stablelm

from sglang_reasoncache.kernels.rotation import KeyRotation

HEADS = 2
#: Half the distance between 1 and the next fp32 number.
UNIT = 2.0**-24


@dataclass(frozen=True)
class Model:
    """``rope`` as in its config.json; ``positions`` is what its table has to hold."""

    name: str
    config: type
    modeling: ModuleType
    rotary: str
    positions: int
    rope: dict[str, Any]
    head_dim: int = 128
    max_position_embeddings: int | None = None
    partial: float = 1.0
    is_neox: bool = True

    def __str__(self) -> str:
        return self.name


LLAMA = (LlamaConfig, modeling_llama, "LlamaRotaryEmbedding")
QWEN2 = (Qwen2Config, modeling_qwen2, "Qwen2RotaryEmbedding")

MODELS = [
    Model("plain-r1-distill-qwen", *QWEN2, 131_072, dict(rope_type="default", rope_theta=1e4)),
    Model(
        "linear-deepseek-coder",
        *LLAMA,
        65_536,
        dict(rope_type="linear", rope_theta=1e5, factor=4.0),
        max_position_embeddings=16_384,
    ),
    Model(
        "dynamic-internlm2",
        *LLAMA,
        65_536,
        dict(rope_type="dynamic", rope_theta=1e6, factor=2.0),
        max_position_embeddings=32_768,
    ),
    Model(
        "dynamic-alpha-hunyuan",
        HunYuanDenseV1Config,
        modeling_hunyuan_v1_dense,
        "HunYuanDenseV1RotaryEmbedding",
        32_768,
        dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=1000.0),
    ),
    Model(
        "yarn-qwq",
        *QWEN2,
        131_072,
        dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32_768),
        max_position_embeddings=32_768,
    ),
    Model(
        "yarn-with-mscale",
        *LLAMA,
        40_960,
        dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=10.0,
            original_max_position_embeddings=4096,
            beta_fast=16,
            beta_slow=2,
            mscale=1.0,
            mscale_all_dim=0.5,
        ),
    ),
    Model(
        "yarn-gpt-oss",
        GptOssConfig,
        modeling_gpt_oss,
        "GptOssRotaryEmbedding",
        131_072,
        dict(
            rope_type="yarn",
            rope_theta=1.5e5,
            factor=32.0,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
        head_dim=64,
    ),
    Model(
        "llama-3.1",
        *LLAMA,
        131_072,
        dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    Model(
        "partial-phi-2",
        PhiConfig,
        modeling_phi,
        "PhiRotaryEmbedding",
        2048,
        dict(rope_type="default", rope_theta=1e4),
        head_dim=80,
        partial=0.4,
    ),
    Model(
        "partial-yarn-stablelm",
        StableLmConfig,
        modeling_stablelm,
        "StableLmRotaryEmbedding",
        32_768,
        dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=4096),
        partial=0.25,
    ),
    Model(
        "interleaved-partial-glm-4",
        Glm4Config,
        modeling_glm4,
        "Glm4RotaryEmbedding",
        32_768,
        dict(rope_type="default", rope_theta=1e4),
        partial=0.5,
        is_neox=False,
    ),
    Model(
        "interleaved-command-r",
        CohereConfig,
        modeling_cohere,
        "CohereRotaryEmbedding",
        131_072,
        dict(rope_type="default", rope_theta=8e6),
        is_neox=False,
    ),
]


class Embedding:
    """Keys of one model, embedded by Hugging Face and by SGLang."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rotary_dim = int(model.head_dim * model.partial)
        config = model.config(
            hidden_size=HEADS * model.head_dim,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=model.head_dim,
            max_position_embeddings=model.max_position_embeddings or model.positions,
            rope_parameters={**model.rope, "partial_rotary_factor": model.partial},
        )
        self._module = getattr(model.modeling, model.rotary)(config)
        theta, rope = get_rope_config(config)
        self.sglang = factory.get_rope(
            model.head_dim,
            model.head_dim,
            config.max_position_embeddings,
            theta,
            model.is_neox,
            rope,
            torch.float32,
            model.partial,
        )
        self.rotation = KeyRotation.from_model(torch.nn.ModuleList([self.sglang]), model.positions)

    def by_hugging_face(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, head_dim]`` at ``[tokens]``, in a response that fills the context."""
        # With dynamic NTK the longest position decides on all; SGLang's table is the full one.
        last = torch.tensor([self.model.positions - 1])
        cos, sin = (t[:, :-1] for t in self._module(keys, torch.cat((positions, last))[None]))
        rotated = keys[None, ..., : self.rotary_dim].transpose(1, 2)
        found = self.model.modeling.apply_rotary_pos_emb(rotated, rotated, cos, sin)[1]
        return torch.cat((found[0].transpose(0, 1), keys[..., self.rotary_dim :]), dim=-1)

    def by_sglang(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = keys.flatten(1)
        return self.sglang.forward_native(positions, flat.clone(), flat.clone())[1].view_as(keys)

    def assert_close(
        self, found: torch.Tensor, raw: torch.Tensor, cached_at: torch.Tensor, used: torch.Tensor
    ) -> None:
        """``found`` is ``raw`` embedded at ``used``, within what fp32 angles allow.

        Three angles n * f are rounded, those of home, used and their difference; Hugging
        Face's and SGLang's f are results of some four roundings each, which counts once for
        the difference; cosines, products and sums add a few units more. Each dim of a pair
        is off by so much of the pair's length.
        """
        expected = self.by_hugging_face(raw, used)
        distance = (used - cached_at).abs()
        angle = (cached_at + used + distance + 8 * distance)[
            :, None
        ] * self._module.inv_freq.double()
        pairs = expected[..., : self.rotary_dim].double()
        pairs = pairs.unflatten(-1, (2, -1) if self.model.is_neox else (-1, 2))
        length = pairs.norm(dim=-2 if self.model.is_neox else -1)
        bound = length * ((angle + 16) * UNIT)[:, None]
        bound = (
            torch.cat((bound, bound), -1) if self.model.is_neox else bound.repeat_interleave(2, -1)
        )
        error = (found.double() - expected.double()).abs()
        assert torch.equal(found[..., self.rotary_dim :], raw[..., self.rotary_dim :])
        excess = error[..., : self.rotary_dim] / bound
        # NaN is not at most 1.
        assert bool((excess <= 1).all()), f"{float(excess.max()):.3g} of what fp32 allows"

    def positions(self) -> torch.Tensor:
        last = self.model.positions - 1
        return torch.tensor([0, 1, 19, last // 8, last // 3, last // 2 + 1, last - 1, last])

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cached at, used at): no shift, small ones, nearly the whole context, both signs."""
        grid = torch.cartesian_prod(self.positions(), self.positions())
        return grid[:, 0], grid[:, 1]

    def keys(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(count, HEADS, self.model.head_dim, generator=generator)

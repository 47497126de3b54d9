# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of published models, by Hugging Face's own modules and by SGLang's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from sglang.srt.layers.rotary_embedding import base, factory
from sglang.srt.utils.hf_transformers_utils import get_rope_config

from sglang_reasoncache.cpu_platform import TorchCpuPlatform
from sglang_reasoncache.kernels.rotation import KeyRotation

HEADS = 2
#: Half the distance between 1 and the next fp32 number.
UNIT = 2.0**-24


@pytest.fixture(scope="module")
def fresh_rotary_modules() -> Iterator[None]:
    """On our platform, and without SGLang's cache, which would keep every table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "current_platform", TorchCpuPlatform())
        patch.setattr(factory, "_ROPE_DICT", {})
        yield


@dataclass(frozen=True)
class Model:
    """``rope`` as in its config.json; ``positions`` is what its table has to hold, and the
    first ``original`` of them what the model was first trained on (yarn, Llama 3)."""

    name: str
    family: str
    positions: int
    theta: float
    rope: dict[str, Any]
    original: int | None = None
    head_dim: int = 128
    max_position_embeddings: int | None = None
    partial: float = 1.0
    is_neox: bool = True

    def __str__(self) -> str:
        return self.name

    def config(self) -> Any:
        rope = dict(rope_theta=self.theta, partial_rotary_factor=self.partial, **self.rope)
        if self.original is not None:
            rope["original_max_position_embeddings"] = self.original
        return getattr(transformers, f"{self.family}Config")(
            hidden_size=HEADS * self.head_dim,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings or self.positions,
            rope_parameters=rope,
        )


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return dict(rope_type=kind, **more)


_MSCALE = _rope("yarn", factor=10.0, beta_fast=16, beta_slow=2, mscale=1.0, mscale_all_dim=0.5)
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

MODELS = [
    Model("plain-r1-distill-qwen", "Qwen2", 131_072, 1e4, _rope()),
    Model(
        "linear-deepseek-coder", "Llama", 65_536, 1e5, _rope("linear", factor=4.0),
        max_position_embeddings=16_384,
    ),
    Model(
        "dynamic-internlm2", "Llama", 65_536, 1e6, _rope("dynamic", factor=2.0),
        max_position_embeddings=32_768,
    ),
    Model(
        "dynamic-alpha-hunyuan", "HunYuanDenseV1", 32_768, 1e4,
        _rope("dynamic", factor=1.0, alpha=1000.0),
    ),
    Model(
        "yarn-qwq", "Qwen2", 131_072, 1e6, _rope("yarn", factor=4.0), 32_768,
        max_position_embeddings=32_768,
    ),
    Model("yarn-with-mscale", "Llama", 40_960, 1e4, _MSCALE, 4096),
    Model(
        "yarn-gpt-oss", "GptOss", 131_072, 1.5e5, _rope("yarn", factor=32.0, truncate=False), 4096,
        head_dim=64,
    ),
    Model("llama-3.1", "Llama", 131_072, 5e5, _LLAMA3, 8192),
    Model("partial-phi-2", "Phi", 2048, 1e4, _rope(), head_dim=80, partial=0.4),
    Model(
        "partial-yarn-stablelm", "StableLm", 32_768, 1e4, _rope("yarn", factor=8.0), 4096,
        partial=0.25,
    ),
    Model(
        "interleaved-partial-glm-4", "Glm4", 32_768, 1e4, _rope(), partial=0.5, is_neox=False
    ),
    Model("interleaved-command-r", "Cohere", 131_072, 8e6, _rope(), is_neox=False),
]  # fmt: skip


class Embedding:
    """Keys of one model, embedded by Hugging Face and by SGLang."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rotary_dim = int(model.head_dim * model.partial)
        config = model.config()
        module = type(config).__module__.replace("configuration_", "modeling_")
        self._modeling = importlib.import_module(module)
        self._module = getattr(self._modeling, f"{model.family}RotaryEmbedding")(config)
        self.sglang = self.made_by_sglang(torch.float32)
        self.rotation = KeyRotation.from_model(torch.nn.ModuleList([self.sglang]), model.positions)

    def made_by_sglang(self, dtype: torch.dtype) -> Any:
        config = self.model.config()
        theta, rope = get_rope_config(config)
        dim, context = self.model.head_dim, config.max_position_embeddings
        return factory.get_rope(
            dim, dim, context, theta, self.model.is_neox, rope, dtype, self.model.partial
        )

    def by_hugging_face(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, head_dim]`` at ``[tokens]``, in a response that fills the context."""
        # With dynamic NTK the longest position decides on all; SGLang's table is the full one.
        last = torch.tensor([self.model.positions - 1])
        cos, sin = (t[:, :-1] for t in self._module(keys, torch.cat((positions, last))[None]))
        rotated = keys[None, ..., : self.rotary_dim].transpose(1, 2)
        found = self._modeling.apply_rotary_pos_emb(rotated, rotated, cos, sin)[1]
        return torch.cat((found[0].transpose(0, 1), keys[..., self.rotary_dim :]), dim=-1)

    def by_sglang(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = keys.flatten(1)
        return self.sglang.forward_native(positions, flat.clone(), flat.clone())[1].view_as(keys)

    def assert_close(
        self, found: torch.Tensor, raw: torch.Tensor, cached_at: torch.Tensor, used: torch.Tensor
    ) -> None:
        """``found`` is ``raw`` embedded at ``used``, within what fp32 angles allow.

        Three angles n * f are rounded, at the cached and the used position and of their
        difference; Hugging Face's and SGLang's f are results of some four roundings each, which
        counts once for the difference; cosines, products and sums add a few units more. Each dim
        of a pair is off by so much of the pair's length.
        """
        expected = self.by_hugging_face(raw, used)
        distance = (used - cached_at).abs()
        positions = cached_at + used + distance + 8 * distance
        angle = positions[:, None] * self._module.inv_freq.double()
        pairs, at = ((2, -1), -2) if self.model.is_neox else ((-1, 2), -1)
        rotated = expected[..., : self.rotary_dim].double().unflatten(-1, pairs)
        bound = rotated.norm(dim=at, keepdim=True) * ((angle + 16) * UNIT)[:, None].unsqueeze(at)
        bound = bound.expand(rotated.shape).flatten(-2)
        error = (found.double() - expected.double()).abs()
        assert torch.equal(found[..., self.rotary_dim :], raw[..., self.rotary_dim :])
        excess = error[..., : self.rotary_dim] / bound
        # NaN is not at most 1.
        assert bool((excess <= 1).all()), f"{float(excess.max()):.3g} of what fp32 allows"

    def positions(self) -> torch.Tensor:
        last = self.model.positions - 1
        return torch.tensor([0, 1, 19, last // 8, last // 3, last // 2 + 1, last - 1, last])

    def keys(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(count, HEADS, self.model.head_dim, generator=generator)


def pairs(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cached at, used at): no shift, small ones, nearly the whole context, both signs."""
    grid = torch.cartesian_prod(positions, positions)
    return grid[:, 0], grid[:, 1]

# SPDX-License-Identifier: Apache-2.0
"""Tests the rotation of cached keys to other positions, with rotary parameters of published models, over the
whole context. Hugging Face's module rotates a key for position s, and for position t. The key for s, rotated by
t - s with SGLang's table, must equal the key for t. Models whose keys cannot be rotated are refused."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base, factory
from sglang.srt.layers.rotary_embedding.mrope import Ernie4_5_VLRotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
from sglang.srt.models.hunyuan import HunYuanAttention
from sglang.srt.utils.hf_transformers_utils import get_rope_config

from sglang_reasoncache.attention import rotations
from sglang_reasoncache.attention.rotations import (
    finds_no_rotary,
    is_without_positions,
    key_rotation,
    key_rotations,
)
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cpu.platform import TorchCpuPlatform
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.sharing.blocks import BlockProposal, Candidate, Run
from sglang_reasoncache.sharing.meter import BlockMeter

HEADS = 2
#: Half the distance between 1 and the next fp32 number.
UNIT = 2.0**-24


@pytest.fixture(scope="module", autouse=True)
def fresh_rotary_modules() -> Iterator[None]:
    """Lets SGLang's rotary modules use our platform, and a new cache: SGLang's own would keep all tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "current_platform", TorchCpuPlatform())
        patch.setattr(factory, "_ROPE_DICT", {})
        yield


@dataclass(frozen=True)
class Model:
    """``rope``: as in the model's config.json. ``positions``: how many positions the rotary table must hold.
    ``original``: how many positions the model was first trained on (YaRN, Llama 3)."""

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


#: Which angles go by which of an image's three positions. Without images these are equal.
SECTIONS: dict[str, Any] = {"mrope_section": [16, 24, 24]}


MODELS = [
    Model("plain-r1-distill-qwen", "Qwen2", 131_072, 1e4, _rope()),
    Model("linear-deepseek-coder", "Llama", 65_536, 1e5, _rope("linear", factor=4.0),
          max_position_embeddings=16_384),
    Model("dynamic-internlm2", "Llama", 65_536, 1e6, _rope("dynamic", factor=2.0),
          max_position_embeddings=32_768),
    Model("dynamic-alpha-hunyuan", "HunYuanDenseV1", 32_768, 1e4,
          _rope("dynamic", factor=1.0, alpha=1000.0)),
    Model("yarn-qwq", "Qwen2", 131_072, 1e6, _rope("yarn", factor=4.0), 32_768,
          max_position_embeddings=32_768),
    Model("yarn-with-mscale", "Llama", 40_960, 1e4, _rope(
        "yarn", factor=10.0, beta_fast=16, beta_slow=2, mscale=1.0, mscale_all_dim=0.5), 4096),
    Model("yarn-gpt-oss", "GptOss", 131_072, 1.5e5, _rope("yarn", factor=32.0, truncate=False),
          4096, head_dim=64),
    Model("llama-3.1", "Llama", 131_072, 5e5, _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), 8192),
    Model("yarn-deepseek-v3", "DeepseekV3", 163_840, 1e4, _rope(
        "yarn", factor=40.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        4096, head_dim=64),
    Model("partial-phi-2", "Phi", 2048, 1e4, _rope(), head_dim=80, partial=0.4),
    Model("interleaved-partial-glm-4", "Glm4", 32_768, 1e4, _rope(), partial=0.5, is_neox=False),
    Model("yarn-qwen-vl", "Qwen2", 131_072, 1e6, _rope("yarn", factor=4.0, **SECTIONS), 32_768,
          max_position_embeddings=32_768),
    Model("bailing-ming", "Qwen2", 32_768, 6e5, _rope(video_rope=True, **SECTIONS)),
    Model("bailing-yarn", "Qwen2", 65_536, 6e5, _rope(
        "yarn", factor=4.0, video_rope=True, **SECTIONS), 16_384, max_position_embeddings=16_384),
    Model("short-longrope-phi-4-mini", "Phi3", 4096, 1e4, _rope(
        "longrope", short_factor=[1.0] * 47 + [1.5], long_factor=[4.0] * 48),
        4096, max_position_embeddings=131_072, partial=0.75),
]  # fmt: skip


class Embedding:
    """Applies one model's rotary embedding to keys, with Hugging Face's module or with SGLang's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rotary_dim = int(model.head_dim * model.partial)
        config = model.config()
        module = type(config).__module__.replace("configuration_", "modeling_")
        self._modeling = importlib.import_module(module)
        self._module = getattr(self._modeling, f"{model.family}RotaryEmbedding")(config)
        self.sglang = self.made_by_sglang(torch.float32)
        self.rotation = key_rotation(torch.nn.ModuleList([self.sglang]), model.positions)

    def made_by_sglang(self, dtype: torch.dtype) -> Any:
        config = self.model.config()
        theta, rope = get_rope_config(config)
        dim = self.model.head_dim
        context = config.max_position_embeddings
        asked: Any = dim, dim, context, theta, self.model.is_neox
        if self.model.family == "DeepseekV3":  # as SGLang's model does
            rope = {**rope, "rope_type": "deepseek_yarn"}
            return factory.get_rope_wrapper(*asked, rope, dtype, device="cpu")
        return factory.get_rope(*asked, rope, dtype, self.model.partial)

    def by_hugging_face(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates keys ``[tokens, heads, head_dim]`` for ``positions`` of a response that fills the context."""
        # With dynamic NTK the highest position decides all angles. SGLang's table assumes a full context.
        last = torch.tensor([self.model.positions - 1])
        cos, sin = (t[:, :-1] for t in self._module(keys, torch.cat((positions, last))[None]))
        rotated = keys[None, ..., : self.rotary_dim].transpose(1, 2)
        found = self._modeling.apply_rotary_pos_emb(rotated, rotated, cos, sin)[1]
        return torch.cat((found[0].transpose(0, 1), keys[..., self.rotary_dim :]), dim=-1)

    def by_sglang(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # DeepSeek's module takes ``[tokens, heads, dim]``, other modules take ``[tokens, heads * dim]``.
        flat = keys if self.model.family == "DeepseekV3" else keys.flatten(1)
        # LongRoPE has only ``forward``. Bailing's ``forward`` adds the number of negative positions.
        rotate = getattr(self.sglang, "forward_native", self.sglang.forward)
        at = positions - getattr(self.sglang, "position_start", 0)
        return rotate(at, flat.clone(), flat.clone())[1].view_as(keys)

    def assert_close(
        self, found: torch.Tensor, raw: torch.Tensor, cached_at: torch.Tensor, used: torch.Tensor
    ) -> None:
        """Check that ``found`` is ``raw`` rotated for the positions ``used``, as exactly as fp32 angles allow.

        The error of each dim may be a fraction of its pair's norm. In units of 2**-24 the fraction is the sum
        of the angles (position times frequency) of ``cached_at``, ``used`` and the shift between them, 8 times
        the shift's angle (two libraries, each with four roundings of a frequency), and 16."""
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
        # A NaN fails the comparison.
        assert bool((excess <= 1).all()), f"{float(excess.max()):.3g} of what fp32 allows"

    def keys(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(count, HEADS, self.model.head_dim, generator=generator)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def embedding(request: pytest.FixtureRequest, fresh_rotary_modules: None) -> Iterator[Embedding]:
    yield Embedding(request.param)
    factory._ROPE_DICT.clear()


@pytest.mark.parametrize("cached_by", ["by_hugging_face", "by_sglang"])
def test_rotated_key_is_the_key_computed_there(embedding: Embedding, cached_by: str) -> None:
    """Tests shifts in both directions, by 0 positions up to the whole context."""
    last = embedding.model.positions - 1
    some = torch.tensor([0, 1, 19, last // 8, last // 3, last // 2 + 1, last - 1, last])
    cached_at, used = torch.cartesian_prod(some, some).unbind(1)
    raw = embedding.keys(len(cached_at))
    cached = getattr(embedding, cached_by)(raw, cached_at)
    rotated = embedding.rotation.rotate(cached, used - cached_at)
    assert rotated.dtype == torch.float32
    embedding.assert_close(rotated, raw, cached_at, used)
    stays = used == cached_at
    assert torch.equal(rotated[stays], cached[stays]), "every bit without a shift"
    # The bound is tight: even after a large shift, keys that are off by one position fail.
    far = slice(3, 8)
    rotated = embedding.rotation.rotate(cached[far], (used - cached_at)[far] - 1)
    with pytest.raises(AssertionError, match="of what fp32 allows"):
        embedding.assert_close(rotated, raw[far], cached_at[far], used[far])


def test_angles_come_from_fp32_whatever_serving_uses(embedding: Embedding) -> None:
    """Our table is in fp32, although SGLang casts its own table to the model's dtype on the CPU."""
    half = torch.nn.ModuleList([embedding.made_by_sglang(torch.bfloat16)])
    rotation = key_rotation(half, embedding.model.positions)
    assert torch.equal(rotation.cos, embedding.rotation.cos)
    assert torch.equal(rotation.sin, embedding.rotation.sin)


def runner_of(model: torch.nn.Module, layers: int = 3) -> Any:
    """Stands in for SGLang's model runner."""
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(context_len=64),
        token_to_kv_pool=SimpleNamespace(start_layer=0, layer_num=layers),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 64)),
    )


#: SGLang's attention modules that rotate keys in some layers only -> what layers have, and whether they rotate.
ONLY_SOME: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "afmoe.AfmoeAttention": [
        (dict(is_local_attention=True), True),
        (dict(is_local_attention=False), False),
    ],
    "cohere2_moe.Cohere2MoeAttention": [
        (dict(is_sliding=True, force_rope=False), True),
        (dict(is_sliding=False, force_rope=True), True),
        (dict(is_sliding=False, force_rope=False), False),
    ],
    "commandr.CohereAttention": [
        (dict(v1=False, sliding_window_size=7), True),
        (dict(v1=True, sliding_window_size=-1), True),
        (dict(v1=False, sliding_window_size=-1), False),
    ],
    "exaone4.Exaone4Attention": [
        (dict(sliding_window_pattern="LLG", is_sliding=True), True),
        (dict(sliding_window_pattern=None, is_sliding=False), True),
        (dict(sliding_window_pattern="LLG", is_sliding=False), False),
    ],
    "exaone_moe.ExaoneMoEAttention": [
        (dict(sliding_window=True, apply_rope_all_layers=False), True),
        (dict(sliding_window=False, apply_rope_all_layers=True), True),
        (dict(sliding_window=False, apply_rope_all_layers=False), False),
    ],
}


def layer_of(kind: str, number: int, window: int = -1, **fields: Any) -> Any:
    """A layer of SGLang's class ``kind`` (``module.Class``)."""
    module, _, name = kind.partition(".")
    layer = of_class(
        getattr(importlib.import_module(f"sglang.srt.models.{module}"), name), rotary_of()
    )
    layer.attn.layer_id = number
    layer.attn.sliding_window_size = window
    for field, value in fields.items():
        setattr(layer, field, value)
    return layer


def test_every_module_that_rotates_in_some_layers_is_tested() -> None:
    assert {kind.partition(".")[2] for kind in ONLY_SOME} == set(rotations.ROTATES)


@pytest.mark.parametrize("kind", ONLY_SOME)
def test_sglang_rotates_where_we_say(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """SGLang's modules call their rotary embedding in the forwards in which the table says so."""
    called: list[bool] = []

    def rotate(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
        called.append(True)
        return q, k

    monkeypatch.setattr(base.RotaryEmbedding, "forward", rotate)
    monkeypatch.setattr(RadixAttention, "forward", lambda _, q, *__: q)
    for fields, rotates in ONLY_SOME[kind]:
        called.clear()
        layer = layer_of(kind, 0, **fields)
        for size in ("q_size", "kv_size", "head_dim"):
            setattr(layer, size, 64)
        layer.num_heads = layer.num_kv_heads = 1
        layer.use_qk_norm = False
        layer.q_norm = layer.k_norm = torch.nn.Identity()
        layer.qkv_proj = lambda hidden: (torch.ones(len(hidden), 3 * 64), None)
        layer.o_proj = layer.gate_proj = lambda hidden: (hidden, None)
        layer.forward(torch.arange(2), torch.ones(2, 64), None)
        assert bool(called) == rotates == rotations._rotates(layer)


@pytest.mark.parametrize("window", [-1, 7])
@pytest.mark.parametrize("kind", ONLY_SOME)
def test_layers_that_never_rotate_keep_their_keys(kind: str, window: int) -> None:
    """Beside windows and without. A class that extends SGLang's inherits which layers rotate."""
    layers = [layer_of(kind, at, **fields) for at, (fields, _) in enumerate(ONLY_SOME[kind])]
    layers[0].attn.sliding_window_size = window
    if window < 0 and kind == "exaone4.Exaone4Attention":
        for layer in layers:
            layer.__class__ = type("Further", (type(layer),), {})
    found = key_rotations(runner_of(torch.nn.ModuleList(layers), len(layers)), None)
    keys = torch.randn(4, HEADS, 64)
    by = torch.arange(4)
    rotated = key_rotation(torch.nn.ModuleList([rotary_of()]), 64).rotate(keys, by)
    for at, (_, rotates) in enumerate(ONLY_SOME[kind]):
        assert torch.equal(found[at].rotate(keys, by), rotated if rotates else keys)
    still = torch.nn.ModuleList([layers[-1]])
    assert is_without_positions(still) and not is_without_positions(torch.nn.ModuleList(layers))
    with pytest.raises(ValueError, match="found none"):
        key_rotation(still, 64)


def test_layers_beside_windows_have_their_own_rotation() -> None:
    """EXAONE 4 rotates keys only in layers with a sliding window."""
    kind = "exaone4.Exaone4Attention"
    model = torch.nn.ModuleList(
        layer_of(kind, at, window, sliding_window_pattern="LLG", is_sliding=window > 0)
        for at, window in enumerate((7, 7, -1))
    )
    found = key_rotations(runner_of(model), None)
    keys = torch.randn(4, HEADS, 64)
    by = torch.arange(4)
    assert found[0] is found[1]
    expected = key_rotation(torch.nn.ModuleList([rotary_of()]), 64).rotate(keys, by)
    assert torch.equal(found[0].rotate(keys, by), expected)
    assert torch.equal(found[2].rotate(keys, by), keys)


@pytest.mark.parametrize(
    "kind",
    [
        "jet_nemotron.JetNemotronAttention",
        "laguna.LagunaAttention",
        "mimo_v2.MiMoV2Attention",
        "spark2_5.Spark2_5Attention",
        "step3p5.Step3p5Attention",
    ],
)
def test_layers_beside_windows_have_their_own_frequencies(kind: str) -> None:
    """Also another number of rotated dims."""
    model = torch.nn.ModuleList(layer_of(kind, at, window) for at, window in enumerate((7, -1)))
    model[1].rotary_emb = rotary_of(base=500_000, rotary_dim=32)
    found = key_rotations(runner_of(model, 2), None)
    keys = torch.randn(4, HEADS, 64)
    by = torch.arange(4)
    for at, layer in enumerate(model):
        own: Any = layer.rotary_emb
        expected = key_rotation(torch.nn.ModuleList([own]), 64).rotate(keys, by)
        assert torch.equal(found[at].rotate(keys, by), expected)
    assert found[1].rotary_dim == 32


def test_positions_of_text_in_models_that_see_images() -> None:
    """ERNIE-VL's rotary embedding rotates by the one position that a text token has three times. Its pairs are
    neighbours."""
    embedding: Any = Ernie4_5_VLRotaryEmbedding(
        64, 64, 256, 10_000, False, torch.float32, mrope_section=[11, 11, 10]
    )
    embedding._apply_rotary_emb_wrapped = apply_rotary_emb  # SGLang compiles it
    rotation = key_rotation(torch.nn.ModuleList([embedding]), 256)
    raw = torch.randn(4, HEADS, 64)
    cached_at, used = torch.tensor([[0, 3, 200, 255], [9, 3, 11, 0]])

    def rotated(at: torch.Tensor) -> torch.Tensor:
        flat = raw.flatten(1)
        return embedding.forward_native(at.expand(3, -1), flat.clone(), flat.clone())[1]

    found = rotation.rotate(rotated(cached_at).view_as(raw), used - cached_at)
    assert (found - rotated(used).view_as(raw)).abs().max() < 1e-4
    wrong = rotation.rotate(rotated(cached_at).view_as(raw), used - cached_at + 1)
    assert (wrong - rotated(used).view_as(raw)).abs().max() > 0.1


def test_fused_kernels_that_ignore_the_rotary_embedding_are_refused() -> None:
    """With --enable-fused-qk-norm-rope SGLang's Qwen3-MoE and Mellum take angles from the model's config."""
    for kind in ("qwen3_moe.Qwen3MoeAttention", "mellum.MellumAttention"):
        layer = layer_of(kind, 0)
        for fused, rotary, is_served in (
            (True, rotary_of(), True),
            (False, rotary_of(rope_scaling=YARN), True),
            (True, rotary_of(rope_scaling=YARN), False),
        ):
            layer.use_fused_qk_norm_rope = fused
            layer.rotary_emb = rotary
            for window in (-1, 7) if "mellum" in kind else (-1,):
                layer.attn.sliding_window_size = window
                runner = runner_of(torch.nn.ModuleList([layer]), 1)
                if is_served:
                    assert set(key_rotations(runner, None)) == {0}
                    continue
                message = r"fused-qk-norm-rope 0 \(.*those of YaRNScalingRotaryEmbedding"
                with pytest.raises(ValueError, match=message):
                    key_rotations(runner, None)


def test_modules_of_state_layers_do_not_count() -> None:
    """Lightning attention has one of SGLang's attention layers and a rotary embedding of its own, but no KV."""
    ring = layer_of("bailing_moe_linear.BailingMoELinearAttention", 0)
    latent = layer_of("bailing_moe_linear.DsV3MLA", 1)
    latent.rotary_emb = rotary_of(head_size=32, rotary_dim=32, base=500_000)
    model = torch.nn.ModuleList([ring, latent])
    found = key_rotation(model, 64, 32, {1})
    expected = key_rotation(torch.nn.ModuleList([latent.rotary_emb]), 64)
    assert torch.equal(found.cos, expected.cos)
    with pytest.raises(ValueError, match="rotates a part|same rotary embedding"):
        key_rotation(model, 64, 32)
    mixer = layer_of("minicpm.MiniCPMLightningMixer", 0)
    attention = layer_of("minicpm.MiniCPMAttention", 1)
    model = torch.nn.ModuleList([mixer, attention])
    assert not is_without_positions(model, {1})
    attention.rotary_emb = None
    assert is_without_positions(model, {1}) and not is_without_positions(model)
    assert finds_no_rotary(model, {1}) and not finds_no_rotary(model)


def test_a_block_is_measured_with_the_rotation_of_each_layer() -> None:
    """A block and its rotated copy elsewhere have distance 0 only if each layer's own rotation is used."""
    near, far = (
        key_rotation(torch.nn.ModuleList([rotary_of(base=base)]), 256) for base in (100, 10_000)
    )
    at = 40
    slots = 8
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(3, 2 * slots, HEADS, 64, generator=generator)
    values = torch.randn(3, slots, HEADS, 64, generator=generator).repeat(1, 2, 1, 1)
    right = {0: near, 1: far, 2: near}
    for layer, rotation in right.items():
        moved = rotation.rotate(keys[layer, :slots], torch.full((slots,), at))
        keys[layer, slots:] = moved
    of = dict(get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__)
    pool: Any = SimpleNamespace(start_layer=0, layer_num=3, **of)
    rows = torch.zeros(1, 64, dtype=torch.int32)
    rows[0, :slots], rows[0, at : at + slots] = torch.arange(2 * slots).int().split(slots)
    cached_at = CachedPositions(2 * slots, "cpu")
    cached_at.record(torch.arange(slots), torch.arange(slots))
    req: Any = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0))
    block = BlockProposal(req, Candidate((Run(at, 0, slots),)), None, req, None)
    for known, is_right in ((right, True), (dict.fromkeys(range(3), near), False)):
        meter = BlockMeter(pool, rows, cached_at, known, HEADS, Ranks())
        meter.warm_up(slots)
        [distance] = meter.distances(meter.measure([block]))
        assert (distance < 1e-5) == is_right


def rotary_of(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(head_size=64, rotary_dim=64, max_position=256, base=10_000)
    return factory.get_rope(**sizes | dict(dtype=torch.float32) | changes)


def longrope(short: int) -> Any:
    """Phi-3's rotary embedding: one table for ``short`` positions, another once a response is longer."""
    original = dict(original_max_position_embeddings=short)
    factors = dict(short_factor=[1.0] * 32, long_factor=[4.0] * 32)
    sizes: dict[str, Any] = dict(hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    sizes |= dict(max_position_embeddings=512, **original)
    config = transformers.Phi3Config(
        **sizes, rope_parameters=dict(rope_type="longrope", rope_theta=1e4, **original, **factors)
    )
    theta, rope = get_rope_config(config)
    return rotary_of(max_position=512, base=theta, rope_scaling=rope)


MULTIMODAL = {"rope_type": "default", "mrope_section": [8, 12, 12]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 63}
#: Rotary embeddings that are refused, by class name.
KINDS: dict[str, Any] = {
    "Gemma4RotaryEmbedding": lambda: rotary_of(
        rope_scaling={"rope_type": "proportional"}, partial_rotary_factor=0.5
    ),
}


class Attention(torch.nn.Module):
    """An attention layer like those of SGLang's models."""

    def __init__(self, rotary: torch.nn.Module | None) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_emb = rotary
        self.attn = RadixAttention(1, 64, 1.0, 1, layer_id=0)


def hunyuan(use_qk_norm: bool) -> Any:
    """With ``use_qk_norm`` HunYuan scales each dim of a rotated key, so the key cannot be rotated again."""
    layer: Any = HunYuanAttention.__new__(HunYuanAttention)
    Attention.__init__(layer, rotary_of())
    layer.use_qk_norm = use_qk_norm
    return layer


@pytest.mark.parametrize(
    ("message", "modules"),
    [
        *((f"'{kind}'", lambda made=made: [made()]) for kind, made in KINDS.items()),
        *((f"'{kind}'", lambda made=made: [made(), rotary_of()]) for kind, made in KINDS.items()),
        ("none", lambda: [torch.nn.Linear(2, 2)]),
        ("LinearScaling", lambda: [rotary_of(), rotary_of(rope_scaling=LINEAR)]),
        ("same rotary embedding in every layer", lambda: [rotary_of(), rotary_of(base=500_000)]),
        (
            "same rotary embedding in every layer",
            lambda: [rotary_of(), rotary_of(is_neox_style=False)],
        ),
        ("longer than 32 positions; --context-length 32 works", lambda: [longrope(32)]),
        (
            "holds 63 positions, --context-length is 64",
            lambda: [rotary_of(max_position=63, rope_scaling=LINEAR | {"factor": 1.0})],
        ),
        # Llama 4 and others have layers without rotation, whose keys must not be rotated.
        (r"1 \(Attention\)", lambda: [Attention(rotary_of()), Attention(None)]),
        (r"0 \(HunYuanAttention, use_qk_norm\) scales keys", lambda: [hunyuan(True)]),
        # XLLM rotates only a part of each head's dims, and these dims are not contiguous.
        (
            r"0 \(Attention\) rotates a part of \{32\} dims.*\{64\}",
            lambda: [Attention(rotary_of(head_size=32, rotary_dim=32))],
        ),
    ],
)
def test_refused_by_name(message: str, modules: Any) -> None:
    with pytest.raises(ValueError, match=f"--reasoncache-positions corrected.*{message}"):
        key_rotation(torch.nn.ModuleList(modules()), 64)


@pytest.mark.parametrize("scaling", [None, MULTIMODAL, LLAMA3], ids=["plain", "M", "Llama 3"])
def test_a_table_is_lengthened_as_sglang_lengthens_it(scaling: dict[str, Any] | None) -> None:
    """SGLang does so when it starts, if the context is longer than the model's config says (Step3)."""
    short, long = (rotary_of(max_position=size, rope_scaling=scaling) for size in (63, 256))
    found = key_rotation(torch.nn.ModuleList([short]), 200)
    whole = key_rotation(torch.nn.ModuleList([long]), 200)
    short._ensure_cos_sin_cache_length(200)
    sglangs = short.cos_sin_cache.float()[:200].chunk(2, dim=1)
    for table, longer, other in zip(
        (found.cos, found.sin), (whole.cos, whole.sin), sglangs, strict=True
    ):
        assert len(table) == 200 and torch.equal(table, longer[:200]) and torch.equal(table, other)


class Fallback(Attention):
    """A model of SGLang's Transformers fallback: no module of it has an attention layer."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_emb = rotary_of()  # as in a vision part
        self.attention_instances = {0: RadixAttention(1, 64, 1.0, 1, layer_id=0)}


def of_class(kind: Any, rotary: torch.nn.Module | None) -> Any:
    layer: Any = kind.__new__(kind)
    Attention.__init__(layer, rotary)
    return layer


def test_positions_are_missing_where_sglang_rotates_nothing() -> None:
    """In Kimi-K3, and in Ling 3 if its config says so, which use classes that extend DeepSeek's."""
    from sglang.srt.models.bailing_moe_v3 import DsV3MLA
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
    from sglang.srt.models.kimi_k3 import KimiK3MLAAttention

    def lacks(*layers: Any) -> bool:
        return is_without_positions(torch.nn.ModuleList(layers))

    for kind in (DsV3MLA, DeepseekV2AttentionMLA, KimiK3MLAAttention):
        assert lacks(of_class(kind, None), of_class(kind, None))
        assert not lacks(of_class(kind, None), of_class(kind, rotary_of()))
        assert not lacks(of_class(kind, torch.nn.Identity())), (
            "a rotary embedding of another package"
        )
        assert not lacks(of_class(kind, None), Attention(None))
    assert not lacks() and not lacks(Fallback())


def test_what_is_said_of_missing_rotary_embeddings() -> None:
    """Reading keys as cached is not warned of where nothing is known to rotate them."""
    for layers, is_known in (
        ([Attention(None)], True),
        ([Attention(rotary_of())], False),
        ([Fallback()], False),
    ):
        assert finds_no_rotary(torch.nn.ModuleList(layers)) == is_known


def test_not_refused() -> None:
    """A rotation of a part of each head is accepted too, if the module's ``rotary_dim`` says how many dims."""
    for modules, rotary_dim in (
        ([rotary_of()] * 2, 64),
        ([Attention(rotary_of()), Attention(rotary_of())], 64),
        ([hunyuan(False)], 64),
        ([longrope(64)], 64),
        ([Attention(rotary_of(rotary_dim=32))], 32),
        # Qwen3.5 used for text only: its vision part has another table, which is ignored.
        (
            [Attention(rotary_of(rope_scaling=MULTIMODAL)), rotary_of(head_size=32, rotary_dim=32)],
            64,
        ),
    ):
        assert key_rotation(torch.nn.ModuleList(modules), 64).rotary_dim == rotary_dim

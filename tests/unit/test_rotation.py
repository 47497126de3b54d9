# SPDX-License-Identifier: Apache-2.0
"""Rotating a cached key, with the rotary parameters of published models over their whole context.

Hugging Face's module embeds a key for position s and for position t; rotated by t - s with
SGLang's table, the first must be the second. The same through our attention operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.kernels.engines import use
from tests.unit.rotation_models import HEADS, MODELS, UNIT, Embedding, pairs
from tests.unit.rotation_models import fresh_rotary_modules as fresh_rotary_modules

pytestmark = pytest.mark.usefixtures("fresh_rotary_modules")

#: For what is off by more than angles: an angle of up to 4096 radians by 4096 * UNIT.
NEAR = torch.tensor([0, 1, 19, 989, 1024, 2047])
#: A bf16 key carries 8 bits and is rounded once when it was stored, once after rotation.
BF16 = 2 * 2.0**-8


@pytest.fixture(scope="module", params=MODELS, ids=str)
def embedding(request: pytest.FixtureRequest, fresh_rotary_modules: None) -> Iterator[Embedding]:
    yield Embedding(request.param)
    factory._ROPE_DICT.clear()


@pytest.mark.parametrize("cached_by", ["by_hugging_face", "by_sglang"])
def test_rotated_key_is_the_key_computed_there(embedding: Embedding, cached_by: str) -> None:
    cached_at, used = pairs(embedding.positions())
    raw = embedding.keys(len(cached_at))
    cached = getattr(embedding, cached_by)(raw, cached_at)
    rotation = embedding.rotation
    rotated = rotation.rotate(cached, used - cached_at)
    assert rotated.dtype == torch.float32
    embedding.assert_close(rotated, raw, cached_at, used)


def test_the_bound_sees_a_shift_of_one_position_less(embedding: Embedding) -> None:
    cached_at, used = torch.tensor([0, 500, 1000]), torch.tensor([1000, 400, 999])
    raw, rotation = embedding.keys(3), embedding.rotation
    cached = embedding.by_hugging_face(raw, cached_at)
    with pytest.raises(AssertionError, match="of what fp32 allows"):
        rotated = rotation.rotate(cached, used - cached_at - 1)
        embedding.assert_close(rotated, raw, cached_at, used)


def test_rotated_bf16_key_is_off_by_its_roundings(embedding: Embedding) -> None:
    cached_at, used = pairs(NEAR)
    raw, rotation = embedding.keys(len(cached_at)), embedding.rotation
    cached = embedding.by_hugging_face(raw, cached_at).bfloat16()
    rotated = rotation.rotate(cached, used - cached_at).bfloat16().float()
    expected = embedding.by_hugging_face(raw, used)
    bound = (BF16 + 3 * 4096 * UNIT) * float(expected.abs().max())
    torch.testing.assert_close(rotated, expected, rtol=0, atol=bound)


def test_what_rotation_keeps(embedding: Embedding) -> None:
    """Every bit without a shift, the other dims, the length; and there and back is no shift."""
    rotation, rotary = embedding.rotation, embedding.rotary_dim
    assert rotation.rotary_dim == rotary
    last = embedding.model.positions - 1
    shift = torch.tensor([3, -3, last, -last, 1, -19], dtype=torch.int32)
    keys = embedding.keys(len(shift))
    assert torch.equal(rotation.rotate(keys, shift * 0), keys)
    rotated = rotation.rotate(keys, shift)
    assert torch.equal(rotated[..., rotary:], keys[..., rotary:])
    assert not torch.equal(rotated[..., :rotary], keys[..., :rotary])
    torch.testing.assert_close(rotated.norm(dim=-1), keys.norm(dim=-1), rtol=1e-6, atol=0)
    back = rotation.rotate(rotated, -shift)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["torch", "native"])
def test_through_plan_gather_and_decode(
    embedding: Embedding, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of evicted positions but for a few, whose keys were all cached at another one."""
    backend = use(engine, monkeypatch)
    used = embedding.positions()
    count, head_dim = len(used), embedding.model.head_dim
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(count + 3, generator=generator)[:count]
    cached_at = used[torch.randperm(count, generator=generator)]
    raw = embedding.keys(count)
    pool_k, pool_v = torch.full((2, count + 3, HEADS, head_dim), math.nan)
    pool_k[slots] = embedding.by_hugging_face(raw, cached_at)
    pool_v[slots] = values = torch.randn(count, HEADS, head_dim, generator=generator)
    of_slots = torch.zeros(count + 3, dtype=torch.int32)
    of_slots[slots] = cached_at.int()
    row = torch.full((1, embedding.model.positions), -1, dtype=torch.int32)
    row[0, used] = slots.int()

    kv = PagedKv(pool_k, pool_v, embedding.rotation, backend=backend)
    lengths = torch.tensor([embedding.model.positions])
    plan = plan_rows(row, torch.tensor([0]), lengths, of_slots, num_slots=count + 3)
    assert plan.kv_indices.tolist() == slots.tolist()
    assert plan.shift is not None and plan.shift.tolist() == (used - cached_at).tolist()
    keys, _ = gather_kv(kv, plan.kv_indices, plan.shift, torch.float32)
    embedding.assert_close(keys.transpose(0, 1), raw, cached_at, used)

    query = embedding.keys(count + 1)[-1:]
    scale = head_dim**-0.5
    found = decode_attention(query, kv, plan, scale=scale)[0].double()
    expected_k = embedding.by_hugging_face(raw, used).double()
    logits = scale * torch.einsum("hd,nhd->hn", query[0].double(), expected_k)
    expected = torch.einsum("hn,nhd->hd", logits.softmax(-1), values.double())
    # A logit is off by at most the angles' error times the lengths of query and key.
    angle = 11 * embedding.model.positions * UNIT
    bound = scale * angle * float(query.norm(dim=-1).max() * expected_k.norm(dim=-1).max())
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * bound * float(values.abs().max()))


def test_attention_factor_is_in_the_key_once(embedding: Embedding) -> None:
    rotary = embedding.rotary_dim
    raw = embedding.keys(1)
    cached = embedding.by_sglang(raw, torch.tensor([17]))
    rotated = embedding.rotation.rotate(cached, torch.tensor([900]))
    lengths = [float(keys[..., :rotary].norm()) for keys in (raw, cached, rotated)]
    assert lengths[2] == pytest.approx(lengths[1], rel=1e-6)
    factor = float(getattr(embedding.sglang, "mscale", 1.0))
    assert ("yarn" in str(embedding.model)) == (factor > 1.01)
    assert lengths[1] == pytest.approx(factor * lengths[0], rel=1e-6)


def test_angles_come_from_fp32_whatever_serving_uses(embedding: Embedding) -> None:
    """SGLang casts its table to the model's dtype on the CPU."""
    half = torch.nn.ModuleList([embedding.made_by_sglang(torch.bfloat16)])
    rotation = KeyRotation.from_model(half, embedding.model.positions)
    assert torch.equal(rotation.cos, embedding.rotation.cos)
    assert torch.equal(rotation.sin, embedding.rotation.sin)


def test_shapes() -> None:
    """Shifts of any shape, keys as a strided view."""
    embedding = Embedding(MODELS[0])
    rotation = embedding.rotation
    both = embedding.keys(12).view(3, 2, 2, HEADS, -1)
    shift = torch.tensor([[0, 5], [-7, 9], [11, -13]], dtype=torch.int32)
    rotated = rotation.rotate(both[:, :, 1], shift)
    assert torch.equal(rotated, rotation.rotate(both[:, :, 1].clone(), shift))
    assert torch.equal(rotated[2, 1], rotation.rotate(both[2, 1, 1], shift[2, 1]))

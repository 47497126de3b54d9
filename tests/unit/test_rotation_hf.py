# SPDX-License-Identifier: Apache-2.0
"""The rotary parameters of published models, over their whole context.

Hugging Face's module embeds a key for position h and for position p; rotated by p - h with
SGLang's table, the first must be the second. The same through our attention operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.layers.rotary_embedding import base, factory

from sglang_reasoncache.cpu_platform import TorchCpuPlatform
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from tests.kernels.backends import backend as backend
from tests.unit.rotation_models import HEADS, MODELS, UNIT, Embedding


@pytest.fixture(scope="module", autouse=True)
def fresh_rotary_modules() -> Iterator[None]:
    """On our platform, and without SGLang's cache, which would keep every table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "current_platform", TorchCpuPlatform())
        patch.setattr(factory, "_ROPE_DICT", {})
        yield


@pytest.fixture(scope="module", params=MODELS, ids=str)
def embedding(request: pytest.FixtureRequest) -> Iterator[Embedding]:
    yield Embedding(request.param)
    factory._ROPE_DICT.clear()


@pytest.mark.parametrize("cached_by", ["by_hugging_face", "by_sglang"])
def test_rotated_key_is_the_key_computed_there(embedding: Embedding, cached_by: str) -> None:
    cached_at, used = embedding.pairs()
    raw = embedding.keys(len(cached_at))
    cached = getattr(embedding, cached_by)(raw, cached_at)
    rotation = embedding.rotation
    embedding.assert_close(
        rotation.rotate(cached, rotation.angles(used - cached_at)), raw, cached_at, used
    )


def test_the_bound_sees_a_turn_by_one_position_less(embedding: Embedding) -> None:
    cached_at, used = torch.tensor([0, 500, 1000]), torch.tensor([1000, 400, 999])
    raw, rotation = embedding.keys(3), embedding.rotation
    cached = embedding.by_hugging_face(raw, cached_at)
    with pytest.raises(AssertionError, match="of what fp32 allows"):
        rotated = rotation.rotate(cached, rotation.angles(used - cached_at - 1))
        embedding.assert_close(rotated, raw, cached_at, used)


def test_through_plan_gather_and_decode(embedding: Embedding, backend: str) -> None:
    """A row that is all evicted positions but for one entry of each position, its slot of another home."""
    used = embedding.positions()
    count, head_dim = len(used), embedding.model.head_dim
    generator = torch.Generator().manual_seed(11)
    slots = torch.randperm(count + 3, generator=generator)[:count]
    cached_at = used[torch.randperm(count, generator=generator)]
    raw = embedding.keys(count)
    pool_k = torch.full((count + 3, HEADS, head_dim), math.nan)
    pool_v = torch.full((count + 3, HEADS, head_dim), math.nan)
    pool_k[slots] = embedding.by_hugging_face(raw, cached_at)
    pool_v[slots] = values = torch.randn(count, HEADS, head_dim, generator=generator)
    of_slots = torch.zeros(count + 3, dtype=torch.int32)
    of_slots[slots] = cached_at.int()
    row = torch.full((1, embedding.model.positions), -1, dtype=torch.int32)
    row[0, used] = slots.int()

    kv = PagedKv(pool_k, pool_v, embedding.rotation, backend=backend)
    plan = plan_rows(
        row,
        torch.tensor([0]),
        torch.tensor([embedding.model.positions]),
        of_slots,
        num_slots=count + 3,
        backend=backend,
    )
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
    rotated = embedding.rotation.rotate(cached, embedding.rotation.angles(torch.tensor([900])))
    lengths = [float(keys[..., :rotary].norm()) for keys in (raw, cached, rotated)]
    assert lengths[2] == pytest.approx(lengths[1], rel=1e-6)
    factor = float(getattr(embedding.sglang, "mscale", 1.0))
    assert ("yarn" in str(embedding.model)) == (factor > 1.01)
    assert lengths[1] == pytest.approx(factor * lengths[0], rel=1e-6)

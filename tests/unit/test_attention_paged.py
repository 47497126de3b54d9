# SPDX-License-Identifier: Apache-2.0
"""The backend ``reasoncache_cpu`` against dense attention, and against SGLang's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.kernels import extend
from tests.unit.attention_rig import (
    BATCHES,
    DIM,
    TOLERANCE,
    UNSERVED,
    Rig,
    idle_batch,
    supported_runner,
)

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")


def backend_of(rig: Rig, corrected: bool = True) -> PagedCpuBackend:
    return PagedCpuBackend(supported_runner(rig), rig.cached_at if corrected else None)


def check(rig: Rig, new: list[int], backend: PagedCpuBackend | None = None) -> None:
    batch = rig.batch(new)
    backend = backend or backend_of(rig)
    found = rig.forward(backend, batch, decode=batch.forward_mode.is_decode())
    torch.testing.assert_close(
        found.double(), rig.expected(batch), rtol=0, atol=TOLERANCE[rig.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shifted", [0.0, 0.2, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_keys_are_read_where_they_are_used(
    new: list[int], heads: int, kv_heads: int, shifted: float, dtype: torch.dtype
) -> None:
    check(Rig(shifted=shifted, heads=heads, kv_heads=kv_heads, dtype=dtype), new)


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_evicted_positions_are_skipped(new: list[int], corrected: bool) -> None:
    rig = Rig(shifted=0.5)
    rig.evict(new)
    if not corrected:
        rig.settle()
    check(rig, new, backend_of(rig, corrected))


@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_neighbouring_dims_may_be_paired(new: list[int]) -> None:
    check(Rig(shifted=1.0, interleaved=True), new)


@pytest.mark.parametrize("new", [[1, 7, 300], [1, 19, 989]], ids=["with-prefix", "whole"])
@pytest.mark.parametrize("block", [64, 100])
def test_masks_come_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int, new: list[int]) -> None:
    monkeypatch.setattr(extend, "_BLOCK", block)
    monkeypatch.setattr(extend, "_MASK_ELEMENTS", 50_000)
    check(Rig(shifted=0.5), new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_as_cached_reads_what_stock_reads(new: list[int], dtype: torch.dtype) -> None:
    rig = Rig(shifted=0.5, dtype=dtype)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    cached_at = rig.cached_at.positions.clone()
    ours = rig.forward(backend_of(rig, corrected=False), batch, decode)
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch, decode)
    torch.testing.assert_close(ours, stock, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(rig.cached_at.positions, cached_at)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_pool_keeps_its_bytes(new: list[int]) -> None:
    rig = Rig(shifted=1.0)
    batch = rig.batch(new)
    buffers = (*rig.pool.k_buffer, *rig.pool.v_buffer)
    before = [buffer.clone() for buffer in buffers]
    rig.forward(backend_of(rig), batch, decode=batch.forward_mode.is_decode())
    others = torch.ones(len(before[0]), dtype=torch.bool)
    others[batch.out_cache_loc] = False
    for old, buffer in zip(before, buffers, strict=True):
        torch.testing.assert_close(old[others], buffer[others], rtol=0, atol=0, equal_nan=True)


def test_new_slots_are_where_cached_where_they_are_written() -> None:
    rig = Rig(shifted=1.0)
    batch = rig.batch([1, 7, 300])
    backend_of(rig).init_forward_metadata(batch)
    assert torch.equal(rig.cached_at.positions[batch.out_cache_loc].long(), batch.positions)


def test_one_backend_serves_batches_of_every_kind() -> None:
    """What one forward prepared does not leak into the next."""
    rig = Rig(shifted=1.0)
    backend = backend_of(rig)
    for name in ("decode", "with-prefix", "mixed", "decode", "whole", "decode"):
        check(rig, BATCHES[name], backend)


def test_idle_forward_needs_no_rows() -> None:
    rig = Rig(shifted=1.0)
    backend = backend_of(rig)
    cached_at = rig.cached_at.positions.clone()
    backend.init_forward_metadata(idle_batch())
    assert torch.equal(rig.cached_at.positions, cached_at)


@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_logits_are_soft_capped(new: list[int]) -> None:
    """SGLang's torch-native backend leaves the cap out; the model's own formula does not."""
    rig = Rig(shifted=0.5)
    rig.layer.logit_cap = 0.5
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    found = rig.forward(backend_of(rig), batch, decode)
    plain = rig.expected(batch)
    query = iter(rig.query.double().split(new))
    keys, values = rig.pool.k_buffer[1].double(), rig.pool.v_buffer[1].double()
    expected = []
    for row, end in zip(rig.row_of, rig.lengths, strict=True):
        slots = rig.rows.req_to_token[row, :end].long()
        at = torch.arange(end)
        k = rig._turn(keys[slots], at - rig.cached_at.positions[slots]).repeat_interleave(2, dim=1)
        q = next(query)
        scores = 0.5 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5 / 0.5)
        later = at[None, :] > torch.arange(end - len(q), end)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        v = values[slots].repeat_interleave(2, dim=1)
        expected.append(torch.einsum("hqk,khd->qhd", weights, v))
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=0, atol=5e-4)
    assert (found.double() - plain).abs().max() > 0.01


@pytest.mark.parametrize(("change", "message"), UNSERVED)
def test_what_cannot_be_served_is_refused_by_name(change: Any, message: str) -> None:
    rig = Rig(shifted=0.0)
    supported_runner(rig)
    change(rig)
    with pytest.raises(ValueError, match=f"--attention-backend reasoncache_cpu.*{message}"):
        PagedCpuBackend(rig.runner)


def test_positions_without_a_linear_rotation_are_refused() -> None:
    rig = Rig(shifted=0.0)
    supported_runner(rig).model = torch.nn.ModuleList([rig.layer])
    with pytest.raises(ValueError, match="rotary embedding"):
        PagedCpuBackend(rig.runner, rig.cached_at)
    PagedCpuBackend(rig.runner)

# SPDX-License-Identifier: Apache-2.0
"""The correcting torch-native backend against dense attention in double precision."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend
from tests.unit.attention_rig import LENGTHS, TOLERANCE, Rig, idle_batch

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")


def check(rig: Rig, new: list[int]) -> None:
    batch = rig.batch(new)
    backend = CorrectedTorchNativeBackend(rig.runner, rig.cached_at)
    found = rig.forward(backend, batch, decode=batch.forward_mode.is_decode())
    torch.testing.assert_close(
        found.double(), rig.expected(batch), rtol=0, atol=TOLERANCE[rig.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shifted", [0.0, 0.2, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (5, 1)])
def test_decode_reads_keys_where_they_are_used(
    heads: int, kv_heads: int, shifted: float, dtype: torch.dtype
) -> None:
    check(Rig(shifted=shifted, heads=heads, kv_heads=kv_heads, dtype=dtype), [1, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shifted", [0.0, 0.2, 1.0], ids=["none", "some", "all"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("new", [[1, 19, 1], [1, 7, 300]], ids=["whole", "with-prefix"])
def test_extend_reads_keys_where_they_are_used(
    new: list[int], heads: int, kv_heads: int, shifted: float, dtype: torch.dtype
) -> None:
    check(Rig(shifted=shifted, heads=heads, kv_heads=kv_heads, dtype=dtype), new)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_neighbouring_dims_may_be_paired(new: list[int]) -> None:
    check(Rig(shifted=1.0, interleaved=True), new)


@pytest.mark.parametrize("length", LENGTHS)
def test_batch_of_one(length: int) -> None:
    check(Rig(shifted=1.0, lengths=[length]), [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("notes_shifted", [False, True], ids=["never", "not-here"])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 19, 300]], ids=["decode", "extend"])
def test_nothing_shifted_gives_the_stock_bits(
    new: list[int], notes_shifted: bool, dtype: torch.dtype
) -> None:
    rig = Rig(shifted=0.0, dtype=dtype, notes_shifted=notes_shifted)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    ours = rig.forward(CorrectedTorchNativeBackend(rig.runner, rig.cached_at), batch, decode)
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch, decode)
    assert torch.equal(ours, stock)


def test_shifted_keys_do_matter() -> None:
    """The other tests would prove nothing if reading as cached passed too."""
    rig = Rig(shifted=0.2)
    batch = rig.batch([1, 1, 1])
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch)
    assert float((stock.double() - rig.expected(batch)).abs().max()) > 100 * TOLERANCE[rig.dtype]


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_pool_keeps_its_bytes(new: list[int]) -> None:
    """Keys are rotated on the way out; only the batch's own slots are written."""
    rig = Rig(shifted=1.0)
    batch = rig.batch(new)
    before = [buffer.clone() for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer)]
    rig.forward(
        CorrectedTorchNativeBackend(rig.runner, rig.cached_at),
        batch,
        decode=batch.forward_mode.is_decode(),
    )
    others = torch.ones(len(before[0]), dtype=torch.bool)
    others[batch.out_cache_loc] = False
    for old, new_buffer in zip(before, (*rig.pool.k_buffer, *rig.pool.v_buffer), strict=True):
        torch.testing.assert_close(old[others], new_buffer[others], rtol=0, atol=0, equal_nan=True)


def test_new_slots_are_where_cached_where_they_are_written() -> None:
    rig = Rig(shifted=1.0)
    batch = rig.batch([1, 7, 300])
    CorrectedTorchNativeBackend(rig.runner, rig.cached_at).init_forward_metadata(batch)
    assert torch.equal(rig.cached_at.positions[batch.out_cache_loc].long(), batch.positions)


def test_one_backend_serves_batches_of_every_kind() -> None:
    """What one forward prepared does not leak into the next."""
    rig = Rig(shifted=1.0)
    backend = CorrectedTorchNativeBackend(rig.runner, rig.cached_at)
    for new in ([1, 1, 1], [1, 7, 300], [1, 1, 1]):
        batch = rig.batch(new)
        found = rig.forward(backend, batch, decode=batch.forward_mode.is_decode())
        torch.testing.assert_close(
            found.double(), rig.expected(batch), rtol=0, atol=TOLERANCE[rig.dtype]
        )
    for row, end in zip(rig.row_of, rig.lengths, strict=True):
        slots = rig.rows.req_to_token[row, :end].long()
        rig.cached_at.record(slots, torch.arange(end))
    batch = rig.batch([1, 1, 1])
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(rig.forward(backend, batch), stock)


def test_idle_forward_needs_no_rows() -> None:
    rig = Rig(shifted=1.0)
    backend = CorrectedTorchNativeBackend(rig.runner, rig.cached_at)
    cached_at = rig.cached_at.positions.clone()
    backend.init_forward_metadata(idle_batch())
    assert torch.equal(rig.cached_at.positions, cached_at)


def test_sliding_window_is_refused_rather_than_ignored() -> None:
    rig = Rig(shifted=1.0)
    rig.layer.sliding_window_size = 8
    with pytest.raises(RuntimeError, match="sliding-window"):
        rig.forward(CorrectedTorchNativeBackend(rig.runner, rig.cached_at), rig.batch([1, 1, 1]))

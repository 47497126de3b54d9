# SPDX-License-Identifier: Apache-2.0
"""What stands in front of SGLang's backends on CUDA, here in front of one that runs on the CPU.

Which forward goes where, what is noted and what is refused do not depend on the
backend behind. In front of SGLang's Triton backend, and in graphs:
``test_attention_cuda_graph.py``.
"""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin import attention, cuda_attention, refusals
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


class Backend(SharedSlotReads, TorchNativeAttnBackend):
    """As ``cuda_attention.backend_class`` makes them."""


def runner_of(rig: Rig) -> Any:
    """The rig's runner as that of a server on CUDA."""
    runner = supported_runner(rig)
    runner.decode_attention_backend_str = "triton"
    runner.server_args = SimpleNamespace()
    return runner


REQUESTED_BY = "--reasoncache-positions corrected over --attention-backend triton"


def backend_of(rig: Rig, corrected: bool = True) -> Backend:
    return Backend(runner_of(rig), rig.cached_at if corrected else None, requested_by=REQUESTED_BY)


def batch_of(rig: Rig, new: list[int]) -> ForwardBatch:
    """The rig's batch as SGLang's own record."""
    made = rig.batch(new)
    return ForwardBatch(
        forward_mode=made.forward_mode,
        batch_size=len(new),
        input_ids=made.positions,
        req_pool_indices=made.req_pool_indices,
        seq_lens=made.seq_lens,
        seq_lens_cpu=made.seq_lens,
        seq_lens_sum=sum(rig.lengths),
        out_cache_loc=made.out_cache_loc,
        positions=made.positions,
        extend_seq_lens=made.extend_seq_lens,
        extend_prefix_lens=made.extend_prefix_lens,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=made.extend_prefix_lens.tolist(),
        rids=[f"r{i}" for i in range(len(new))],
    )


def forward(rig: Rig, backend: Any, batch: ForwardBatch) -> torch.Tensor:
    return rig.forward(backend, batch, decode=batch.forward_mode.is_decode())


def check(rig: Rig, backend: Any, batch: ForwardBatch) -> None:
    found = forward(rig, backend, batch)
    torch.testing.assert_close(
        found.double(), rig.expected(batch), rtol=0, atol=TOLERANCE[rig.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shifted", [0.2, 1.0], ids=["some", "all"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_shifted_keys_are_read_where_they_are_used(
    new: list[int], heads: int, kv_heads: int, shifted: float, dtype: torch.dtype
) -> None:
    rig = Rig(shifted=shifted, heads=heads, kv_heads=kv_heads, dtype=dtype)
    check(rig, backend_of(rig), batch_of(rig, new))


@pytest.mark.parametrize("positions", ["corrected", "as-cached"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_evicted_positions_are_skipped_in_both_positions_modes(
    new: list[int], positions: str
) -> None:
    """Batches that were not looked at, and those that were; moved keys as the mode has them."""
    rig = Rig(shifted=0.5)
    backend = backend_of(rig, corrected=positions == "corrected")
    rig.evict(new)
    if positions == "as-cached":
        rig.settle()
    check(rig, backend, batch_of(rig, new))
    batch = batch_of(rig, new)
    backend.mark.note(batch.rids, True)
    check(rig, backend, batch)


@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_shifted_slots_are_sglangs_own_where_keys_are_read_as_cached(new: list[int]) -> None:
    """Only a batch with evicted positions is not; which has some is known batch by batch."""
    rig = Rig(shifted=0.5, dtype=torch.bfloat16)
    backend = backend_of(rig, corrected=False)
    assert backend.rotation is None
    cached_at = rig.cached_at.positions.clone()
    for has_evicted in (False, True):
        rig.runner.token_to_kv_pool_allocator.has_evicted = has_evicted
        batch = batch_of(rig, new)
        if has_evicted:
            backend.mark.note(batch.rids, False)
        ours = forward(rig, backend, batch)
        assert torch.equal(ours, forward(rig, TorchNativeAttnBackend(rig.runner), batch))
    assert torch.equal(rig.cached_at.positions, cached_at)


@pytest.mark.parametrize("known", ["never-shared", "marked"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_a_forward_without_shifted_slots_is_sglangs_own(new: list[int], known: str) -> None:
    """Bit for bit; the mark decides, not what the rows hold."""
    rig = Rig(shifted=0.5, dtype=torch.bfloat16)
    backend = backend_of(rig)
    batch = batch_of(rig, new)
    if known == "marked":
        backend.mark.note(batch.rids, False)
    else:
        rig.runner.token_to_kv_pool_allocator.has_shifted_slots = False
    ours = forward(rig, backend, batch)
    stock = forward(rig, TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(ours, stock)


def test_a_mark_survives_the_copies_sglang_makes_of_a_batch() -> None:
    rig = Rig(shifted=0.5)
    backend = backend_of(rig)
    batch = batch_of(rig, [1, 1, 1])
    backend.mark.note(batch.rids, False)
    copied = dataclasses.replace(batch, positions=batch.positions.clone())
    stock = forward(rig, TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(forward(rig, backend, copied), stock)
    # Another batch of the same requests was not looked at.
    check(rig, backend, dataclasses.replace(batch, rids=list(batch.rids)))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_new_slots_are_where_cached_where_they_are_written(new: list[int], marked: bool) -> None:
    rig = Rig(shifted=1.0)
    backend = backend_of(rig)
    batch = batch_of(rig, new)
    backend.mark.note(batch.rids, marked)
    backend.init_forward_metadata(batch)
    assert torch.equal(rig.cached_at.positions[batch.out_cache_loc].long(), batch.positions)


def test_one_backend_serves_batches_of_every_kind() -> None:
    """What one forward prepared does not leak into the next."""
    rig = Rig(shifted=1.0)
    backend = backend_of(rig)
    for name in ("decode", "with-prefix", "mixed", "decode", "whole", "decode"):
        check(rig, backend, batch_of(rig, BATCHES[name]))
        plain = batch_of(rig, BATCHES[name])
        backend.mark.note(plain.rids, False)
        stock = forward(rig, TorchNativeAttnBackend(rig.runner), plain)
        assert torch.equal(forward(rig, backend, plain), stock)


def test_idle_forward_needs_no_rows() -> None:
    rig = Rig(shifted=1.0)
    backend = backend_of(rig)
    cached_at = rig.cached_at.positions.clone()
    backend.init_forward_metadata(idle_batch())
    assert torch.equal(rig.cached_at.positions, cached_at)


@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_keys_and_values_are_scaled_back_from_the_pool(new: list[int]) -> None:
    """As a model with fp8 scales: the pool holds K / k_scale, of another type than the model's."""
    k_scale, v_scale = 0.5, 4.0
    outputs = []
    for scaled in (True, False):
        rig = Rig(shifted=0.5, dtype=torch.bfloat16)
        rig.dtype = rig.runner.dtype = torch.float32
        rig.layer.k_scale = rig.layer.k_scale_float = k_scale if scaled else None
        rig.layer.v_scale = rig.layer.v_scale_float = v_scale if scaled else None
        if not scaled:
            for buffer, scale in ((rig.pool.k_buffer, k_scale), (rig.pool.v_buffer, v_scale)):
                for side in buffer:
                    side.mul_(scale)
        outputs.append(forward(rig, backend_of(rig), batch_of(rig, new)))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=5e-4)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 3, 40]], ids=["decode", "extend"])
def test_sinks_take_weight(new: list[int]) -> None:
    rig = Rig(shifted=0.5)
    backend = backend_of(rig)
    batch = batch_of(rig, new)
    plain = forward(rig, backend, batch)
    q = rig.query.reshape(len(batch.positions), -1)
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    none = torch.full((rig.heads,), -1e30)
    found = run(q, None, None, rig.layer, batch, sinks=none).view_as(plain)
    torch.testing.assert_close(found, plain, rtol=0, atol=5e-4)
    strong = torch.full((rig.heads,), 50.0)
    assert run(q, None, None, rig.layer, batch, sinks=strong).abs().max() < 1e-6


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 3, 40]], ids=["decode", "extend"])
def test_what_our_kernels_do_not_know_is_refused(new: list[int]) -> None:
    rig = Rig(shifted=0.5)
    backend = backend_of(rig)
    batch = batch_of(rig, new)
    backend.init_forward_metadata(batch)
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    q = torch.zeros(len(batch.positions), rig.heads * DIM)
    with pytest.raises(ValueError, match="score_mod is not served"):
        run(q, None, None, rig.layer, batch, sinks=None, aux_tensors=None, score_mod=len)


def test_prefill_graphs_run_what_is_not_shifted() -> None:
    rig = Rig(shifted=0.5)
    backend = backend_of(rig)
    batch = batch_of(rig, [1, 7, 300])
    assert not backend.can_run_prefill_cuda_graph(batch)
    backend.mark.note(batch.rids, False)
    assert backend.can_run_prefill_cuda_graph(batch)


@pytest.mark.parametrize(("change", "message"), UNSERVED)
def test_what_cannot_be_served_is_refused_by_name(change: Any, message: str) -> None:
    rig = Rig(shifted=0.0)
    runner_of(rig)
    change(rig)
    with pytest.raises(ValueError, match=f"corrected over --attention-backend triton.*{message}"):
        Backend(rig.runner, rig.cached_at, requested_by=REQUESTED_BY)


@pytest.mark.parametrize("name", compat.CUDA_BACKENDS)
def test_sglangs_backend_is_behind_ours(name: str) -> None:
    """Whatever we do not mention is SGLang's own: flags it reads, and what kind of backend it is."""
    made = cuda_attention.backend_class(name)
    stock = {"flashinfer": compat.FlashInferAttnBackend, "triton": compat.TritonAttnBackend}[name]
    assert made.__mro__[1:3] == (SharedSlotReads, stock)
    theirs = {attribute for attribute in vars(stock) if not attribute.startswith(("__", "_abc_"))}
    for attribute in theirs - vars(SharedSlotReads).keys():
        assert getattr(made, attribute) is getattr(stock, attribute)


@pytest.mark.parametrize("name", compat.CUDA_BACKENDS)
def test_other_devices_are_refused(name: str) -> None:
    rig = Rig(shifted=0.0)
    with pytest.raises(
        ValueError, match=f"--x y over --attention-backend {name} needs an NVIDIA GPU.*cpu"
    ):
        cuda_attention.make(runner_of(rig), name, None, requested_by="--x y")


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("enable_pdmux", "--enable-pdmux"),
        ("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        ("enable_mis", "--enable-mis"),
        ("enable_torch_compile", "--enable-torch-compile"),
        ("enable_deterministic_inference", "--enable-deterministic-inference"),
    ],
)
def test_flags_in_the_way_are_named(field: str, flag: str) -> None:
    asked = "--reasoncache-positions corrected over --attention-backend flashinfer"
    args = compat.ServerArgs(model_path="none", device="cpu")
    refusals.check_corrected(args, asked)
    assert not getattr(args, field)
    setattr(args, field, True)
    with pytest.raises(ValueError, match=f"{asked} cannot be combined with: {flag} "):
        refusals.check_corrected(args, asked)


@pytest.mark.parametrize("word", ["1", "true", "YES", "y"])
def test_glued_metadata_is_refused(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", word)
    with pytest.raises(ValueError, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        refusals.check_corrected(SimpleNamespace(), "corrected")


@pytest.mark.parametrize("policy", ["streamingllm:budget=64", "reasoncache+quest:budget=64"])
@pytest.mark.parametrize("positions", ["auto", "as-cached"])
def test_a_policy_that_evicts_or_selects_asks_for_our_kernels(positions: str, policy: str) -> None:
    """Without one SGLang's backend serves as it is; with one backend for each half it is refused later."""
    runner = runner_of(Rig(shifted=0.0))
    runner.is_draft_worker = False
    runner.prefill_attention_backend_str = "triton"
    stock = object()

    def made(policy: str) -> tuple[Any, attention.AttentionParts]:
        config = ReasonCacheConfig(policy=policy, positions=positions)
        cached = CachedPositions(1, "cpu")
        return attention.attention_backend(runner, config, "triton", lambda _runner: stock, cached)

    assert made("reasoncache") == (stock, attention.AttentionParts())
    with pytest.raises(
        ValueError,
        match=f"--reasoncache-policy {re.escape(policy)} over --attention-backend triton needs",
    ):
        made(policy)
    runner.prefill_attention_backend_str = "flashinfer"
    assert made(policy) == (stock, attention.AttentionParts(skips_evicted=False))

# SPDX-License-Identifier: Apache-2.0
"""What stands in front of SGLang's backends on CUDA, here in front of one that runs on the CPU; in
front of the Triton backend, and in graphs: ``test_attention_cuda_graph.py``."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_reasoncache import compat
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin import attention, refusals
from tests.unit.attention_rig import BATCHES, Rig
from tests.unit.test_attention import backend_of

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")


@pytest.mark.parametrize("known", ["as cached", "as cached, evicted", "never shared", "marked"])
@pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
def test_a_forward_without_shifted_slots_is_sglangs_own(new: list[int], known: str) -> None:
    """Bit for bit; the mark decides, not what the rows hold. Where keys are read as cached, only
    a batch with evicted positions is not; which has some is known batch by batch."""
    rig, corrected = Rig(shifted=0.5, dtype=torch.bfloat16), not known.startswith("as cached")
    backend = backend_of("cuda", rig, corrected)
    assert corrected or backend.paged.rotation is None
    allocator, cached_at = rig.runner.token_to_kv_pool_allocator, rig.cached_at.positions.clone()
    allocator.has_evicted = known == "as cached, evicted"
    allocator.has_shifted_slots = known != "never shared"
    batch = rig.batch(new)
    if known in ("as cached, evicted", "marked"):
        backend.mark.note(batch.rids, False)
    ours = rig.forward(backend, batch)
    assert corrected or torch.equal(rig.cached_at.positions, cached_at)
    assert torch.equal(ours, rig.forward(TorchNativeAttnBackend(rig.runner), batch))


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300]], ids=["decode", "extend"])
def test_a_mark_survives_the_copies_sglang_makes_of_a_batch(new: list[int]) -> None:
    """Prefill graphs run what is not shifted."""
    rig = Rig(shifted=0.5)
    backend = backend_of("cuda", rig)
    batch = rig.batch(new)
    assert not backend.can_run_prefill_cuda_graph(batch)
    backend.mark.note(batch.rids, False)
    assert backend.can_run_prefill_cuda_graph(batch)
    copied = dataclasses.replace(batch, positions=batch.positions.clone())
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(rig.forward(backend, copied), stock)
    # Another batch of the same requests was not looked at.
    rig.check(backend, dataclasses.replace(batch, rids=list(batch.rids)))


@pytest.mark.parametrize("name", compat.CUDA_BACKENDS)
def test_sglangs_backend_is_behind_ours(name: str) -> None:
    """Whatever we do not mention is SGLang's own: flags it reads, and what kind of backend it is."""
    made = attention.backend_class(name)
    stock = {"flashinfer": compat.FlashInferAttnBackend, "triton": compat.TritonAttnBackend}[name]
    assert made.__mro__[1:4] == (SharedSlotReads, PagedBackend, stock)
    theirs = {attribute for attribute in vars(stock) if not attribute.startswith(("__", "_abc_"))}
    for attribute in theirs - vars(SharedSlotReads).keys() - vars(PagedBackend).keys():
        assert getattr(made, attribute) is getattr(stock, attribute)

    # On other devices it is refused.
    over = f"--x y over --attention-backend {name} needs an NVIDIA GPU.*cpu"
    with pytest.raises(ValueError, match=over):
        attention.make_cuda(Rig(shifted=0.0).runner, name, None, requested_by="--x y")


FLAGS = ["pdmux", "two-batch-overlap", "mis", "torch-compile", "deterministic-inference"]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_in_the_way_are_named(flag: str) -> None:
    asked = "--reasoncache-positions corrected over --attention-backend flashinfer"
    args, field = compat.ServerArgs(model_path="none", device="cpu"), flag.replace("-", "_")
    refusals.check_corrected(args, asked)
    assert getattr(args, f"enable_{field}") is False
    setattr(args, f"enable_{field}", True)
    with pytest.raises(ValueError, match=f"{asked} cannot be combined with: --enable-{flag} "):
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
    runner = Rig(shifted=0.0).runner
    runner.prefill_attention_backend_str = "triton"
    stock = object()

    def made(policy: str) -> tuple[Any, attention.AttentionParts]:
        config = ReasonCacheConfig(policy=policy, positions=positions)
        cached = CachedPositions(1, "cpu")
        return attention.attention_backend(runner, config, "triton", lambda _runner: stock, cached)

    assert made("reasoncache") == (stock, attention.AttentionParts())
    flag = f"--reasoncache-policy {re.escape(policy)}"
    with pytest.raises(ValueError, match=f"{flag} over --attention-backend triton needs"):
        made(policy)
    runner.prefill_attention_backend_str = "flashinfer"
    assert made(policy) == (stock, attention.AttentionParts(skips_evicted=False))

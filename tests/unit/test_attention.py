# SPDX-License-Identifier: Apache-2.0
"""Our attention backends on the CPU, compared with dense attention in fp64. Here our mixin for CUDA extends
SGLang's torch-native backend: the mixin chooses between our kernels and SGLang's in the same way, whichever
backend it extends. ``test_attention_cuda.py`` has more tests of the mixin."""

import contextlib
import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.models.transformers import TransformersBase

from sglang_reasoncache import compat, native
from sglang_reasoncache.attention import absorbed, models
from sglang_reasoncache.attention.paged_cuda import SharedSlotReads
from sglang_reasoncache.attention.slots import StockSlots
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.cpu import attention as cpu_attention
from sglang_reasoncache.cpu.backend import PagedCpuBackend
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.kernels import extend
from sglang_reasoncache.plugin import attention
from tests.kernels.engines import unavailable
from tests.unit.attention_rig import BATCHES, DIM, RANK, ROTATED, UNSUPPORTED, Rig, mark

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")

REQUESTED_BY = "--reasoncache-positions corrected over --attention-backend triton"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ALL_BATCHES = pytest.mark.parametrize("new", BATCHES.values(), ids=BATCHES)
DECODE_AND_EXTEND = pytest.mark.parametrize(
    "new", [BATCHES["decode"], BATCHES["with-prefix"]], ids=["decode", "extend"]
)
KINDS = pytest.mark.parametrize("kind", ["reasoncache_cpu", "cuda"])


class Stock(TorchNativeAttnBackend):
    """SGLang's torch-native backend. It runs no CUDA graphs, so it allocates no state for graphs."""

    def init_cuda_graph_state(self, *_: Any, **__: Any) -> None:
        pass


class Backend(SharedSlotReads, Stock):
    """A class like those that ``attention.backend_class`` makes."""


def backend_of(kind: str, rig: Rig, corrected: bool = True) -> Any:
    cuda = functools.partial(Backend, requested_by=REQUESTED_BY)
    made: Any = {"reasoncache_cpu": PagedCpuBackend, "cuda": cuda}
    return made[kind](rig.runner, rig.cached_at if corrected else None)


@KINDS
@DTYPES
@pytest.mark.parametrize("shifted", [0.2, 1.0], ids=["some", "all"])
@pytest.mark.parametrize("sizes", [(6, 2, False), (5, 1, False), (4, 2, True)])
@ALL_BATCHES
def test_keys_are_read_where_they_are_used(
    new: list[int], sizes: tuple[int, int, bool], shifted: float, dtype: torch.dtype, kind: str
) -> None:
    """Each key is rotated to the position at which a request uses it, also if RoPE pairs neighbouring dims."""
    heads, kv_heads, interleaved = sizes
    options: Any = dict(heads=heads, kv_heads=kv_heads, interleaved=interleaved)
    rig = Rig(shifted=shifted, dtype=dtype, **options)
    rig.check(backend_of(kind, rig), rig.batch(new))


@KINDS
@pytest.mark.parametrize("window", [0, 1, 17, 300, 2000])
@ALL_BATCHES
def test_windows_go_by_the_position_that_reads(
    monkeypatch: pytest.MonkeyPatch, new: list[int], window: int, kind: str
) -> None:
    """A window counts back from the query's position; where keys were cached does not matter. SGLang's
    torch-native backend, which lacks soft caps, has the same windows. With the patched limits, a mask is for
    64 queries at most, and only small masks are kept. With a soft cap, attention is computed token by token."""
    monkeypatch.setattr(extend, "_BLOCK", 64)
    monkeypatch.setattr(extend, "_MASK_ELEMENTS", 50_000)
    rig = Rig(shifted=0.5, window=window)
    backend = backend_of(kind, rig)
    batch = rig.batch(new)
    rig.check(backend, batch)
    rig.layer.logit_cap = 0.5
    rig.check(backend_of(kind, rig), batch, logit_cap=0.5)
    capped = (rig.expected(batch, logit_cap=0.5) - rig.expected(batch)).abs().max()
    assert window or capped > 0.01
    rig.layer.logit_cap = 0.0
    rig.settle()
    rig.check(TorchNativeAttnBackend(rig.runner), batch)


@KINDS
@DTYPES
@ALL_BATCHES
def test_latent_rows_are_read_where_they_are_used(
    new: list[int], dtype: torch.dtype, kind: str
) -> None:
    rig = Rig(shifted=0.4, dtype=dtype, heads=20, kv_heads=1, interleaved=True, latent=True)
    backend = backend_of(kind, rig)
    batch = rig.batch(new)
    rig.check(backend, batch)
    # SGLang passes FlashInfer the rotated dims separately.
    parts = rig.query.split((RANK, ROTATED), dim=2)
    q = parts[0].transpose(0, 1).contiguous().transpose(0, 1)
    q_rope = parts[1]
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    found = run(q, None, None, rig.layer, batch, q_rope=q_rope, k_rope=None)
    assert torch.equal(found.view_as(q), rig.forward(backend, batch))


def test_prefills_that_expand_latent_rows_are_sglangs_own() -> None:
    """A model that never asks SGLang's registry for the form of its attention may attend to expanded rows,
    which our kernels do not read. Its prefills read keys as cached, even if the batch is marked."""
    rig = Rig(shifted=0.4, heads=20, kv_heads=1, interleaved=True, latent=True)
    expanded = RadixAttention(20, 48, 1.0, 20, layer_id=1, v_head_dim=32)
    rig.runner.model.append(expanded)
    assert not absorbed.is_possible(rig.runner)
    backend = backend_of("cuda", rig)
    batch = rig.batch(BATCHES["with-prefix"])
    mark(batch, True)
    stock = rig.forward(TorchNativeAttnBackend(rig.runner), batch)
    assert torch.equal(rig.forward(backend, batch), stock)
    rig.check(backend, rig.batch(BATCHES["decode"]))
    owner: Any = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
    torch.nn.Module.__init__(owner)
    owner.attn_mqa = rig.layer
    owner.attn_mha = expanded
    rig.runner.model = torch.nn.ModuleList([owner])
    assert absorbed.is_possible(rig.runner)
    # Lightning attention, as in Ring 2.5, has one of SGLang's attention layers, but no KV.
    rig.runner.model.append(torch.nn.ModuleList([RadixAttention(20, 48, 1.0, 20, layer_id=2)]))
    assert absorbed.is_possible(rig.runner)


def test_sglang_absorbs_the_prefills_that_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all other forwards SGLang chooses the form of latent attention."""
    monkeypatch.setattr(
        compat.AttentionBackendRegistry,
        "_handlers",
        {"triton": lambda *_: "expanded", "none": lambda *_: "expanded"},
    )
    for _ in range(2):
        absorbed.where_ours("triton")
    rig = Rig(shifted=0.4, heads=4, kv_heads=1, interleaved=True, latent=True)
    backend = backend_of("cuda", rig)
    batch = rig.batch(BATCHES["with-prefix"])
    hybrid = SimpleNamespace(full_attn_backend=backend)
    # A draft model has a backend of its own, and runs while the plan of the last prefill is there.
    draft = SimpleNamespace()
    for shifted, form in ((True, compat.AttnForwardMethod.MLA), (False, "expanded")):
        mark(batch, shifted)
        backend.init_forward_metadata(batch)
        for used, expected in ((backend, form), (hybrid, form), (draft, "expanded")):
            context: Any = ForwardContext(attn_backend=used)
            with forward_context(context):
                handler = compat.AttentionBackendRegistry.get_handler("triton")
                assert handler(None, batch) == expected


@KINDS
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
@ALL_BATCHES
def test_evicted_positions_are_skipped(new: list[int], corrected: bool, kind: str) -> None:
    """Without ``corrected``, backends read keys as they were cached, so no slot may be shifted."""
    rig = Rig(shifted=0.5)
    backend = backend_of(kind, rig, corrected)
    rig.evict(new)
    if not corrected:
        rig.settle()
    rig.check(backend, rig.batch(new))
    if kind == "cuda":
        # Check a marked batch, too. The batch above was not marked.
        batch = rig.batch(new)
        mark(batch, True)
        rig.check(backend, batch)


@KINDS
@pytest.mark.parametrize("marked", [True, False])
@DECODE_AND_EXTEND
def test_only_the_batchs_own_slots_are_written(new: list[int], marked: bool, kind: str) -> None:
    """A forward records the position of each key that it writes, and leaves all other slots unchanged."""
    rig = Rig(shifted=1.0)
    backend = backend_of(kind, rig)
    batch = rig.batch(new)
    if kind == "cuda":
        mark(batch, marked)
    buffers = rig.buffers
    before = [buffer.clone() for buffer in buffers]
    rig.forward(backend, batch)
    others = torch.ones(len(before[0]), dtype=torch.bool)
    others[batch.out_cache_loc] = False
    for old, buffer in zip(before, buffers, strict=True):
        torch.testing.assert_close(old[others], buffer[others], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rig.cached_at.positions[batch.out_cache_loc].long(), batch.positions)


@KINDS
def test_one_backend_serves_batches_of_every_kind(kind: str) -> None:
    """Nothing that one forward prepared affects the next."""
    rig = Rig(shifted=1.0)
    backend = backend_of(kind, rig)
    stock = TorchNativeAttnBackend(rig.runner)
    for name in ("decode", "with-prefix", "mixed", "decode", "whole", "decode"):
        rig.check(backend, rig.batch(BATCHES[name]))
        if kind == "cuda":
            plain = rig.batch(BATCHES[name])
            mark(plain, False)
            assert torch.equal(rig.forward(backend, plain), rig.forward(stock, plain))
    rig.settle()
    rig.check(backend, rig.batch([1, 1, 1]))


@KINDS
def test_a_rank_without_a_request_needs_no_rows(kind: str) -> None:
    rig = Rig(shifted=1.0)
    backend = backend_of(kind, rig)
    cached_at = rig.cached_at.positions.clone()
    names = ("out_cache_loc", "positions", "seq_lens")
    nothing = dict.fromkeys(names, torch.empty(0, dtype=torch.int64))
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE, **nothing))
    assert torch.equal(rig.cached_at.positions, cached_at)


@KINDS
@ALL_BATCHES
def test_keys_and_values_are_scaled_back_from_the_pool(new: list[int], kind: str) -> None:
    """As with fp8, the pool holds K / k_scale and V / v_scale, in a dtype (bf16) other than the model's."""
    scales = (0.5, 4.0)
    outputs = []
    for scaled in (True, False):
        rig = Rig(shifted=0.5, dtype=torch.bfloat16)
        rig.dtype = rig.runner.dtype = torch.float32
        k_scale, v_scale = scales if scaled else (None, None)
        rig.layer.k_scale = rig.layer.k_scale_float = k_scale
        rig.layer.v_scale = rig.layer.v_scale_float = v_scale
        if not scaled:
            for buffers, scale in zip((rig.pool.k_buffer, rig.pool.v_buffer), scales, strict=True):
                torch._foreach_mul_(buffers, scale)
        outputs.append(rig.forward(backend_of(kind, rig), rig.batch(new)))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=5e-4)


@KINDS
@DECODE_AND_EXTEND
def test_sinks_take_weight(new: list[int], kind: str) -> None:
    """Both backends support attention sinks. The CUDA backend refuses arguments unknown to our kernels."""
    rig = Rig(shifted=0.5)
    backend = backend_of(kind, rig)
    batch = rig.batch(new)
    plain = rig.forward(backend, batch)
    q = rig.query.reshape(len(batch.positions), -1)
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    none = torch.full((rig.heads,), -1e30)
    found = run(q, None, None, rig.layer, batch, sinks=none).view_as(plain)
    torch.testing.assert_close(found, plain, rtol=0, atol=5e-4)
    strong = torch.full((rig.heads,), 50.0)
    assert run(q, None, None, rig.layer, batch, sinks=strong).abs().max() < 1e-6
    if kind == "cuda":
        with pytest.raises(ValueError, match="score_mod is not supported"):
            run(q, None, None, rig.layer, batch, sinks=None, aux_tensors=None, score_mod=len)


@KINDS
@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(change: Any, message: str, kind: str) -> None:
    rig = Rig(shifted=0.0)
    change(rig)
    flag = {"reasoncache_cpu": "--attention-backend reasoncache_cpu", "cuda": REQUESTED_BY}[kind]
    with pytest.raises(ValueError, match=f"{flag}.*{message}"):
        backend_of(kind, rig)


def test_what_reads_latent_rows_as_they_are_is_refused() -> None:
    """With latent attention, evicting policies and a ``k_scale`` other than 1 are refused, too."""
    rig = Rig(shifted=0.0, kv_heads=1, interleaved=True, latent=True)
    args = compat.ServerArgs(model_path="none", device="cpu")
    models.check_latent(rig.pool, args)
    args.enable_mixed_chunk = True
    with_states: Any = object.__new__(compat.HybridLinearKVPool)
    with_states.full_kv_pool = rig.pool
    with_states.full_attention_layer_id_mapping = {1: 0}
    for pool in (rig.pool, with_states):
        models.check_pool(pool)
        with pytest.raises(ValueError, match="--enable-mixed-chunk beside latent"):
            models.check_latent(pool, args)
    models.check_latent(Rig(shifted=0.0).pool, args)
    config = ReasonCacheConfig(policy="streamingllm:budget=64")
    with pytest.raises(ValueError, match="streamingllm:budget=64 does not support latent"):
        attention.check_pool_for_policies(config, rig.pool)
    rig.layer.k_scale_float = 0.5
    with pytest.raises(ValueError, match="layer 1 has latent rows divided by 0.5"):
        PagedCpuBackend(rig.runner, rig.cached_at)


def test_what_is_not_served_beside_windows_is_refused() -> None:
    """With windows, evicting is refused, and so is rotating keys of images or unknown attention modules."""
    rig = Rig(shifted=0.0, window=8)
    config = ReasonCacheConfig(policy="streamingllm:budget=64")
    asked: Any = config, "triton", None, rig.cached_at
    with pytest.raises(ValueError, match="streamingllm:budget=64 does not support sliding windows"):
        attention.attention_backend(rig.runner, *asked)
    rig.runner.model_config.is_multimodal = True
    with pytest.raises(
        ValueError, match="beside sliding windows images are not supported.*--language-model-only"
    ):
        PagedCpuBackend(rig.runner, rig.cached_at)
    rig = Rig(shifted=0.0)
    rig.layer.sliding_window_size = 8
    with pytest.raises(ValueError, match=r"\(ModuleList\) is beside sliding windows"):
        PagedCpuBackend(rig.runner, rig.cached_at)
    PagedCpuBackend(rig.runner, None)


@pytest.mark.parametrize("attribute", models.OWN_WAYS)
def test_a_model_with_its_own_way_to_attend_is_refused(attribute: str) -> None:
    rig = Rig(shifted=0.0)
    PagedCpuBackend(rig.runner, None)
    setattr(rig.layer, attribute, None)
    with pytest.raises(ValueError, match=re.escape(models.OWN_WAYS[attribute])):
        PagedCpuBackend(rig.runner, None)


def test_what_sglang_keeps_beside_a_row_is_named() -> None:
    """It would be that of another request after KV came back from the host."""
    assert models.what_rows_keep(SimpleNamespace(_aux_cache=None)) is None
    assert models.what_rows_keep(SimpleNamespace()) is None
    kept = models.what_rows_keep(SimpleNamespace(_aux_cache=SimpleNamespace()))
    assert kept == "SGLang keeps SimpleNamespace for each request"


def test_latent_rows_without_rotated_dims_or_in_window_pools_are_refused() -> None:
    latent: Any = object.__new__(compat.MLATokenToKVPool)
    latent.kv_lora_rank = 16
    latent.qk_rope_head_dim = 0
    with pytest.raises(CannotShare, match="our kernels need rotated dims"):
        models.check_pool(latent)
    both: Any = object.__new__(compat.SWAKVPool)
    both.layers_mapping = {0: (0, False), 1: (0, True)}
    both.full_kv_pool = both.swa_kv_pool = latent
    both.start_layer = 0
    both.layer_num = 2
    with pytest.raises(CannotShare, match="windows in a pool of their own"):
        models.check_pool(both)


@pytest.mark.parametrize("of_model", [None, 7, 8])
def test_windows_of_layers_are_those_of_decode_steps(of_model: int | None) -> None:
    """SGLang's FlashInfer and Triton backends read the model's window in decode steps. K-EXAONE and Command A
    name none, Laguna's is larger than its layers'. If blocks shared there, a response would read otherwise."""
    rig = Rig(shifted=0.0, window=8)
    rig.runner.sliding_window_size = of_model
    if of_model == 8:
        models.check_window_of_decode(rig.runner, "--x y")
        return
    message = f"--x y: layer 1 has the window 8, SGLang's decode steps read {of_model} here"
    with pytest.raises(ValueError, match=message):
        models.check_window_of_decode(rig.runner, "--x y")
    PagedCpuBackend(rig.runner, rig.cached_at)


@pytest.mark.parametrize(
    ("window", "drafted", "reads", "message"),
    [
        (8, 0, False, None),
        (0, 4, False, None),
        (8, 4, True, None),
        (8, 4, False, "--x y: SGLang's verification of drafted tokens reads other positions"),
        (4, 4, True, "--x y: --speculative-num-draft-tokens 4 must be below .* of 4 positions"),
    ],
)
def test_drafts_in_windows(window: int, drafted: int, reads: bool, message: str | None) -> None:
    """SGLang's FlashInfer backend reads the first positions of a row there instead of the window's."""
    rig = Rig(shifted=0.0)
    rig.layer.sliding_window_size = window - 1
    rig.runner.spec_algorithm = SimpleNamespace(is_none=lambda: not drafted)
    rig.runner.server_args = SimpleNamespace(speculative_num_draft_tokens=drafted)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        models.check_drafts_in_windows(rig.runner, "--x y", reads_windows=reads)


def fallback(rig: Rig, window: int = -1) -> None:
    """Let the model be one of SGLang's Transformers fallback, by SGLang's function."""
    config = SimpleNamespace(
        num_attention_heads=rig.heads,
        num_key_value_heads=rig.kv_heads,
        hidden_size=rig.heads * DIM,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=window,
    )
    of: Any = dict(config=config, text_config=config, start_layer=0, end_layer=2, quant_config=None)
    of["model"] = torch.nn.Linear(1, 1)
    rig.runner.model = torch.nn.Linear(1, 1)
    held = TransformersBase._create_attention_instances(SimpleNamespace(**of))  # type: ignore[arg-type]
    rig.runner.model.attention_instances = held
    rig.layer = held[1]


@DECODE_AND_EXTEND
@KINDS
@pytest.mark.parametrize("window", [-1, 17])
def test_layers_of_the_transformers_fallback_are_found(
    window: int, kind: str, new: list[int]
) -> None:
    """Its windows are seen. How it rotates keys is not known, so nothing is shared, unless as cached."""
    rig = Rig(shifted=0.0, window=max(window, 0))
    rig.allocator.has_evicted = True  # else SGLang's kernels would run
    fallback(rig, window)
    assert [models.reach_of(each) for each in models.attention_layers(rig.runner)] == [
        0,
        window + 1,
    ]
    with pytest.raises(ValueError, match="corrected: .*Transformers fallback"):
        backend_of(kind, rig)
    rig.check(backend_of(kind, rig, corrected=False), rig.batch(new))
    config = ReasonCacheConfig(policy="streamingllm:budget=64")
    with pytest.raises(ValueError, match="streamingllm:budget=64 does not .*Transformers fallback"):
        attention.attention_backend(rig.runner, config, "triton", None, rig.cached_at)  # type: ignore[arg-type]


@KINDS
def test_layers_that_are_not_found_are_refused(kind: str) -> None:
    rig = Rig(shifted=0.0)
    rig.runner.model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="no attention layers were found"):
        backend_of(kind, rig, corrected=False)


def test_without_a_compiler_the_server_is_told_of_sglangs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", unavailable)
    monkeypatch.setattr(compat, "apply_hooks", lambda _hooks: None)
    with pytest.raises(ValueError, match="no compiler; SGLang's own is .*torch_native"):
        cpu_attention.make(Rig(shifted=0.0).runner)
    assert cpu_attention.default_backend() == "torch_native"


@DECODE_AND_EXTEND
def test_without_the_flag_every_slot_is_read_as_it_was_written(new: list[int]) -> None:
    """SGLang's own allocator knows of no shifted slots, evicted positions or repairs. An error of our kernels
    is not followed by a second call, because there is no sharing that could end first."""
    rig = Rig(shifted=0.0)
    rig.runner.token_to_kv_pool_allocator = TokenToKVPoolAllocator(
        rig.pool.size, dtype=rig.dtype, device="cpu", kvcache=rig.pool, need_sort=False
    )
    backend = backend_of("reasoncache_cpu", rig)
    rig.check(backend, rig.batch(new))
    assert isinstance(backend.paged.slots, StockSlots)
    calls = list[int]()

    def fails(number: int) -> None:
        calls.append(number)
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        backend.paged.slots.owner.once_more(fails, 7)
    assert calls == [7]

# SPDX-License-Identifier: Apache-2.0
"""Our mixin over the SGLang backends whose kernels look up pages: FlashAttention's and TRT-LLM's. SGLang's
classes run as they are, with Triton's interpreter for their own kernels; stand-ins for the compiled attention
kernels read the same page tables, lengths and scales in fp64. Rows that share run through our kernels, which
look up single slots."""

import functools
import inspect
import math
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import trtllm_mha_backend, trtllm_mla_backend
from sglang.srt.runtime_context import get_parallel

from sglang_reasoncache import compat
from sglang_reasoncache.attention.paged_cuda import PLAIN, SHIFTED
from tests.flash_attention import import_backend
from tests.kernels.attention_cases import dense
from tests.triton_runs import long_if, shrink_launches, under_interpreter
from tests.triton_runs import test_interpreted as test_interpreted
from tests.unit.attention_rig import CONTEXT, SHORT, Rig, mark
from tests.unit.test_attention_cuda_graph import CHAIN, Graphs, backend_over, close

flashattention_backend = import_backend()

#: Test case -> SGLang's backend, tokens per page, and arguments for :class:`Rig`.
LATENT: dict[str, Any] = dict(interleaved=True, latent=True)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "trtllm_mha": ("trtllm_mha", 32, {}),
    "trtllm_mla": ("trtllm_mla", 32, LATENT),
    "fa3": ("fa3", 1, {}),
    "fa3 pages": ("fa3", 32, {}),
    "fa3 window": ("fa3", 1, dict(window=17)),
    "fa3 latent": ("fa3", 1, LATENT),
}

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")


class Kernels:
    """Stands in for FlashAttention's and TRT-LLM's kernels: reads pages of a KV pool by tables, in fp64."""

    def __init__(self) -> None:
        #: How many times a kernel ran.
        self.ran = 0
        self.decode = self.prefill = self

    def _rows(
        self,
        q: Any,
        sides: Any,
        tables: Any,
        lengths: Any,
        counts: Any,
        scale: float,
        back: int = -1,
    ) -> Any:
        """``q`` ``[tokens, heads, dim]``, ``sides``: keys and values ``[pages, page, heads, dim]``; request i
        has ``counts[i]`` queries at the end of ``lengths[i]`` positions. ``back``: how many positions before
        its own a query sees; -1: all."""
        self.ran += 1
        found = []
        queries = iter(q.split(counts))
        for table, length in zip(tables, lengths.tolist(), strict=True):
            query = next(queries)
            pages = table[: math.ceil(length / sides[0].shape[1])].long()
            keys, values = (side[pages].flatten(0, 1)[:length].float() for side in sides)
            own = torch.arange(length - len(query), length)[:, None]
            hidden = torch.arange(length) > own
            if back >= 0:
                hidden |= torch.arange(length) < own - back
            found.append(dense(query.float(), keys, values, scale, hidden=hidden)[0])
        return torch.cat(found)

    def flash_attn_with_kvcache(
        self, *, q: Any, k_cache: Any, v_cache: Any, page_table: Any, cache_seqlens: Any,
        cu_seqlens_q: Any, softmax_scale: float, causal: bool, qv: Any = None,
        window_size: tuple[int, int] = (-1, -1), k_descale: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        assert causal and k_descale is None and not named.get("return_softmax_lse")
        if qv is not None:
            q = torch.cat((qv, q), dim=-1)
            k_cache = torch.cat((v_cache, k_cache), dim=-1)
        counts = cu_seqlens_q.diff().tolist()
        arguments = (q, (k_cache, v_cache), page_table, cache_seqlens, counts, softmax_scale)
        return self._rows(*arguments, back=window_size[0]).to(q.dtype)

    def trtllm_batch_decode_with_kv_cache(
        self, *, query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: float,
        bmm2_scale: float, out_dtype: Any, q_len_per_req: int = 1, **named: Any,
    ) -> Any:  # fmt: skip
        assert named["window_left"] == -1 and named["sinks"] is None
        counts = [q_len_per_req] * len(seq_lens)
        sides = [side.transpose(1, 2) for side in kv_cache]
        found = self._rows(query, sides, block_tables, seq_lens, counts, bmm1_scale)
        return (found * bmm2_scale).to(out_dtype)

    def trtllm_batch_context_with_kv_cache(
        self, *, query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, cum_seq_lens_q: Any,
        bmm1_scale: float, bmm2_scale: float, out_dtype: Any, out: Any, **_named: Any,
    ) -> Any:  # fmt: skip
        counts = cum_seq_lens_q.diff().tolist()
        sides = [side.transpose(1, 2) for side in kv_cache]
        found = self._rows(query, sides, block_tables, seq_lens, counts, bmm1_scale) * bmm2_scale
        if out is None:
            return found.to(out_dtype)
        out.copy_(found)
        return out

    def trtllm_batch_decode_with_kv_cache_mla(
        self, *, query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: float,
        kv_lora_rank: int, **_named: Any,
    ) -> Any:  # fmt: skip
        rows = kv_cache.transpose(1, 2)
        sides = rows, rows[..., :kv_lora_rank]
        counts = [query.shape[1]] * len(seq_lens)
        found = self._rows(query.flatten(0, 1), sides, block_tables, seq_lens, counts, bmm1_scale)
        return found.to(torch.float32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    found = Kernels()
    for module in (trtllm_mha_backend, trtllm_mla_backend):
        monkeypatch.setattr(module, "flashinfer", found, raising=False)
        # Its counters are for the device's multiprocessors.
        monkeypatch.setattr(module, "make_persistent_multi_ctas_kv_counter_buffer", _none)
    sgl_kernel: Any = types.ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(sgl_kernel, name, found.flash_attn_with_kvcache)
    sgl_kernel.get_scheduler_metadata = _none
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", sgl_kernel)
    monkeypatch.setattr(
        flashattention_backend, "flash_attn_with_kvcache", found.flash_attn_with_kvcache
    )
    monkeypatch.setattr(flashattention_backend, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(trtllm_mla_backend, "_jit_fixup_module", _none)
    monkeypatch.setattr(trtllm_mla_backend, "can_use_set_mla_kv_concat_q", lambda *_: False)
    monkeypatch.setattr(trtllm_mla_backend, "can_use_set_mla_kv_concat_q_fp8", lambda: False)
    monkeypatch.setattr(
        trtllm_mla_backend,
        "concat_mla_absorb_q_general",
        lambda nope, rope: torch.cat((nope, rope), dim=-1),
    )
    # What FlashInfer's own backends make, below TRT-LLM's, are wrappers that need a GPU.
    for cls in (compat.FlashInferAttnBackend, compat.FlashInferMLAAttnBackend):
        monkeypatch.setattr(cls, "__init__", _parent)
    monkeypatch.setattr(compat.FlashInferMLAAttnBackend, "init_cuda_graph_state", _none)
    with get_parallel().override(attn_dcp_rank=0, attn_tp_rank=0):
        yield found


def _none(*_args: Any, **_named: Any) -> None:
    return None


def _parent(self: Any, model_runner: Any, skip_prefill: bool = False, *_buffers: Any) -> None:
    """Stands in for the constructors of FlashInfer's backends: what TRT-LLM's backends read of them."""
    self.kv_index_translator = model_runner.kv_index_translator
    self.token_to_kv_pool = model_runner.token_to_kv_pool
    self.kv_cache_quant_method = getattr(
        model_runner.token_to_kv_pool, "get_kv_cache_quant_method", _none
    )()
    self.device = model_runner.device
    self.skip_prefill = skip_prefill
    self.max_context_len = model_runner.model_config.context_len
    self.use_sliding_window_kv_pool = False
    self.q_indptr_decode = torch.arange(9, dtype=torch.int32)


def made(case: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any = None) -> Any:
    """Our backend over the SGLang backend of a case, made as when a server starts."""
    name, _, _ = CASES[case]
    runner = rig.runner
    runner.kv_cache_dtype = kv_dtype or rig.dtype
    runner.kv_cache_dtype_str = "auto"
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = name
    runner.max_running_requests = 8
    config = runner.model_config
    config.num_attention_heads = rig.heads
    config.hidden_size = rig.heads * rig.query_dim
    config.is_local_attention_model = False
    config.hf_text_config = SimpleNamespace(num_attention_heads=rig.heads)
    config.v_head_dim = rig.v_dim
    config.qk_rope_head_dim = rig.query_dim - rig.v_dim
    config.qk_nope_head_dim = rig.v_dim
    shrink_launches(monkeypatch)
    backend = backend_over(name, rig, monkeypatch)
    if rig.latent:
        for method in ("forward_decode", "forward_extend"):
            setattr(backend, method, functools.partial(_in_parts, rig, getattr(backend, method)))
    return backend


def _in_parts(
    rig: Rig, run: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **named: Any
) -> Any:
    """Pass queries and keys without their rotated dims, and these beside them, as SGLang's models do."""
    if "q_rope" in named:
        return run(q, k, v, layer, batch, *args, **named)
    rank = rig.v_dim
    q = q.view(len(q), rig.heads, -1)
    parts = dict(q_rope=q[..., rank:], k_rope=k[..., rank:])
    return run(q[..., :rank], k[..., :rank], v, layer, batch, *args, **parts, **named)


def rig_of(case: str, lengths: list[int] = SHORT, **named: Any) -> Rig:
    _, page, shape = CASES[case]
    return Rig(shifted=0.4, lengths=lengths, heads=2, kv_heads=1, page=page, **shape, **named)


@under_interpreter
@pytest.mark.parametrize("case", long_if(CASES, "fa3", "fa3 latent"))
def test_rows_that_share_are_read_by_slot_all_others_by_page(
    case: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of graphs and in both decode graphs, whose metadata some backends write in the graph. Rows whose
    positions name any slots, cached at any position, are read right by our kernels only."""
    for scattered in (True, False):
        rig = rig_of(case)
        if scattered:
            rig.scatter()
        else:
            rig.settle()
        backend = made(case, rig, monkeypatch)
        assert backend.paged.reads_shared
        graphs = Graphs(rig, backend)
        # Prefills of latent attention are expanded in SGLang's kernels, absorbed in ours.
        prefills = [] if rig.latent else [[1, 3, 30]]
        for shared in (True, False):
            runs = [
                (backend, [1, 1, 1]),
                (graphs, [1, 1, 1]),
                *((backend, new) for new in prefills),
            ]
            for runner, new in runs:
                batch = rig.batch(new)
                mark(batch, shared)
                before = kernels.ran
                found = rig.forward(runner, batch)
                assert (kernels.ran > before) != shared
                assert close(rig, found, batch) == (shared or not scattered), (new, shared)
        assert graphs.replayed[-2:] == [SHIFTED, PLAIN]


@under_interpreter
@pytest.mark.parametrize("case", ["trtllm_mha", "trtllm_mla", "fa3"])
def test_chains_of_drafted_tokens_are_verified_over_shared_slots(
    case: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that takes no mask does not have SGLang fill one: a chain is read as a chain."""
    rig = rig_of(case, lengths=[5, 19, 70])
    backend = made(case, rig, monkeypatch)
    rig.scatter()
    batch = rig.verification(CHAIN, topk=1)
    mark(batch, True)
    before = kernels.ran
    found = rig.forward(backend, batch)
    assert kernels.ran == before
    assert close(rig, found, batch)


@under_interpreter
def test_queries_and_keys_that_the_model_has_not_rotated(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an fp8 KV cache, SGLang's models leave the rotation of latent attention to the backend. Ours calls
    SGLang's function for it, caches the same bytes as SGLang's backend, and attends with the same queries."""
    name = "trtllm_mla"
    results = {}
    for shared in (False, True):
        rig = rig_of(name, dtype=torch.bfloat16)
        rig.settle()
        rig.pool.dtype = torch.float8_e4m3fn
        rig.pool.kv_buffer = [side.to(torch.float8_e4m3fn) for side in rig.pool.kv_buffer]
        rig.pool.store_dtype = torch.float8_e4m3fn
        backend = made(name, rig, monkeypatch, kv_dtype=torch.float8_e4m3fn)
        for module, attribute in (
            (trtllm_mla_backend, "mla_quantize_and_rope_for_fp8"),
            (compat, "mla_quantize_and_rope_for_fp8"),
        ):
            monkeypatch.setattr(module, attribute, _turned, raising=False)
        batch = rig.batch([1, 1, 1])
        mark(batch, shared)
        backend.kv_index_translator.bind_runner_slots(batch)
        backend.init_forward_metadata(batch)
        generator = torch.Generator().manual_seed(3)
        q, k = (
            torch.randn(3, heads, rig.query_dim, generator=generator).bfloat16() for heads in (2, 1)
        )
        rank = rig.v_dim
        before = kernels.ran
        found = backend.forward_decode(
            q[..., :rank], k[..., :rank], k[..., :rank], rig.layer, batch,
            q_rope=q[..., rank:], k_rope=k[..., rank:], is_neox=False,
            cos_sin_cache=torch.full((CONTEXT, rig.query_dim - rank), 0.5),
            llama_4_scaling=torch.full((3, 1, 1), 1.5),
        )  # fmt: skip
        assert (kernels.ran > before) != shared
        keys = rig.pool.kv_buffer[1][batch.out_cache_loc]
        results[shared] = found.float(), keys.view(torch.uint8)
    assert torch.equal(results[False][1], results[True][1])
    torch.testing.assert_close(results[False][0], results[True][0], rtol=0, atol=3e-2)


def _turned(
    q: Any, q_rope: Any, k: Any, k_rope: Any, positions: Any, table: Any, is_neox: bool, *dims: int
) -> Any:
    """Stands in for FlashInfer's kernel that rotates and rounds: any function of position and table will do."""
    assert dims == (q.shape[-1], q_rope.shape[-1]) and is_neox is False and k.dim() == 2
    by = table[positions].bfloat16() * (1 + positions[:, None] % 3)
    fp8 = torch.float8_e4m3fn
    whole = torch.cat((q, q_rope * by[:, None]), dim=-1)
    return whole.to(fp8), k.to(fp8), (k_rope * by).to(fp8)


def test_stand_ins_are_for_what_sglang_calls() -> None:
    """The names that the stand-ins replace are those of the installed SGLang."""
    mha = ("trtllm_batch_decode_with_kv_cache(", "trtllm_batch_context_with_kv_cache(")
    mla = ("trtllm_batch_decode_with_kv_cache_mla(", "mla_quantize_and_rope_for_fp8(")
    for module, names in ((trtllm_mha_backend, mha), (trtllm_mla_backend, mla)):
        text = inspect.getsource(module)
        assert all(name in text for name in names)

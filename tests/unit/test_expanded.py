# SPDX-License-Identifier: Apache-2.0
"""SGLang's own prefills of latent attention, which expand the rows that they fetch, over shifted slots. Here
SGLang's functions list, fetch and expand, and are compared with attention in fp64. Triton's interpreter runs
the kernels that list slots."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import (
    DeepseekMHAForwardMixin,
)
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from sglang_reasoncache import compat
from sglang_reasoncache.attention import absorbed, expanded
from sglang_reasoncache.kernels import turn_triton
from sglang_reasoncache.kernels.paged import turned
from sglang_reasoncache.kernels.rotation import KeyRotation
from tests.triton_runs import test_interpreted as test_interpreted
from tests.triton_runs import under_interpreter
from tests.unit.attention_rig import RANK, ROTATED, TOLERANCE, Rig, mark
from tests.unit.test_attention import Stock, backend_of

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")

HEADS = 4
PLAIN = 8
V_DIM = 16
#: Lengths of rows, and how many of the last tokens of each are prefilled.
LENGTHS = [90, 17, 60]
PREFILL = [3, 1, 5]
#: Tokens that SGLang fetches at once: several chunks for the longest row.
CAPACITY = 90


class Layer:
    """An MLA layer of SGLang without its projections, except the one that expands latent rows."""

    def __init__(self, rig: Rig) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.to_keys = torch.randn(HEADS, PLAIN, RANK, generator=drawn) / RANK**0.5
        self.to_values = torch.randn(HEADS, V_DIM, RANK, generator=drawn) / RANK**0.5
        self.rig = rig
        module: Any = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
        torch.nn.Module.__init__(module)
        module.num_local_heads = HEADS
        module.qk_nope_head_dim = PLAIN
        module.qk_rope_head_dim = ROTATED
        module.v_head_dim = V_DIM
        module.kv_lora_rank = RANK
        weight = torch.cat((self.to_keys, self.to_values), dim=1).flatten(0, 1)
        object.__setattr__(module, "kv_b_proj", lambda rows: (rows @ weight.T,))
        object.__setattr__(module, "attn_mha", self)
        self.module = module

    #: SGLang asks its layer for the number.
    layer_id = 1

    def absorbed(self, plain: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """Queries of the absorbed form."""
        return torch.cat((torch.einsum("thd,hdr->thr", plain, self.to_keys), rotated), dim=2)

    def __call__(self, q: Any, k: Any, v: Any, batch: Any, **_: Any) -> Any:
        """Attention to a chunk of each request's prefix, as a ragged kernel computes it."""
        bounds = batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx].tolist()
        out = torch.zeros(len(q), HEADS, V_DIM)
        lse = torch.full((len(q), HEADS), float("-inf"))
        at = 0
        for number, count in enumerate(batch.extend_seq_lens_cpu):
            begin, end = bounds[number : number + 2]
            tokens = slice(at, at + count)
            if end > begin:
                out[tokens], lse[tokens] = dense(q[tokens], k[begin:end], v[begin:end], self.scale)
            at += count
        return out, lse

    @property
    def scale(self) -> float:
        return self.rig.scale


def dense(q: Any, k: Any, v: Any, scale: float, hidden: Any = None) -> tuple[Any, Any]:
    logits = torch.einsum("qhd,khd->qhk", q, k) * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None], float("-inf"))
    return torch.einsum("qhk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.fixture
def rig() -> Rig:
    sizes: Any = dict(lengths=LENGTHS, heads=HEADS, kv_heads=1)
    return Rig(shifted=0.4, interleaved=True, latent=True, **sizes)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our hook, as SGLang applies it."""
    stock = DeepseekMHAForwardMixin._get_mla_kv_buffer

    def fetch(module: Any, slots: Any, dtype: Any, batch: Any) -> Any:
        found = stock(module, slots, dtype, batch)
        return expanded._after_fetch(found, module, slots, dtype, batch) or found

    monkeypatch.setattr(DeepseekMHAForwardMixin, "_get_mla_kv_buffer", fetch)


@pytest.fixture
def prefill(rig: Rig) -> Iterator[Any]:
    """A prefill over shifted slots that began with our backend, which is the one of the forward."""
    backend = backend_of("cuda", rig)
    backend.paged.expands = True
    backend.token_to_kv_pool = rig.pool
    backend.req_to_token_pool = rig.rows
    backend.kv_index_translator = None
    batch = rig.batch(PREFILL)
    mark(batch, True)
    backend.init_forward_metadata(batch)
    assert backend.paged.extend_plan is not None
    context: Any = ForwardContext(attn_backend=backend)
    with forward_context(context):
        yield SimpleNamespace(backend=backend, batch=batch, layer=Layer(rig), rig=rig)


def queries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(7)
    plain = torch.randn(count, HEADS, PLAIN, generator=drawn)
    return plain, torch.randn(count, HEADS, ROTATED, generator=drawn)


def expected(prefill: Any, plain: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    prefill.rig.query = prefill.layer.absorbed(plain, rotated)
    latent = prefill.rig.expected(prefill.batch).float()
    return torch.einsum("thr,hdr->thd", latent, prefill.layer.to_values)


def expand(prefill: Any, latent: Any, rotated: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of heads, as SGLang's layers make them of what they fetch."""
    keys, values = (
        prefill.layer.module.kv_b_proj(latent)[0]
        .view(-1, HEADS, PLAIN + V_DIM)
        .split((PLAIN, V_DIM), dim=2)
    )
    return torch.cat((keys, rotated.expand(-1, HEADS, -1)), dim=2), values


@under_interpreter
@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("packed", [False, True], ids=["chunk by chunk", "all chunks at once"])
def test_chunks_of_prefixes_are_read_where_they_are_used(
    prefill: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prefill.batch
    own = SimpleNamespace(reads_are_translated=False, translate_dcp_read_ids=lambda ids: ids)
    prefill.backend.kv_index_translator = own
    if packed:
        prefill.backend.pack_all_prefix_chunks = True
        prefill.backend.pack_prefix_chunk_kv = lambda keys, rotated, values: (
            torch.cat((keys, rotated.expand(-1, HEADS, -1)), dim=2),
            values,
        )
    with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(CAPACITY):
        batch.prepare_chunked_prefix_cache_info("cpu", pack_all_prefix_chunks=packed)
        assert batch.num_prefix_chunks > 2
        if packed:
            forms = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"
            monkeypatch.setattr(f"{forms}.use_packed_prefix_chunks", lambda *_: True)
            monkeypatch.setattr(torch, "bfloat16", torch.float32)
        plain, rotated = queries(sum(PREFILL))
        q = torch.cat((plain, rotated), dim=2)
        out, lse = own_tokens(prefill, q)
        found = prefill.layer.module._chunked_prefix_attn_mha(
            q=q, accum_output=out, accum_lse=lse, forward_batch=batch
        )
    wanted = expected(prefill, plain, rotated)
    torch.testing.assert_close(found, wanted, rtol=0, atol=10 * TOLERANCE[torch.float32])


def own_tokens(prefill: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a prefill's tokens to one another: their keys are where they are read."""
    values, keys = prefill.rig.pool.get_key_buffer(1)[prefill.batch.out_cache_loc].split(
        (RANK, ROTATED), dim=2
    )
    k, v = expand(prefill, values.squeeze(1), keys)
    parts = []
    at = 0
    for count in PREFILL:
        tokens = slice(at, at + count)
        hidden = torch.ones(count, count).triu(1).bool()
        parts.append(dense(q[tokens], k[tokens], v[tokens], prefill.layer.scale, hidden))
        at += count
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@under_interpreter
@pytest.mark.usefixtures("hooked")
def test_whole_rows_are_read_where_they_are_used(prefill: Any) -> None:
    batch = prefill.batch
    slots = batch.fetch_mha_one_shot_kv_indices()
    k, v = expand(prefill, *prefill.layer.module._get_mla_kv_buffer(slots, torch.float32, batch))
    plain, rotated = queries(sum(PREFILL))
    q = torch.cat((plain, rotated), dim=2)
    found = []
    at = 0
    begin = 0
    for count, length in zip(PREFILL, prefill.rig.lengths, strict=True):
        positions = torch.arange(length)
        hidden = positions > torch.arange(length - count, length)[:, None]
        rows = slice(begin, begin + length)
        found.append(dense(q[at : at + count], k[rows], v[rows], prefill.layer.scale, hidden)[0])
        at += count
        begin += length
    wanted = expected(prefill, plain, rotated)
    torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=10 * TOLERANCE[torch.float32])


@under_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("neox", [True, False])
def test_the_kernel_rotates_as_pytorch_does(dtype: torch.dtype, neox: bool) -> None:
    drawn = torch.Generator().manual_seed(11)
    count = 200
    table = torch.randn(500, ROTATED, generator=drawn)
    table[0, : ROTATED // 2] = 1.0
    rotation = KeyRotation(table, ROTATED, neox)
    wide = torch.randn(count, 1, RANK + ROTATED, generator=drawn).to(dtype)
    keys = wide[..., RANK:]
    shift = torch.randint(-499, 500, (count,), generator=drawn, dtype=torch.int32)
    shift[::3] = 0
    keys[::3][:2] = float("inf")
    found = turn_triton.turn(keys, shift, rotation)
    wanted = turned(keys.float(), shift, rotation).to(dtype)
    assert torch.equal(found[::3], keys[::3])
    # The interpreter cuts what a GPU rounds to bf16.
    close = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    assert not turn_triton.turn(keys, torch.full_like(shift, 500), rotation).any()
    assert turn_triton.turn(keys[:0], shift[:0], rotation).shape == (0, 1, ROTATED)


def test_lists_that_are_not_known_are_refused(prefill: Any) -> None:
    """Their keys would be read where they were cached."""
    with pytest.raises(RuntimeError, match="no list"):
        prefill.backend.paged.rotate_fetched(
            torch.zeros(3, 1, ROTATED), 1, torch.arange(3), prefill.batch
        )


def test_what_is_expanded_runs_in_sglangs_kernels(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same forward, a layer over latent rows runs in ours."""
    ran: list[str] = []
    monkeypatch.setattr(Stock, "init_forward_metadata", lambda *_: ran.append("planned"))
    monkeypatch.setattr(Stock, "forward_extend", lambda *_, **__: ran.append("attended"))
    backend = backend_of("cuda", rig)
    backend.paged.expands = True
    batch = rig.batch(PREFILL)
    mark(batch, True)
    rig.check(backend, batch)
    assert ran == ["planned"]
    heads = RadixAttention(HEADS, PLAIN + ROTATED, 1.0, HEADS, layer_id=1, v_head_dim=V_DIM)
    backend.forward_extend(torch.zeros(1, 1), None, None, heads, batch, save_kv_cache=False)
    assert ran == ["planned", "attended"]


def test_the_form_of_prefills_over_shifted_slots(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are expanded however short the prefix is, unless few tokens are new or the pool rounds. SGLang's
    threshold stays for other prefills."""
    forms = compat.AttnForwardMethod

    def stock(attention: Any, batch: Any) -> Any:
        long = sum(batch.extend_prefix_lens_cpu) >= attention.chunked_prefix_cache_threshold
        extends = batch.forward_mode == ForwardMode.EXTEND
        return forms.MHA_CHUNKED_KV if long and extends else forms.MLA

    handlers = {"fa3": stock, "triton": lambda *_: forms.MHA}
    monkeypatch.setattr(compat.AttentionBackendRegistry, "_handlers", handlers)
    for name in handlers:
        absorbed.where_ours(name)
    asks: Any = SimpleNamespace(chunked_prefix_cache_threshold=10**6)
    backend = backend_of("cuda", rig)
    context: Any = ForwardContext(attn_backend=backend)
    with forward_context(context):
        for expands, shifted, name, fewest, rounds, form in (
            (True, True, "fa3", max(PREFILL), False, forms.MHA_CHUNKED_KV),
            (True, True, "fa3", max(PREFILL) + 1, False, forms.MLA),
            (True, True, "fa3", 1, True, forms.MLA),
            (True, False, "fa3", 1, False, forms.MLA),
            (False, True, "fa3", 1, False, forms.MLA),
            (True, True, "triton", 1, False, forms.MLA),
            (True, False, "triton", 1, False, forms.MHA),
        ):
            monkeypatch.setattr(expanded, "FEWEST_NEW", fewest)
            backend.paged.rounds = rounds
            backend.paged.expands = expands
            batch = rig.batch(PREFILL)
            mark(batch, shifted)
            backend.init_forward_metadata(batch)
            handler = compat.AttentionBackendRegistry.get_handler(name)
            assert handler(asks, batch) is form
            assert asks.chunked_prefix_cache_threshold == 10**6


@pytest.mark.parametrize(
    ("name", "flags", "expands"),
    [
        ("fa3", {}, True),
        ("trtllm_mla", {}, True),
        ("triton", {}, False),
        ("fa3", {"flashinfer_mla_disable_ragged": True}, True),
        ("flashinfer", {"flashinfer_mla_disable_ragged": True}, False),
        ("fa3", {"disable_chunked_prefix_cache": True}, False),
    ],
)
def test_what_sglang_can_expand(rig: Rig, name: str, flags: dict[str, bool], expands: bool) -> None:
    owner: Any = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
    torch.nn.Module.__init__(owner)
    owner.attn_mqa = rig.layer
    vars(owner).update(
        {"disable_chunked_prefix_cache": False, "flashinfer_mla_disable_ragged": False, **flags}
    )
    rig.runner.model = torch.nn.ModuleList([owner])
    assert absorbed.can_expand(rig.runner, name) == expands
    rig.runner.model.append(torch.nn.ModuleList([rig.layer]))
    assert not absorbed.can_expand(rig.runner, name)

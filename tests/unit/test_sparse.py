# SPDX-License-Identifier: Apache-2.0
"""Tests a model with DeepSeek sparse attention, over SGLang's pool for it: nothing is shared, and the KV and
index keys of a retracted request come back from host memory."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_parallel

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import SharedPagedAllocator
from sglang_reasoncache.cache.swap import swapped_of
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.plugin import hooks
from sglang_reasoncache.plugin.server import ServerParts
from tests.property.world import LAYERS, Setup, World
from tests.unit.test_swap import admitted, overwrite, what_is_read

pytestmark = pytest.mark.usefixtures("published_config")

#: SGLang's kernels for index keys read pages of this size.
PAGE = 64
INDEX_DIM = 128
SLOTS = 8 * PAGE


@pytest.fixture(autouse=True)
def _one_rank_without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This pool asks for its rank, and waits for a GPU, when it copies."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with get_parallel().override(
        attn_dcp_rank=0, attn_tp_size=1, attn_dp_size=1, attn_dp_rank=0, dp_rank=None
    ):
        yield


def sparse_pool(slots: int = SLOTS, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    return DSATokenToKVPool(
        size=slots, page_size=PAGE, kv_lora_rank=16, dtype=dtype, qk_rope_head_dim=16, layer_num=LAYERS,
        device="cpu", index_head_dim=INDEX_DIM, enable_memory_saver=False, kv_cache_dim=32, **others,
    )  # fmt: skip


class SparseWorld(World):
    """A world whose slots have a latent row and an index key with its scale."""

    def make_pool(self) -> Any:
        return sparse_pool(self.setup.slots)

    def make_rows(self) -> Any:
        return ReqToTokenPool(self.max_rows, SLOTS, self.device, False)

    def buffers(self, layer: int) -> list[tuple[torch.Tensor, int]]:
        return [(self.pool.kv_buffer[layer], 1)]

    def index_keys(self, layer: int) -> list[np.ndarray]:
        """Index keys and their scales, uint8 ``[pages, 64, bytes]``: a page has its keys, then the scales."""
        pages: torch.Tensor = self.pool.index_key_cache.buffer[layer]
        parts = pages.tensor_split([PAGE * INDEX_DIM], dim=1)
        return [part.unflatten(1, (PAGE, -1)).numpy() for part in parts]

    def write(self, slots: np.ndarray, contents: Any) -> None:
        super().write(slots, contents)
        slots = np.asarray(slots)
        for layer in range(LAYERS):
            for part, bytes_of_part in enumerate(self.index_keys(layer)):
                bytes_of_part[slots // PAGE, slots % PAGE] = byte_of(contents, layer, part)[:, None]

    def contents(self) -> np.ndarray:
        contents = super().contents()
        for layer in range(LAYERS):
            for part, bytes_of_part in enumerate(self.index_keys(layer)):
                there = byte_of(contents, layer, part).reshape(-1, PAGE, 1)
                assert (bytes_of_part == there[: len(bytes_of_part)]).all(), "keys of other tokens"
        return contents


def byte_of(contents: Any, layer: int, part: int) -> np.ndarray:
    """A byte for each of ``contents``, another one in each layer and part of an index key."""
    return ((np.asarray(contents) * 3 + layer + 2 * part) % 251).astype(np.uint8)


def started(prompt: int, output: int) -> tuple[SparseWorld, Req]:
    world = SparseWorld(Setup(page=PAGE, block=8, slots=SLOTS, when="short", swap=1 << 24))
    req = world.request("r", range(1000, 1000 + prompt))
    world.prefill(req)
    req.output_ids.append(1)
    for token in range(output):
        world.step(req, 10 + token)
    return world, req


@pytest.mark.parametrize("evicted", [False, True], ids=["prefix-cached", "prefix-evicted"])
@pytest.mark.parametrize(("prompt", "output"), [(70, 60), (10, 140), (64, 64), (130, 20)])
def test_index_keys_come_back_with_their_kv(prompt: int, output: int, evicted: bool) -> None:
    """All but the last page, whatever of it is still in the prefix cache."""
    world, req = started(prompt, output)
    contents, _ = what_is_read(world, req)
    world.retract(req)
    swapped = swapped_of(req)
    assert swapped is not None and swapped.length == (prompt + output) // PAGE * PAGE
    world.write(np.arange(PAGE), [-1] * PAGE)
    if evicted:
        overwrite(world)
    assert admitted(world, req) == prompt + output + 1 - swapped.length
    again, _ = what_is_read(world, req)
    assert (again[: swapped.length] == contents[: swapped.length]).all()
    world.finish(req)
    world.assert_empty()


def test_a_copy_takes_the_memory_that_was_foreseen() -> None:
    """SGLang copies index keys by the page: a copy of one slot would have a whole page of them."""
    world, req = started(70, 60)
    world.retract(req)
    swapped = swapped_of(req)
    swap: Any = world.allocator.swap
    assert swapped is not None
    assert swapped.num_bytes == swapped.length // PAGE * swap._sizes["page"] == swap.num_bytes


def stock_allocator(**others: Any) -> Any:
    return PagedTokenToKVPoolAllocator(
        SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", need_sort=False,
        kvcache=sparse_pool(dtype=torch.bfloat16, **others),
    )  # fmt: skip


def context_of(allocator: Any) -> Any:
    """What SGLang makes the prefix cache from."""
    args = compat.get_server_args()
    rows = ReqToTokenPool(4, 512, "cpu", False)
    params = CacheInitParams(False, rows, allocator, PAGE)
    model = SimpleNamespace(modules=list, named_modules=list)
    runner = SimpleNamespace(
        model=model, forward_stream=None, token_to_kv_pool=allocator.get_kvcache(), server_args=args,
        prefill_attention_backend_str="dsa", decode_attention_backend_str="dsa", is_draft_worker=False,
    )  # fmt: skip
    return TreeCacheBuildContext(
        server_args=args, params=params, is_hybrid_swa=False, is_hybrid_ssm=False, is_dsa=True,
        enable_hierarchical_cache=False, disable_radix_cache=False, model_config=None,
        tp_worker=SimpleNamespace(model_runner=runner, tokenizer=None),
        tp_size=1, tp_rank=0, tp_group=None,
    )  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
def test_the_server_copies_retracted_requests_and_shares_nothing(
    debug: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if debug:
        # Refused where pages are shared.
        monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    parts = ServerParts(ReasonCacheConfig(), stock_allocator())
    assert type(parts.allocator) is SharedPagedAllocator
    draft = SimpleNamespace(token_to_kv_pool=sparse_pool(), is_draft_worker=True)
    served = SimpleNamespace(is_draft_worker=False)
    monkeypatch.setattr(hooks, "_server", parts)
    for runner in (served, draft, draft):
        assert hooks._make_attention("dsa", lambda given: given, runner) is runner
    parts.tree(context_of(parts.allocator))
    controller: Any = parts.controller
    swap = parts.allocator.swap
    assert swap is not None and len(swap._draft_pools) == 1
    said = controller.describe()
    assert "sparse attention" in said["uncorrected"] and said["disabled"] is None
    assert not controller.report.config.shares and controller.learns
    assert "nothing is shared, because: --enable-reasoncache does not support sparse" in caplog.text


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"host_swap_gb": 0}, {}),
        ({"percentile": 0}, {}),
        ({"positions": "corrected"}, {}),
        ({}, {"enable_hierarchical_cache": True}),
        ({}, {"disaggregation_mode": "decode"}),
    ],
)
def test_where_nothing_can_be_copied_sglangs_own_parts_stay(
    settings: dict[str, Any], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(enable_hierarchical_cache=False, disaggregation_mode="null")
    vars(args).update(fields)
    monkeypatch.setattr("sglang_reasoncache.compat.get_server_args", lambda: args, raising=False)
    with pytest.raises(CannotShare, match="sparse attention"):
        ServerParts(ReasonCacheConfig(**settings), stock_allocator())


def test_tails_of_compressed_index_keys_are_not_copied() -> None:
    """They belong to a request, not to its slots."""
    more: Any = dict(index_kpool=1, index_kpool_compress=True)
    stock = stock_allocator(**more)
    stock.get_kvcache().kpool_use_compress = True
    with pytest.raises(CannotShare, match="sparse attention"):
        ServerParts(ReasonCacheConfig(), stock)

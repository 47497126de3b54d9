# SPDX-License-Identifier: Apache-2.0
"""Tests what runs where KV cannot be shared, over SGLang's pool for DeepSeek sparse attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_reasoncache.cache.owner import NOTHING_PROMISED
from sglang_reasoncache.compat.carriers import SWAPPED
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.plugin import disaggregation, hooks, server
from sglang_reasoncache.plugin.server import ServerParts
from sglang_reasoncache.plugin.unshared import Unshared

pytestmark = pytest.mark.usefixtures("published_config")

SLOTS = 640
PAGE = 64


def allocator() -> PagedTokenToKVPoolAllocator:
    pool = DSATokenToKVPool(
        size=SLOTS, page_size=PAGE, kv_lora_rank=16, dtype=torch.bfloat16, qk_rope_head_dim=16,
        layer_num=1, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=32,
    )  # fmt: skip
    return PagedTokenToKVPoolAllocator(
        SLOTS, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=pool, need_sort=False
    )


class _Tree:
    """A prefix cache with nothing in it."""

    evictable_size = staticmethod(lambda: 0)
    supports_mamba = staticmethod(lambda: False)
    req_to_token_pool = SimpleNamespace(size=8, available_size=lambda: 6)


TREE: Any = _Tree()


class _Beam(SimpleNamespace):
    """A request with beams."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def request(tokens: int, copied: int = 0) -> Any:
    made = SimpleNamespace(
        beam_group=None,
        origin_input_ids=[0] * tokens,
        output_ids=[],
        kv=SimpleNamespace(),
    )
    if copied:
        setattr(made, SWAPPED, SimpleNamespace(length=copied, is_valid=True))
    return made


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_server", None)
    monkeypatch.setattr(hooks, "_unshared", None)


def build(monkeypatch: pytest.MonkeyPatch, stock: Any, **settings: Any) -> None:
    """Let SGLang build the allocator ``stock`` in a server with the plugin, which keeps nothing on the host."""
    args = SimpleNamespace(_reasoncache_config=ReasonCacheConfig(**{"host_swap_gb": 0, **settings}))
    args.disaggregation_mode = "null"
    args.max_queued_requests = None
    args.enable_hierarchical_cache = False
    monkeypatch.setattr("sglang_reasoncache.config.config_of", lambda _: args._reasoncache_config)
    monkeypatch.setattr("sglang_reasoncache.compat.get_server_args", lambda: args, raising=False)
    monkeypatch.setattr("sglang_reasoncache.plugin.server.dp_rank", lambda: 3)
    assert hooks._after_build_allocator(stock, SimpleNamespace(is_draft_worker=False)) is None


def test_a_sparse_model_starts_unless_a_policy_is_to_evict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock = allocator()
    with pytest.raises(CannotShare, match="sparse attention"):
        ServerParts(ReasonCacheConfig(host_swap_gb=0), stock)
    build(monkeypatch, stock)
    assert hooks._server is None and hooks._unshared is not None
    assert "nothing is shared, only admission learns" in caplog.text
    told = hooks._unshared.describe(details=True)
    assert "sparse attention" in told["uncorrected"] and told["dp_rank"] == 3
    assert type(stock) is PagedTokenToKVPoolAllocator
    for asked in (dict(policy="rkv:budget=1024"), dict(positions="corrected")):
        with pytest.raises(CannotShare):
            build(monkeypatch, allocator(), **asked)
        assert hooks._unshared is None


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_a_model_without_attention_over_everything_starts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has state layers only, as Mamba, or only layers with a sliding window."""
    same: Any = dict(size=SLOTS, page_size=1, head_num=1, head_dim=4, dtype=torch.bfloat16)
    where: Any = dict(device="cpu", need_sort=False)
    make: Any = TokenToKVPoolAllocator
    if kind == "states":
        none: Any = dict(full_attention_layer_ids=[], mamba_pool=None)
        pool: Any = HybridLinearKVPool(**same, **none, device="cpu")
        stock = make(SLOTS, dtype=torch.bfloat16, kvcache=pool, **where)
    else:
        none = dict(full_attention_layer_ids=[], swa_attention_layer_ids=[0], size_swa=SLOTS)
        pool = SWAKVPool(**{**same, "size": 0}, **none, device="cpu")
        make = PureSWATokenToKVPoolAllocator
        stock = make(SLOTS, page_size=1, dtype=torch.bfloat16, kvcache=pool, **where)
    build(monkeypatch, stock)
    assert hooks._server is None and hooks._unshared is not None
    assert "no attention layer without a window" in hooks._unshared.describe()["uncorrected"]
    assert type(stock) is make
    stock.create_prefill_budget(TREE)


def reserved(stock: Any) -> float:
    """How many slots a prefill budget reserves for two running requests of which SGLang reserves 300 each."""
    budget = stock.create_prefill_budget(TREE, num_mixed_decode_tokens=0)
    budget.total_offset += 600
    return float(budget.remaining_current - budget.remaining_total)


def test_admission_learns_from_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each retraction raises the reserve, and each step while a request waits lowers it, by SGLang's hooks."""
    stock = allocator()
    assert reserved(stock) == 600
    build(monkeypatch, stock)
    assert reserved(stock) == 2 * 64
    budget = stock.create_prefill_budget(TREE)
    check = dict(total_tokens=SLOTS + 1, max_new_tokens=0, input_tokens=SLOTS)
    more: Any = dict(swa_host_hit_length=0, chunk_limit=None)
    assert budget.check_prefill(extend_input_len=SLOTS, **check, **more) == (False, None)
    batch = SimpleNamespace(reqs=[None] * 4, decoding_reqs=None)
    step = hooks._contained(hooks._after_decode, hooks._after_decode_unshared)
    for _ in range(10):
        step(None, None, batch, SimpleNamespace(accept_lens=None))
    lower = reserved(stock)
    assert lower < 2 * 64
    step(None, None, batch, SimpleNamespace(accept_lens=torch.tensor([3, 3, 3, 3])))
    assert reserved(stock) / lower == pytest.approx((lower / 128) ** (12 / 40))
    retract = hooks._contained(None, hooks._after_retracted)
    lower = reserved(stock)
    retract(([request(300, copied=300)], 0.5, []), None)
    slightly = reserved(stock)
    retract(([request(300)], 0.5, []), None)
    assert lower < slightly < reserved(stock) / 1.4
    assert hooks._unshared is not None
    line = hooks._contained(hooks._after_decode_log_parts, hooks._after_decode_log_parts)
    assert line(["a"], None)[1].startswith("#reserved per request: ")
    assert hooks._contained(hooks._after_count_uncached)(None, None) is None
    higher = reserved(stock)
    riders = hooks._contained(hooks._after_prefill, hooks._after_prefill_unshared)
    riders(None, None, SimpleNamespace(decoding_reqs=[None] * 100))
    lower = reserved(stock)
    retract(([], 0.5, [request(300)]), None)
    assert lower < higher < reserved(stock)


def test_settings_that_share_nothing_learn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = allocator()
    build(monkeypatch, stock, percentile=0)
    assert type(stock.create_prefill_budget(TREE)) is PrefillBudget
    assert hooks._unshared is not None and hooks._unshared.promise().kept == 1.0


def test_a_failure_leaves_admission_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = allocator()
    build(monkeypatch, stock)
    mine = hooks._unshared
    assert mine is not None
    monkeypatch.setattr(mine, "promise", lambda: 1 / 0)
    made = stock.create_prefill_budget(TREE)
    assert type(made) is PrefillBudget and mine.disabled == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    assert type(stock.create_prefill_budget(TREE)) is PrefillBudget
    assert mine.promise().kept == 1.0 and mine.describe()["disabled"]


def test_budgets_that_count_otherwise_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pools that share memory, or with windows only."""

    class Other(PrefillBudget):
        pass

    stock: Any = allocator()
    monkeypatch.setattr(
        stock, "create_prefill_budget", lambda tree, **mixed: Other(stock, tree, **mixed)
    )
    Unshared(ReasonCacheConfig(), stock, "it is so")
    assert type(stock.create_prefill_budget(TREE)) is Other


def test_a_decode_server_admits_by_it() -> None:
    """On the decode server of a PD pair SGLang's own allocator saves nothing."""
    queue: Any = SimpleNamespace(token_to_kv_pool_allocator=allocator())
    assert disaggregation._without_saved(queue, 5) == 5


def test_while_beams_run_admission_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = TokenToKVPoolAllocator(
        64, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )
    unshared = Unshared(ReasonCacheConfig(host_swap_gb=0), stock, "the test's reason")
    ended: list[bool] = []
    beam = _Beam(
        beam_group=object(), finished=lambda: bool(ended), kv=SimpleNamespace(holds_kv=True)
    )
    monkeypatch.setattr(hooks, "_unshared", unshared)
    hooks._contained(hooks._after_prefill_ready, hooks._after_prefill_ready_unshared)(
        None, SimpleNamespace(reqs=[request(8), beam])
    )
    assert unshared.promise() is NOTHING_PROMISED
    ended.append(True)
    assert unshared.promise().ahead > 0


@pytest.mark.parametrize(
    ("limit", "mode", "credit"), [(None, "null", 1.0), (4, "null", 0.0), (4, "decode", 1.0)]
)
def test_where_a_full_queue_ends_retracted_requests_admission_is_sglangs(
    limit: int | None, mode: str, credit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends a retracted request that finds the queue full, in the middle of its response."""
    args = SimpleNamespace(max_queued_requests=limit, disaggregation_mode=mode)
    monkeypatch.setattr("sglang_reasoncache.compat.get_server_args", lambda: args, raising=False)
    assert server.for_limited_queue(ReasonCacheConfig()).admission_credit == credit

# SPDX-License-Identifier: Apache-2.0
"""Tests with SGLang's own fuzz test that our prefix tree acts as SGLang's tree while no slots are shared."""

from typing import Any

import pytest
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures, insert_walk
from sglang.test.kits.unified_radix_cache.config import CacheConfig

from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.tree import SharedRadixCache

FULL = ComponentType.FULL
STATES = ComponentType.MAMBA
WINDOWS = ComponentType.SWA
CONFIGS = [
    CacheConfig(),
    CacheConfig(page_size=16, kv_size=4096, max_context_len=1024),
    CacheConfig(components=(FULL, STATES), max_num_reqs=200, mamba_cache_size=200),
    CacheConfig(components=(FULL, WINDOWS), sliding_window_size=4),
]


class _Fuzz(insert_walk.SegmentLockFuzzFixtures):
    def __init__(self, config: CacheConfig) -> None:
        self.cfg = config


def _seen(patch: pytest.MonkeyPatch, config: CacheConfig, ours: bool) -> list[Any]:
    """Runs SGLang's fuzz test. Returns all matches, and the tree's sizes and slots after each operation."""
    seen: list[Any] = []

    def build(config: CacheConfig) -> Any:
        cache, allocator, rows = fixtures.build_fixture(config, tree_core_backend="python")
        assert isinstance(cache, SharedRadixCache) == ours
        check = cache.sanity_check
        match = cache.match_prefix
        lock = cache.inc_lock_ref

        def checked() -> None:
            check()
            sizes = allocator.available_size(), cache.evictable_size(), cache.protected_size()
            seen.append((*sizes, cache.all_values_flatten().tolist()))

        def matched(params: Any) -> Any:
            found = match(params)
            node = found.last_device_node - cache.root_node_handle()
            seen.append((found.device_prefix_len, node))
            return found

        def locked(*given: Any, **options: Any) -> Any:
            receipt = lock(*given, **options)
            receipt.component_lock_uuids.setdefault(ComponentType.SWA, None)
            return receipt

        cache.sanity_check = checked
        cache.match_prefix = matched
        cache.inc_lock_ref = locked
        if not config.has_swa:
            # SGLang's test calls this method even without a window pool.
            allocator.free_swa = lambda slots: None
        return cache, allocator, rows

    with patch.context() as patched:
        patched.setattr(fixtures, "get_device", lambda: "cpu")
        patched.setattr(insert_walk, "build_fixture", build)
        if ours:
            for stock in (TokenToKVPoolAllocator, SWATokenToKVPoolAllocator):
                made = lambda stock=stock, **given: shared_allocator_of(stock(**given))  # noqa: E731
                patched.setattr(fixtures, stock.__name__, made)
            patched.setattr(fixtures, "UnifiedRadixCache", SharedRadixCache)
        for seed in range(5):
            _Fuzz(config)._run_seed(seed)
    return seen


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_our_tree_does_what_stock_does(
    monkeypatch: pytest.MonkeyPatch, config: CacheConfig
) -> None:
    stock = _seen(monkeypatch, config, ours=False)
    assert len(stock) > 500
    assert _seen(monkeypatch, config, ours=True) == stock

# SPDX-License-Identifier: Apache-2.0
"""Everything we touch in SGLang, checked against the installed version.

A failure here names what changed; ``sglang_reasoncache/compat`` is the place to adapt.
"""

from __future__ import annotations

import inspect
import pkgutil

import pytest

from sglang_reasoncache import compat


def _parameters(target: str) -> list[str]:
    return list(inspect.signature(pkgutil.resolve_name(target)).parameters)


def test_installed_version_is_supported() -> None:
    """The tests run on a version we claim to support."""
    assert compat.installed_version() in compat.SUPPORTED_SGLANG


@pytest.mark.parametrize("name", sorted(compat.NAMES))
def test_name_exists(name: str) -> None:
    """Every name of the table resolves."""
    assert compat.resolve(name) is not None


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("add_cli_args", ["parser"]),
        ("from_cli_args", ["args"]),
        (
            "build_allocator",
            [
                "self",
                "sizes",
                "token_to_kv_pool",
                "is_dsv4_model",
                "req_to_token_pool",
                "token_to_kv_pool_allocator",
            ],
        ),
        ("decode_done", ["self", "batch", "result"]),
        ("prefill_done", ["self", "batch", "result"]),
        ("count_uncached", ["self"]),
        ("decode_log_parts", ["self"]),
        ("internal_state", ["self", "state"]),
    ],
)
def test_hook_target_signature(hook: str, parameters: list[str]) -> None:
    """Hooked functions exist under the parameters our hooks are called with."""
    assert _parameters(compat.HOOK_TARGETS[hook]) == parameters


def test_last_loc_signature() -> None:
    """The hook of the CPU platform hands all arguments on to SGLang's torch version."""
    hooked = _parameters(compat.CPU_HOOK_TARGETS["last_loc"])
    assert hooked == ["req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"]
    assert _parameters(compat.NAMES["get_last_loc_torch"]) == hooked


def test_every_hook_has_a_signature_test() -> None:
    """The list above is complete."""
    marks = test_hook_target_signature.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(compat.HOOK_TARGETS)


@pytest.mark.parametrize(
    ("name", "method", "parameters"),
    [
        ("RadixCache", "checkpoint", ["self", "req", "up_to"]),
        ("RadixCache", "on_release", ["self", "req", "checkpointed"]),
        (
            "RadixCache",
            "_insert_helper",
            ["self", "node", "key", "value", "priority", "inserted_len"],
        ),
        ("RadixCache", "_split_node", ["self", "key", "child", "split_len"]),
        ("RadixCache", "_delete_leaf", ["self", "node"]),
        ("RadixCache", "inc_lock_ref", ["self", "node"]),
        ("RadixCache", "dec_lock_ref", ["self", "node", "params"]),
        ("RadixCache", "evict", ["self", "params"]),
        ("RadixCache", "path_device_indices", ["self", "node"]),
        ("TokenToKVPoolAllocator", "free", ["self", "free_index"]),
        ("PagedTokenToKVPoolAllocator", "_release_page_ids", ["self", "page_ids"]),
        (
            "PrefillBudget",
            "check_prefill",
            [
                "self",
                "extend_input_len",
                "total_tokens",
                "max_new_tokens",
                "input_tokens",
                "swa_host_hit_length",
                "chunk_limit",
                "auxiliary_swa_host_hit_length",
            ],
        ),
        ("PrefillBudget", "_available_and_evictable", ["self"]),
        ("TokenToKVPoolAllocator", "free_page_ids", ["self", "page_ids"]),
        ("PagedTokenToKVPoolAllocator", "free_page_ids", ["self", "page_ids"]),
        ("RotaryEmbedding", "_compute_cos_sin_cache", ["self"]),
    ],
)
def test_overridden_method_signature(name: str, method: str, parameters: list[str]) -> None:
    """Methods we override or call beyond the public interface kept their parameters."""
    assert _parameters(f"{compat.NAMES[name]}.{method}") == parameters


@pytest.mark.parametrize("method", ["_run_sdpa_forward_extend", "_run_sdpa_forward_decode"])
def test_attention_loop_signature(method: str) -> None:
    """The stock loops still take query, output and the key cache first."""
    names = _parameters(f"{compat.NAMES['TorchNativeAttnBackend']}.{method}")
    assert names[:5] == ["self", "query", "output", "k_cache", "v_cache"]
    assert {"scaling", "sliding_window_size"} <= set(names)


def test_scheduler_reachable_from_result_processor() -> None:
    """The flag that stops admission is reset through the metrics reporter's scheduler."""
    reporter = pkgutil.resolve_name("sglang.srt.managers.scheduler_components.metrics_reporter")
    assert "self.scheduler" in inspect.getsource(reporter)
    batch = pkgutil.resolve_name("sglang.srt.managers.schedule_batch.ScheduleBatch")
    assert "batch_is_full" in {field.name for field in batch.__dataclass_fields__.values()}


def test_a_chunk_is_published_before_the_next_one_gets_slots() -> None:
    """Between the two we evict positions of a prompt; where its last chunk is published, not."""
    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    source = inspect.getsource(pkgutil.resolve_name(scheduler + "get_next_batch_to_run"))
    assert source.index("self.stash_chunked_request(") < source.index("self.get_new_batch_prefill(")
    source = inspect.getsource(pkgutil.resolve_name(scheduler + "stash_chunked_request"))
    assert "checkpoint_kv_cache(req, self.tree_cache)" in source
    source = inspect.getsource(
        pkgutil.resolve_name("sglang.srt.mem_cache.common.checkpoint_kv_cache")
    )
    assert "tree_cache.checkpoint(req, up_to=req.extend_end)" in source
    assert "req.prefix_len = req.extend_end" in source
    allocator = pkgutil.resolve_name(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
    )
    assert "self.free_group = self.free_group, None" in inspect.getsource(allocator.free_group_end)


def test_a_processed_prefill_says_what_it_computed() -> None:
    """Decoding requests that ride on it come last."""
    batch = "sglang.srt.managers.schedule_batch.ScheduleBatch."
    copied = inspect.getsource(pkgutil.resolve_name(batch + "copy"))
    for field in ("reqs", "prefix_lens", "extend_lens", "decoding_reqs"):
        assert f"{field}=self.{field}" in copied
    mixed = inspect.getsource(pkgutil.resolve_name(batch + "mix_with_running"))
    assert "self.prefix_lens = self.prefix_lens + running_prefix_lens" in mixed


def test_a_row_counts_the_requests_that_got_it() -> None:
    """Attention statistics tell by it that a row has another request."""
    rows = compat.ReqToTokenPool(3, 8, "cpu", False)
    [first] = rows.alloc_rows(1)
    before = rows.req_generation.clone()
    rows.free_rows([first])
    assert rows.req_generation.device.type == "cpu"
    assert rows.alloc_rows(1) == [first]
    assert (rows.req_generation - before).nonzero().tolist() == [[first]]
    rows.clear()
    assert rows.req_generation[first] > before[first]


def test_a_later_chunk_keeps_its_row() -> None:
    """Its prefix is read from the row, evicted positions and all, and written back there."""
    source = inspect.getsource(
        pkgutil.resolve_name("sglang.srt.mem_cache.allocation._prefix_kv_indices")
    )
    assert "if req.kv.holds_kv:" in source and "row[: req.prefix_len]" in source

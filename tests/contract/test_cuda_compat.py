# SPDX-License-Identifier: Apache-2.0
"""What attention on CUDA leans on in SGLang: classes it is put in front of, and the order of steps."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from typing import Any

import pytest

from sglang_reasoncache import compat
from sglang_reasoncache.plugin import refusals

_ATTENTION = "sglang.srt.layers.attention."
_RUNNER = "sglang.srt.model_executor.runner."
_BASE = _ATTENTION + "base_attn_backend.AttentionBackend"
_DECODE_RUNNER = _RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"

STOCK = {"flashinfer": "FlashInferAttnBackend", "triton": "TritonAttnBackend"}


def _source(target: str) -> str:
    return inspect.getsource(pkgutil.resolve_name(target))


def _parameters(target: Any) -> list[str]:
    target = pkgutil.resolve_name(target) if isinstance(target, str) else target
    return list(inspect.signature(target).parameters)


def _in_order(source: str, *steps: str) -> None:
    at = [source.index(step) for step in steps]
    assert at == sorted(at), f"SGLang does these in another order: {steps}"


def test_every_backend_has_a_stock_class() -> None:
    assert set(STOCK) == set(compat.CUDA_BACKENDS)


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("forward_batch", ["batch", "model_runner"]),
        ("graph_variants", ["hf_config"]),
    ],
)
def test_hook_target_signature(hook: str, parameters: list[str]) -> None:
    """Hooked functions exist under the parameters our hooks are called with."""
    found = _parameters(compat.CUDA_HOOK_TARGETS[hook])
    assert found[: len(parameters)] == parameters
    if hook == "graph_variants":
        assert found == parameters


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("init_forward_metadata", ["self", "forward_batch"]),
        ("init_forward_metadata_out_graph", ["self", "forward_batch", "in_capture"]),
        ("init_forward_metadata_in_graph", ["self", "forward_batch"]),
        ("init_cuda_graph_state", ["self", "max_bs", "max_num_tokens"]),
        ("shared_read_ends", ["self", "fm"]),
        (
            "forward_decode",
            ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
        ),
        (
            "forward_extend",
            ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"],
        ),
    ],
)
def test_overridden_method_signature(name: str, method: str, parameters: list[str]) -> None:
    """Methods we stand in front of take what we hand on."""
    found = _parameters(getattr(compat.resolve(STOCK[name]), method))
    assert found[: len(parameters)] == parameters


@pytest.mark.parametrize("name", STOCK)
def test_the_registry_makes_these_classes_from_what_we_hand_them(name: str) -> None:
    source = inspect.getsource(
        pkgutil.resolve_name(f"{_ATTENTION}attention_registry.create_{name}_backend")
    )
    handed = {
        "flashinfer": "FlashInferAttnBackend(\n            runner, init_new_workspace=runner",
        "triton": "return TritonAttnBackend(runner)",
    }
    assert handed[name] in source


@pytest.mark.parametrize("name", STOCK)
def test_stock_classes_prepare_nothing_where_we_do_not_look(name: str) -> None:
    """Graph preparation goes through the three methods we stand in front of, and no other."""
    stock, base = compat.resolve(STOCK[name]), pkgutil.resolve_name(_BASE)
    assert not stock.use_captured_forward_metadata_for_breakable_cuda_graph
    assert not stock.supports_full_cuda_graph_chunked_prefix
    for method in ("init_forward_metadata_in_graph", "_snapshot_prefill_shared_reads", "forward"):
        assert getattr(stock, method) is getattr(base, method)


def test_decode_runner_selects_a_variant_before_it_prepares_a_replay() -> None:
    _in_order(
        _source(f"{_DECODE_RUNNER}.load_batch").split("buffers = self.buffers")[1],
        "self._resolve_attention_variant(forward_batch, bs)",
        "self.buffer_registry.fill_from(",
        "self._init_replay_attn_metadata(",
    )
    assert "init_forward_metadata_out_graph(fb_view)" in _source(
        f"{_DECODE_RUNNER}._init_replay_attn_metadata_from_view"
    )


def test_decode_runner_captures_every_variant() -> None:
    _in_order(
        _source(f"{_DECODE_RUNNER}._capture_one_stream"),
        "variants.capture_labels if variants is not None",
        "_set_capture_attention_variant(attention_variant)",
        "self.capture_one_shape(",
        "_set_capture_attention_variant(None)",
    )
    _in_order(
        _source(f"{_DECODE_RUNNER}.capture_one_shape"),
        "init_forward_metadata_out_graph(forward_batch, in_capture=True)",
        "self._run_in_graph_metadata_prep(attn_backend, forward_batch)",
        "out = forward(",
        "self.backend.capture_one(",
    )
    _in_order(
        _source(f"{_DECODE_RUNNER}.__init__"),
        "create_attention_graph_variants(model_runner.model_config.hf_config)",
        "init_cuda_graph_state(self.max_bs",
        "self.capture()",
    )


def test_rows_change_after_the_forward_in_flight_has_read_them() -> None:
    """SGLang fences result processing, where blocks are redirected, behind a forward's reads."""
    _in_order(
        _source("sglang.srt.managers.scheduler.Scheduler.event_loop_overlap").split(
            "# Launch the current batch"
        )[1],
        "self.run_batch(batch)",
        "self._apply_war_barrier()",
        "pop_and_process()",
    )
    runner = _source(_DECODE_RUNNER)
    assert "_record_in_graph_metadata_prep_done()" in runner
    ends = compat.SharedReadEnds
    assert ends.max_of((ends.PRE_REPLAY, ends.IN_REPLAY)) is ends.IN_REPLAY


def test_prefill_runner_asks_the_backend() -> None:
    source = _source(_RUNNER + "prefill_cuda_graph_runner.PrefillCudaGraphRunner")
    assert 'getattr(model_runner.attn_backend, "can_run_prefill_cuda_graph", None)' in source
    assert "not backend_can_run(forward_batch)" in source


def test_a_batch_names_its_requests_through_copies() -> None:
    fields = {field.name for field in dataclasses.fields(pkgutil.resolve_name(_BATCH))}
    assert fields >= {
        "rids",
        "seq_lens_cpu",
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
        "out_cache_loc",
        "out_cache_loc_is_physical",
        "positions",
        "req_pool_indices",
    }
    assert "rids=[req.rid for req in batch.reqs]" in _source(f"{_BATCH}.init_new")
    extract = "sglang.srt.model_executor.cuda_graph_buffer_registry.CudaGraphBufferRegistry"
    assert "dataclasses.replace(forward_batch_template" in _source(f"{extract}.extract_buffer")


def test_a_request_keeps_the_node_its_prefix_ends_in() -> None:
    schedule = "sglang.srt.managers.schedule_batch."
    assert "self.last_node" in _source(schedule + "Req")
    batch = pkgutil.resolve_name(schedule + "ScheduleBatch")
    assert "tree_cache" in batch.__dataclass_fields__
    assert "req.last_node = new_last_node" in _source(
        "sglang.srt.mem_cache.radix_cache.RadixCache.checkpoint"
    )


def test_writes_take_a_batch_and_scales() -> None:
    assert _parameters(compat.KVWriteLoc.for_batch)[0] == "forward_batch"
    found = _parameters(compat.resolve("MHATokenToKVPool").set_kv_buffer)
    assert found[:7] == ["self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"]
    layer = _source(compat.NAMES["RadixAttention"])
    assert "self.k_scale_float" in layer and "self.v_scale_float" in layer


def test_refused_flags_exist() -> None:
    args = compat.ServerArgs(model_path="none", device="cpu")
    for field in (*refusals.CONFLICTS, *refusals.CORRECTED_CONFLICTS):
        assert hasattr(args, field), field


def test_the_host_knows_rows_and_lengths_of_every_batch() -> None:
    """What attention statistics are reserved by; lengths on the device are new tensors each step."""
    batch = "sglang.srt.managers.schedule_batch.ScheduleBatch"
    decode = _source(f"{batch}.prepare_for_decode")
    assert "self.seq_lens = self.seq_lens + 1" in decode
    assert "self.seq_lens_cpu = self.seq_lens_cpu + 1" in decode
    for method in ("merge_batch", "filter_batch", "prepare_for_extend"):
        source = _source(f"{batch}.{method}")
        assert "self.req_pool_indices_cpu = " in source and "self.seq_lens_cpu = " in source


def test_a_batch_is_built_on_the_stream_of_its_forward() -> None:
    source = _source("sglang.srt.managers.scheduler.Scheduler.run_batch")
    _in_order(
        source,
        "with self.forward_stream_ctx:",
        "self.forward_stream.wait_stream(self.schedule_stream)",
        "self.model_worker.forward_batch_generation(",
    )
    assert "ForwardBatch.init_new(" in _source(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    )


def test_a_row_tells_its_owners_apart() -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(2, 4, "cpu", False)
    assert pool.req_generation.device.type == "cpu"
    before = pool.req_generation.clone()
    (row,) = pool.alloc_rows(1)
    assert int(pool.req_generation[row] - before[row]) == 1

# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed SGLang still has everything that we use of it, in the form that we expect.

A failure here names what changed in SGLang. Adapt ``sglang_reasoncache/compat`` to that change."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types as python_types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang

from sglang_reasoncache import compat
from sglang_reasoncache.compat import types
from tests.contract.ours import FAILED, OVERRIDES, SUPER
from tests.contract.ours import source as _source


def _accepts(target: Any, parameters: str) -> bool:
    """Whether ``target`` has these ``parameters``; if they end in ``...``, more parameters may follow."""
    target = pkgutil.resolve_name(target) if isinstance(target, str) else target
    found = list(inspect.signature(target).parameters)
    first, more, _ = parameters.partition(" ...")
    return (found[: len(first.split())] if more else found) == first.split()


def test_a_variable_names_the_application_of_worker_processes() -> None:
    """SGLang 0.5.22 has no such variable."""
    from sglang.srt.environ import envs

    variable = getattr(envs, compat.APP_ENV, None)
    if variable is None:
        pytest.skip(f"this SGLang has no {compat.APP_ENV}")
    assert variable.default == compat.DEFAULT_APP
    module, _, name = variable.default.partition(":")
    assert getattr(importlib.import_module(module), name) is compat.http_app


@pytest.mark.parametrize("name", sorted(compat.NAMES))
def test_name_exists(name: str) -> None:
    assert compat.resolve(name) is not None


_ALLOCATOR = "sizes token_to_kv_pool is_dsv4_model req_to_token_pool token_to_kv_pool_allocator"
_LAST_LOC = "req_to_token req_pool_indices_tensor prefix_lens_tensor"
#: For each hook, the parameters of the hooked function. ``...`` stands for further ones, which we do not need.
HOOKS = {
    "add_cli_args": "parser", "from_cli_args": "args", "verify": "self vocab_size",
    "check_args": "self", "resolve_args": "self",
    "build_allocator": f"self {_ALLOCATOR}", "decode_done": "self batch result",
    "prefill_done": "self batch result", "count_uncached": "self", "decode_log_parts": "self",
    "internal_state": "self recv_req", "hybrid_backend": "runner full_attn_backend",
    "forward_batch": "batch model_runner ...", "graph_variants": "hf_config",
    "load_batch": "self forward_batch pp_proxy_tensors",
    "decode_vote": "local_batch ...", "prefill_vote": "local_batch ...", "votes": "self ...",
    "retracted": "self", "fetch_latent": "self kv_indices dst_dtype forward_batch",
    "make_abort": "req finished_reason", "abort_done": "self recv_obj",
    "pause": "self recv_req", **dict.fromkeys(compat.WEIGHT_HOOKS, "self recv_req"),
    "release": "req remaing_req_count ...",
    "linear": "self layer x bias", "lm_head": "self hidden_states lm_head embedding_bias ...",
    "last_loc": _LAST_LOC, "prefill_ready": "self", "generate": "self obj request",
    "chat": "self request raw_request", "abort": "self rid abort_all",
    "meta_info": "self meta_info state customized_info index finish_reason",
    "prealloc_done": "self req prefix_indices prefix_len total_prefix_len",
    "prealloc_required": "self req allocated_tokens prefix_len retractable_tokens",
    "prealloc_budget": "self retractable_tokens count_retracted extra_reserved_reqs reserved_tokens ...",
    "decode_queue": "self",
    "prealloc_fits": "self full_tokens swa_tokens ...",
}  # fmt: skip


TARGETS = {**compat.HOOK_TARGETS, **compat.CUDA_HOOK_TARGETS, **compat.CPU_HOOK_TARGETS}
TARGETS |= {**compat.FRONTEND_HOOK_TARGETS, **compat.LAUNCHER_HOOK_TARGETS}


def test_version_is_supported_and_every_hook_is_here() -> None:
    """The hook ``last_loc`` passes all its arguments on to ``get_last_loc_torch``, which must take them."""
    assert compat.version("sglang") in compat.SUPPORTED_SGLANG
    assert TARGETS.keys() == HOOKS.keys()
    assert _accepts(compat.NAMES["get_last_loc_torch"], _LAST_LOC)


@pytest.mark.parametrize("name", TARGETS)
def test_hooked_function_has_these_parameters(name: str) -> None:
    assert _accepts(TARGETS[name], HOOKS[name])


def test_what_keeps_states_is_asked_as_it_expects() -> None:
    """``cache/states.py`` asks SGLang's component for a finished request's state, and to free the others."""
    component = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent."
    asked = "self req insert_params token_ids_len is_finished"
    assert _accepts(component + "prepare_for_caching_req", asked)
    freed = "self req is_finished insert_result insert_params"
    assert _accepts(component + "cleanup_after_caching_req", freed)
    pools = "sglang.srt.mem_cache.memory_pool."
    assert _accepts(pools + "MambaPool.get_cpu_copy", "self indices")
    assert _accepts(pools + "MambaPool.load_cpu_copy", "self mamba_cache_cpu indices")
    pool = _source(pkgutil.resolve_name(pools + "HybridReqToTokenPool"))
    assert all(f"self.{name} =" in pool for name in ("mamba_pool", "mamba_allocator"))
    assert _accepts(pools + "HybridReqToTokenPool.translate_mamba_indices", "self mamba_indices")
    states = _source(pkgutil.resolve_name(pools + "MambaPool"))
    assert "self.replayssm_write_pos" in states, "rings beside states"
    fields = {field.name for field in dataclasses.fields(compat.InsertParams)}
    assert "mamba_value" in fields


def test_our_modules_can_be_imported() -> None:
    """If one cannot, the tests below check the classes of the others."""
    assert not FAILED


@pytest.mark.parametrize(("ours", "theirs"), OVERRIDES, ids=lambda method: method.__qualname__)
def test_an_overridden_method_is_called_as_it_is_written(ours: Any, theirs: Any) -> None:
    """Our parameters have SGLang's names and order; ``*args`` or ``**kwargs`` may stand for the rest."""
    found = inspect.signature(ours).parameters.values()
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    in_order = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    names = list(inspect.signature(theirs).parameters)
    if names == ["self", "args", "kwargs"]:
        return  # A base class that only raises; the classes that extend it are compared, too.
    assert in_order == names[: len(in_order)] and {p.name for p in named} <= set(names)
    assert len(named) < len(found) or len(named) == len(names)


#: Methods that SGLang has since the newest version that is supported.
NEWEST = {"get_fused_kv_write_buffers"}


@pytest.mark.parametrize(("name", "stock"), SUPER.values(), ids=map(".".join, SUPER))
def test_what_we_extend_exists(name: str, stock: list[type]) -> None:
    """SGLang still has the method that ours extends. If it does not, it never calls ours."""
    if name in NEWEST and compat.version("sglang") != compat.SUPPORTED_SGLANG[-1]:
        pytest.skip(f"this SGLang has no {name}")
    assert any(hasattr(base, name) for base in stock)


#: Functions of SGLang, each followed by texts that its source must contain in this order. Without this test, a
#: change of such a function would be noticed only on a GPU or in a race. If the first text begins with ``>``,
#: only the source after that text is searched. ``||`` stands between the texts of two supported versions.
STEPS = """
# The decode runner prepares a replay, and selects its variant for the same batch, in ``load_batch``, before
# which our hook chooses. It captures every variant.
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute
    self.load_batch(forward_batch, pp_proxy_tensors)
    self.backend.replay(self._replay_graph_key, forward_batch)
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch
    > buffers = self.buffers
    self.buffer_registry.fill_from(
    self._init_replay_attn_metadata( || attn_backend.init_forward_metadata_out_graph(fb_view)
    self._replay_graph_key = self._make_graph_key(
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch
    > buffers = self.buffers
    attention_variant = self._resolve_attention_variant(forward_batch, bs)
    graph_size_key, stream_idx, variant_label, attention_variant
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_attention_variant
    return variants.select(forward_batch)
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._capture_one_stream
    variants.capture_labels if variants is not None
    _set_capture_attention_variant(attention_variant)
    self.capture_one_shape(
    _set_capture_attention_variant(None)
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape
    init_forward_metadata_out_graph(forward_batch, in_capture=True)
    self._run_in_graph_metadata_prep( || attn_backend.init_forward_metadata_in_graph(
    out = forward(
    self.backend.capture_one(
# Decode graphs are sized by what ``compat.largest_decode_graph`` asks, after backends are made.
managers.scheduler.Scheduler.init_model_worker
    self.init_memory_pools()
    self.init_all_attention_backends()
    self.init_all_cuda_graphs()
model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph
    if not model_runner.is_generation:
    Phase.DECODE, Backend.DISABLED
    GraphRunnerCls(model_runner)
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.__init__
    self.capture_bs, self.compile_bs = get_batch_sizes_to_capture( model_runner,
    self.max_bs = max(self.capture_bs)
    self.attn_backend.init_cuda_graph_state(self.max_bs, self.max_num_token)
# Of latent attention this answer to the backend's name puts latent and rotated dims side by side.
models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin.forward_absorb_core
    if self.current_attention_backend in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    q = torch.cat([q_nope_out, q_pe], dim=-1)
    k = torch.cat([k_nope, k_pe], dim=-1)
# The module whose attention our registry entry has absorbed asks for each forward.
models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method
    handler = AttentionBackendRegistry.get_handler(attention_backend)
    handler(self, forward_batch)
models.deepseek_v2.DeepseekV2AttentionMLA.forward_prepare
    attn_forward_method = self.dispatch_attn_forward_method(forward_batch)
    attn_forward_method == AttnForwardMethod.MLA:
# SGLang marks flags that it has resolved, and adds its decisions to those that launchers made before.
server_args.ServerArgs.resolve_once
    if getattr(self, "_resolution_finished", False): return
    run_resolution_pipeline(self)
    self._resolution_finished = True
arg_groups.pipeline.run_resolution_pipeline
    server_args._resolved_overrides = list( getattr(server_args, "_resolved_overrides", ()) )
# SGLang fences result processing, where blocks are redirected, behind a forward's reads.
managers.scheduler.Scheduler.event_loop_overlap
    > # Launch the current batch
    self.run_batch(batch)
    self._apply_war_barrier()
    pop_and_process()
# A batch is built on the stream of its forward.
managers.scheduler.Scheduler.run_batch
    with self.forward_stream_ctx:
    self.forward_stream.wait_stream(self.schedule_stream)
    self.model_worker.forward_batch_generation(
# An id is registered before SGLang first waits, so it is not free for a moment once documents are prefilled.
managers.tokenizer_manager.TokenizerManager.generate_request
    obj.normalize_batch_and_arguments()
    self._init_req_state(obj, request)
    await
# The slots of evicted nodes are freed here and nowhere else. Our tree says of which they are.
mem_cache.unified_radix_cache.UnifiedRadixCache._free_values
    self._drain_device_frees(device_frees)
# An evicted node loses its KV of full attention by this method, or once that KV is on the host.
mem_cache.unified_radix_cache.UnifiedRadixCache._evict_components
    node_id, made_progress = self._evict_device_next_node(
    backup_kv = self._evict_device_leaf(node_id, tracker)
    self._demote(node_id, tracker)
    self._drop_subtree_no_host(node_id, tracker)
mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf
    result = self.tree_core.evict_device_leaf(node_id, self.is_write_back)
# Groups of DP attention agree on a batch after its slots were allocated, and decode steps may become prefills.
managers.scheduler.Scheduler.get_next_batch_to_run
    self.update_running_batch(running_batch)
    self.dp_attn_adapter.maybe_prepare_mlp_sync_batch( ret
    self.dp_attn_adapter.maybe_convert_decode_to_extend(ret)
"""


CASES = re.findall(r"^\w.*\n(?: .*\n)+", STEPS, re.MULTILINE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.split()[0])
def test_source_has_steps_in_order(case: str) -> None:
    target, *steps = (" ".join(line.split()) for line in case.splitlines())
    source = " ".join(_source(pkgutil.resolve_name(f"sglang.srt.{target}")).split())
    if steps[0].startswith("> "):
        source = source.partition(steps.pop(0)[2:])[2]
    at = [max(map(source.find, step.split(" || "))) for step in steps]
    assert -1 not in at and at == sorted(at), dict(zip(steps, at, strict=True))


_FIELDS = "rids seq_lens_cpu extend_seq_lens_cpu extend_prefix_lens_cpu out_cache_loc"


def test_fields_exist() -> None:
    for protocol, fields in {
        types.ScheduleBatch: "batch_is_full tree_cache",
        types.ForwardBatch: f"{_FIELDS} out_cache_loc_is_physical positions req_pool_indices",
    }.items():
        found = dataclasses.fields(pkgutil.resolve_name(f"sglang.srt.{CLASSES[protocol]}"))
        assert {field.name for field in found} >= set(fields.split())


#: The method that copies what a prefill reads late, as the supported versions call it.
_SNAPSHOTS = ("prepare_prefill_shared_read_snapshot", "_snapshot_prefill_shared_reads")


def test_stock_classes_prepare_nothing_where_we_do_not_look() -> None:
    """SGLang's backends prepare CUDA graphs only in methods that we override."""
    from sglang_reasoncache.plugin import attention

    assert {name for name, _latent in attention.STOCK} == set(compat.CUDA_BACKENDS)
    base = pkgutil.resolve_name("sglang.srt.layers.attention.base_attn_backend.AttentionBackend")
    for stock in map(compat.resolve, set(attention.STOCK.values())):
        assert not stock.use_captured_forward_metadata_for_breakable_cuda_graph
        found = [name for name in _SNAPSHOTS if hasattr(base, name)]
        assert len(found) == 1 and getattr(stock, found[0]) is getattr(base, found[0])
        assert stock.forward is base.forward
    ends = compat.SharedReadEnds
    assert ends.max_of((ends.PRE_REPLAY, ends.IN_REPLAY)) is ends.IN_REPLAY


#: Each of our protocols, and the path in ``sglang.srt`` of the SGLang class that the protocol describes.
CLASSES: dict[type, str] = {
    types.RequestKV: "managers.schedule_batch.ReqKvInfo",
    types.Request: "managers.schedule_batch.Req",
    types.KVPool: "mem_cache.memory_pool.MHATokenToKVPool",
    types.ReqToTokenPool: "mem_cache.memory_pool.ReqToTokenPool",
    types.SlotAllocator: "mem_cache.allocator.token.TokenToKVPoolAllocator",
    types.PrefixTree: "mem_cache.unified_radix_cache.UnifiedRadixCache",
    types.ServerArgs: "server_args.ServerArgs",
    types.ModelConfig: "configs.model_config.ModelConfig",
    types.ModelRunner: "model_executor.model_runner.ModelRunner",
    types.AttentionLayer: "layers.radix_attention.RadixAttention",
    types.ForwardMode: "model_executor.forward_batch_info.ForwardMode",
    types.ForwardBatch: "model_executor.forward_batch_info.ForwardBatch",
    types.VerifyInput: "speculative.eagle_info.EagleVerifyInput",
    types.ScheduleBatch: "managers.schedule_batch.ScheduleBatch",
    types.PreallocQueue: "disaggregation.decode.DecodePreallocQueue",
    types.CacheInitParams: "mem_cache.cache_init_params.CacheInitParams",
    types.TpWorker: "managers.tp_worker.TpModelWorker",
    types.TreeCacheBuildContext: "mem_cache.registry.TreeCacheBuildContext",
}


#: The attributes that each protocol declares.
ATTRIBUTES = [
    (protocol, name)
    for protocol in CLASSES
    for name in dict.fromkeys((*protocol.__annotations__, *vars(protocol)))
    if name in protocol.__annotations__ or not name.startswith("_")
]


def test_every_protocol_has_a_class() -> None:
    ours = [value for value in vars(types).values() if getattr(value, "_is_protocol", False)]
    assert {value for value in ours if value.__module__ == types.__name__} == set(CLASSES)


def test_n_grams_are_verified_like_a_draft_model() -> None:
    ngram = pkgutil.resolve_name("sglang.srt.speculative.ngram_info.NgramVerifyInput")
    for name in types.VerifyInput.__annotations__:
        assert hasattr(ngram, name) or f"self.{name} = " in _source(ngram)
    result = pkgutil.resolve_name("sglang.srt.managers.utils.GenerationBatchResult")
    assert "accept_lens" in result.__dataclass_fields__


@pytest.mark.parametrize(
    ("protocol", "attribute"), ATTRIBUTES, ids=lambda value: getattr(value, "__name__", value)
)
def test_attribute_exists(protocol: type, attribute: str) -> None:
    """SGLang's class for the protocol, or one of its base classes, sets or declares the attribute."""
    found = pkgutil.resolve_name(f"sglang.srt.{CLASSES[protocol]}")
    assigned = re.compile(rf"\bself\.{attribute}\b[^=\n]*(:[^=\n]+)?=[^=]")
    assert hasattr(found, attribute) or any(
        attribute in getattr(base, "__annotations__", ()) or assigned.search(_source(base))
        for base in found.__mro__
        if base.__module__.startswith("sglang")
    ), f"{found.__name__} has no {attribute}"


#: Files of SGLang without an HTTP request: ``Engine``, warm-ups, and gRPC, with which no server of ours starts.
WITHOUT_HTTP = {"engine.py", "warmup.py", "grpc_bridge.py"}


def _calls_of_generate_request() -> Iterator[tuple[str, ast.Call]]:
    """SGLang's calls of ``generate_request`` in its APIs."""
    srt = Path(sglang.__path__[0], "srt")
    for file in (*srt.glob("entrypoints/**/*.py"), *srt.glob("managers/tokenizer_manager*.py")):
        text = file.read_text() if file.name not in WITHOUT_HTTP else ""
        for node in ast.walk(ast.parse(text)) if "generate_request(" in text else ():
            name = getattr(node, "func", None)
            if isinstance(node, ast.Call) and getattr(name, "attr", "") == "generate_request":
                yield f"{file.relative_to(srt)}:{node.lineno}", node


def test_every_api_hands_on_its_http_request() -> None:
    """An API of a later version that did not would drop the header."""
    calls = dict(_calls_of_generate_request())
    files = {place.split("/")[-1].split(":")[0] for place in calls}
    assert len(calls) > 20 and {"serving_chat.py", "serving_responses.py"} <= files
    for place, call in calls.items():
        handed = [ast.unparse(each) for each in call.args[1:]]
        assert handed in (["request"], ["raw_request"]), place


@pytest.mark.parametrize("partial", [False, True])
def test_hooks_of_other_plugins_stay(monkeypatch: pytest.MonkeyPatch, partial: bool) -> None:
    """SGLang applies hooks to a function once, and leaves out what is registered later without a word."""
    registry = compat.HookRegistry
    module = python_types.ModuleType("hooked_by_two")
    module.say = lambda: ["stock"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_patched", set())
    monkeypatch.setattr(registry, "_hooks", defaultdict(list))
    target = f"{module.__name__}.say"

    def ours(result: list[str]) -> list[str]:
        return [*result, "ours"]

    registry.register(target, lambda result: [*result, "theirs"], compat.HookType.AFTER)
    registry.apply_hooks()
    with pytest.raises(RuntimeError, match="did not apply"):
        compat.check_applied([target])
    monkeypatch.setattr(ours, "__module__", compat.__name__)
    hook = functools.partial(ours) if partial else ours
    for _ in range(2):
        compat.apply_hooks({target: (hook, compat.HookType.AFTER)})
        assert module.say() == ["stock", "theirs", "ours"]

# SPDX-License-Identifier: Apache-2.0
"""SGLang's names that the plugin uses, except those in ``cpu/platform.py``. ``compat.NAME`` is imported lazily.

The tests in ``tests/contract`` resolve each of these names against the installed SGLang.
"""

import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from sglang_reasoncache.arguments import SET

SUPPORTED_SGLANG = ("0.5.22", "0.5.23")

#: Module below ``sglang.srt`` -> names that we take from it.
_MODULES: dict[str, list[str]] = {
    "plugins.hook_registry": ["HookRegistry", "HookType"],
    "server_args": ["ServerArgs"],
    "entrypoints.engine": ["Engine"],
    "environ": ["envs"],
    "constants": ["HEALTH_CHECK_RID_PREFIX"],
    "runtime_context": [
        "get_server_args",
        "get_parallel",
        "get_observability",
        "get_disagg",
        "get_exec",
        "get_model",
        "get_schedule",
        "get_serving",
    ],
    "arg_groups.resolution_hooks": ["register_resolution_hook"],
    "arg_groups.overrides": ["declare_resolution"],
    "arg_groups.model_override_base": [
        "attention_backends_of",
        "model_config_of",
        "resolving_view",
    ],
    "mem_cache.registry": [
        "register_radix_cache_backend",
        "create_unified_radix_cache",
        "default_radix_cache_factory",
    ],
    "layers.attention.attention_registry": ["ATTENTION_BACKENDS", "register_attention_backend"],
    "arg_groups.choices": ["add_attention_backend_choices"],
    "mem_cache.allocator.base": ["BaseTokenToKVPoolAllocator"],
    "mem_cache.allocator.token": ["TokenToKVPoolAllocator"],
    "mem_cache.allocator.paged": ["PagedTokenToKVPoolAllocator"],
    "mem_cache.allocator.swa": ["SWATokenToKVPoolAllocator"],
    "mem_cache.memory_pool": [
        "MHATokenToKVPool",
        "MLATokenToKVPool",
        "DSATokenToKVPool",
        "HybridLinearKVPool",
        "KVWriteLoc",
    ],
    "mem_cache.swa_memory_pool": ["SWAKVPool"],
    "mem_cache.allocation": ["get_last_loc_torch"],
    "mem_cache.prefill_budget": ["PrefillBudget", "SWAPrefillBudget"],
    "mem_cache.unified_radix_cache": ["UnifiedRadixCache"],
    "mem_cache.base_prefix_cache": [
        "CacheRequestOutcome",
        "EvictParams",
        "InsertParams",
        "InsertResult",
        "MatchPrefixParams",
        "TreeLock",
    ],
    "mem_cache.allocation_sizing": ["get_alloc_reserve_per_decode"],
    "mem_cache.hicache_storage": ["PoolName"],
    "mem_cache.radix_cache": ["RadixKey"],
    "mem_cache.unified_cache.components": ["ComponentType"],
    "managers.schedule_batch": ["FINISH_ABORT"],
    "managers.schedule_policy": ["CLIP_MAX_NEW_TOKENS"],
    "managers.io_struct": [
        "AbortReq",
        "GenerateReqInput",
        "GetInternalStateReq",
        "GetInternalStateReqOutput",
    ],
    "disaggregation.utils": ["DisaggregationMode"],
    "utils.common": ["get_num_new_pages"],
    "utils.auth": ["AuthLevel", "auth_level", "decide_request_auth"],
    "plugins": ["load_plugins"],
    "layers.attention.torch_native_backend": ["TorchNativeAttnBackend"],
    "layers.attention.flashinfer_backend": ["FlashInferAttnBackend"],
    "layers.attention.flashinfer_mla_backend": ["FlashInferMLAAttnBackend"],
    "layers.attention.triton_backend": ["TritonAttnBackend"],
    "layers.attention.flashattention_backend": ["FlashAttentionBackend"],
    "layers.attention.trtllm_mha_backend": ["TRTLLMHAAttnBackend"],
    "layers.attention.trtllm_mla_backend": ["TRTLLMMLABackend"],
    "layers.attention.base_attn_backend": ["SharedReadEnds"],
    "model_executor.forward_context": ["get_attn_backend"],
    "models.deepseek_common.attention_backend_handler": ["AttentionBackendRegistry"],
    "models.deepseek_common.attention_forward_methods.forward_methods": ["AttnForwardMethod"],
    "model_executor.runner_utils.capture_mode": ["get_capture_attention_variant"],
    "model_executor.runner.base_cuda_graph_runner": ["get_batch_sizes_to_capture"],
    "model_executor.cuda_graph_config": ["check_cuda_graph_backend"],
    "layers.radix_attention": ["RadixAttention"],
    "layers.rotary_embedding.base": ["RotaryEmbedding"],
    "parser.reasoning_parser": ["ReasoningParser"],
    "utils.hf_transformers_utils": ["get_tokenizer"],
}

#: Attribute of this module -> dotted path of the SGLang object.
NAMES: dict[str, str] = {
    "http_app": "sglang.srt.entrypoints.http_server.app",
    "http_global_state": "sglang.srt.entrypoints.http_server.get_global_state",
    "GraphBackend": "sglang.srt.model_executor.cuda_graph_config.Backend",
    "GraphPhase": "sglang.srt.model_executor.cuda_graph_config.Phase",
    # Rotates and quantises queries and keys of latent attention for an fp8 KV cache.
    "mla_quantize_and_rope_for_fp8": "sglang.kernels.ops.attention.utils.mla_quantize_and_rope_for_fp8",
    **{name: f"sglang.srt.{module}.{name}" for module, names in _MODULES.items() for name in names},
}

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs."
_COMPONENTS = "sglang.srt.managers.scheduler_components."
_DISAGGREGATION = "sglang.srt.disaggregation."

#: Every way to load new weights. Not what SGLang calls at their end: it does so on ranks that succeeded.
WEIGHT_HOOKS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)

#: Our name for a hook -> dotted path of the hooked SGLang function.
HOOK_TARGETS: dict[str, str] = {
    "add_cli_args": _SERVER_ARGS + "add_cli_args",
    "from_cli_args": _SERVER_ARGS + "from_cli_args",
    "prefill_ready": "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
    "verify": "sglang.srt.sampling.sampling_params.SamplingParams.verify",
    "build_allocator": "sglang.srt.mem_cache.kv_cache_configurator."
    "KVCacheConfigurator._build_token_to_kv_pool_allocator",
    "decode_done": _COMPONENTS
    + "batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode",
    "prefill_done": _COMPONENTS
    + "batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
    "count_uncached": _COMPONENTS
    + "invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes",
    "decode_log_parts": _COMPONENTS + "pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
    "retracted": "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
    "release": "sglang.srt.managers.schedule_batch.release_req",
    "pause": "sglang.srt.managers.scheduler.Scheduler.pause_generation",
    # What SGLang answers for a request that is aborted while it waits.
    "make_abort": "sglang.srt.managers.scheduler._make_abort_req",
    **{
        name: f"{_COMPONENTS}weight_updater.SchedulerWeightUpdaterManager.{name}"
        for name in WEIGHT_HOOKS
    },
    "internal_state": _COMPONENTS
    + "internal_state.SchedulerInternalStateController.get_internal_state",
    "hybrid_backend": "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    # On the decode server of a PD pair:
    "prealloc_done": _DISAGGREGATION + "decode.DecodePreallocQueue._pre_alloc",
    "prealloc_budget": _DISAGGREGATION + "decode.DecodePreallocQueue._allocatable_token_budgets",
    "prealloc_required": _DISAGGREGATION + "decode.DecodePreallocQueue._required_admission_tokens",
    "decode_queue": _DISAGGREGATION
    + "decode.SchedulerDisaggregationDecodeMixin.process_decode_queue",
    "prealloc_fits": _DISAGGREGATION + "decode.DecodePreallocQueue._prealloc_reservation_fits",
}

#: The hooks that find ``ServerArgs`` that a launcher made.
LAUNCHER_HOOK_TARGETS: dict[str, str] = {
    "resolve_args": _SERVER_ARGS + "resolve_once",
    "check_args": _SERVER_ARGS + "check_server_args",
}

#: Attributes of ``ServerArgs``: whether SGLang has resolved them, and what it decided.
RESOLVED = "_resolution_finished"
DECISIONS = "_resolved_overrides"

#: The hooks of the server's main process, where requests are parsed.
FRONTEND_HOOK_TARGETS: dict[str, str] = {
    "generate": "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    "chat": "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
    "._convert_to_internal_request",
    "abort": "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
    "meta_info": "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
    "abort_done": "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req",
}

#: The hooks of our CPU platform, with or without ``--enable-reasoncache``.
CPU_HOOK_TARGETS: dict[str, str] = {
    "last_loc": "sglang.srt.mem_cache.allocation.get_last_loc",
    "linear": "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    "lm_head": "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
}

#: The hooks that our CUDA attention backends install when they are made.
CUDA_HOOK_TARGETS: dict[str, str] = {
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "load_batch": "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    ".DecodeCudaGraphRunner.load_batch",
    "graph_variants": "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants",
    "decode_vote": _COMPONENTS + "dp_attn._local_decode_cuda_graph_vote",
    "prefill_vote": _COMPONENTS + "dp_attn._local_prefill_cuda_graph_vote",
    "votes": _COMPONENTS + "dp_attn.MLPSyncBatchInfo.all_gather",
    "fetch_latent": "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"
    ".DeepseekMHAForwardMixin._get_mla_kv_buffer",
}

#: The variable that names the HTTP application of SGLang's worker processes (``--tokenizer-worker-num``), which
#: load no plugins. SGLang has it since 0.5.23.
APP_ENV = "SGLANG_HTTP_SERVER_APP_PATH"
#: What SGLang reads where that variable is not set.
DEFAULT_APP = "sglang.srt.entrypoints.http_server:app"

#: The step of SGLang's flag resolution that chooses a default attention backend.
ATTENTION_STEP = "handle_attention_backend_compatibility"

#: The value of ``--radix-cache-backend`` that selects our prefix tree.
TREE_BACKEND = "reasoncache"

#: The value of ``--attention-backend`` that selects our own backend on our CPU platform.
CPU_BACKEND = "reasoncache_cpu"

#: Fields of SGLang's ``ServerArgs`` that name an attention backend.
ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

#: SGLang's CUDA backends whose kernels look up single slots at all page sizes.
SLOT_BACKENDS = ("flashinfer", "triton")

#: SGLang's CUDA backends whose kernels look up pages: the first slot of a page of positions stands for all.
PAGE_BACKENDS = ("fa3", "trtllm_mha", "trtllm_mla")

#: SGLang's CUDA backends that we extend, so that they rotate shared keys and skip evicted positions. Nearly
#: all servers on NVIDIA GPUs run one of these by default.
CUDA_BACKENDS = (*SLOT_BACKENDS, *PAGE_BACKENDS)

#: SGLang's backends for DeepSeek sparse attention. They stay as they are; of a draft model we note the KV pool.
SPARSE_BACKENDS = ("dsa", "nsa")

#: Names of the attention backends that can rotate shared keys and skip evicted positions.
OUR_BACKENDS = (CPU_BACKEND, *CUDA_BACKENDS)


def resolve(name: str) -> Any:
    """SGLang's object ``name``. Raises KeyError if ``NAMES`` does not list the object, and ImportError or
    AttributeError if the installed SGLang does not have the object."""
    return pkgutil.resolve_name(NAMES[name])


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(name)
    return value


def layer_ids(pool: Any) -> Collection[int]:
    """Ids of the attention layers with KV in ``pool``. A hybrid model also has layers without KV."""
    of_hybrid = getattr(pool, "full_attention_layer_id_mapping", None)
    if of_hybrid is not None:
        return list(of_hybrid)
    return range(pool.start_layer, pool.start_layer + pool.layer_num)


def window_layers(pool: Any) -> set[int]:
    """Ids of the sliding-window layers of ``pool``, whose KV SGLang frees as the window moves on."""
    if type(pool) is not resolve("SWAKVPool"):
        return set()
    return {layer for layer, (_, windowed) in pool.layers_mapping.items() if windowed}


def shared_layers(pool: Any) -> list[int]:
    """Ids of the layers in which blocks share slots: all KV layers of ``pool`` without a sliding window."""
    return sorted(set(layer_ids(pool)) - window_layers(pool))


def freed_of_window(kv: Any, page: int) -> tuple[int, int]:
    """The range (start, end) of a request's positions that have lost their slots in the window pool."""
    return kv.swa_dead_lo(page), kv.get_evicted_seqlen(resolve("ComponentType").SWA)


def set_freed_of_window(kv: Any, end: int) -> None:
    """From now on a request's positions up to ``end`` have no slots in the window pool, apart from those that
    the prefix tree owns."""
    kv.set_evicted_seqlen(resolve("ComponentType").SWA, end)


def state_copy_in_flight(kv: Any) -> bool:
    """Whether a forward in flight may write the older of a request's two copies of its state. SGLang copies the
    state alternately into both, at some or all multiples of ``mamba_track_interval``. True if the request's
    slots reach a multiple behind the latest copy that SGLang has recorded."""
    # SGLang 0.5.23 copies it at multiples of the checkpoint grid only, so this is True too often there.
    interval = resolve("get_exec")().mamba.mamba_track_interval
    reached = kv.kv_allocated_len - kv.kv_allocated_len % interval
    return bool(reached > (kv.mamba_last_track_seqlen or 0))


def latent_rank(pool: Any) -> int:
    """Number of latent dims in an MLA slot, in which the rotated dims follow the latent dims. 0 if ``pool`` has
    keys and values instead."""
    return int(getattr(getattr(pool, "full_kv_pool", pool), "kv_lora_rank", 0))


def kv_of(pool: Any, layer: int) -> tuple[Any, Any]:
    """Keys and values of a layer, ``[slots, heads, head_dim]`` each. With MLA the rotated dims are the keys and
    the latent dims are the values."""
    keys = pool.get_key_buffer(layer)
    rank = latent_rank(pool)
    return (keys[..., rank:], keys[..., :rank]) if rank else (keys, pool.get_value_buffer(layer))


def speculation(args: Any) -> str | None:
    """The algorithm of speculative decoding that flags ask for; None if they ask for none. With
    ``--enable-return-aux-hidden-states`` the flag's algorithm only says which hidden states are returned."""
    if getattr(args, "enable_return_aux_hidden_states", False):
        return None
    algorithm: str | None = args.speculative_algorithm
    return algorithm


def drafted_tokens(runner: Any) -> int:
    """How many drafted tokens of each request the ``ModelRunner`` ``runner`` verifies in a step; 0 if it does
    not speculate."""
    if runner.spec_algorithm.is_none():
        return 0
    return int(resolve("resolving_view")(runner.server_args).speculative_num_draft_tokens)


def largest_decode_graph(runner: Any) -> int:
    """Number of requests of the largest decode graph that SGLang will capture for the ``ModelRunner``
    ``runner``; 0 if SGLang captures no decode graphs. Call it once the KV pool is allocated."""
    decode = resolve("GraphPhase").DECODE
    off = resolve("GraphBackend").DISABLED
    if not runner.is_generation or resolve("check_cuda_graph_backend")(decode, off):
        return 0
    sizes, _compiled = resolve("get_batch_sizes_to_capture")(runner, drafted_tokens(runner) or 1)
    return int(max(sizes))


def check_version(allow_untested: bool) -> None:
    """Raises ValueError on an SGLang version that was not tested, unless ``allow_untested`` is True."""
    installed = version("sglang")
    if installed not in SUPPORTED_SGLANG and not allow_untested:
        raise ValueError(
            f"--enable-reasoncache supports sglang {', '.join(SUPPORTED_SGLANG)}, found "
            f"{installed}; pass {SET} allow_untested_sglang=true to start anyway"
        )


def apply_hooks(hooks: Mapping[str, tuple[Callable[..., Any], Any]]) -> None:
    """Install the missing hooks. ``hooks``: path of SGLang's function -> our hook and its ``HookType``."""
    for target, (function, kind) in hooks.items():
        if not _has_ours(target):
            register_hook(target, function, kind)
    resolve("HookRegistry").apply_hooks()
    check_applied(hooks)


def register_hook(target: str, function: Callable[..., Any], kind: Any) -> None:
    """Register a hook, which ``HookRegistry.apply_hooks`` applies. Arguments as in :func:`apply_hooks`.

    SGLang applies hooks to a function once, and leaves out later ones without a word. If it has applied another
    plugin's hooks, they are part of the function now, and ours go around them."""
    registry = resolve("HookRegistry")
    if target in registry._patched and not _has_ours(target):
        registry._hooks[target].clear()
        registry._patched.discard(target)
    registry.register(target, function, kind)


def _has_ours(target: str) -> bool:
    """Whether we registered a hook for ``target``."""
    hooks = resolve("HookRegistry")._hooks.get(target, ())
    # A ``functools.partial`` object has the module of its class.
    functions = (getattr(hook, "func", hook) for _, hook, _ in hooks)
    ours = __name__.partition(".")[0]
    return any(str(function.__module__).partition(".")[0] == ours for function in functions)


def check_applied(targets: Iterable[str]) -> None:
    """Raises RuntimeError if SGLang could not apply a hook. SGLang itself only logs such a failure."""
    patched = resolve("HookRegistry")._patched
    missing = [target for target in targets if target not in patched or not _has_ours(target)]
    if missing:
        names = ", ".join(missing)
        raise RuntimeError(f"sglang-reasoncache: SGLang did not apply the hooks {names}")

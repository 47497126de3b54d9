# SPDX-License-Identifier: Apache-2.0
"""Makes a server's attention backend and what other parts take from it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import ModelRunner
from sglang_reasoncache.config import ReasonCacheConfig, flag_of
from sglang_reasoncache.eviction.policies.contract import ATTENTION, UNROTATED_KEYS, needs_of
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.plugin import cpu_attention, refusals
from sglang_reasoncache.selection.page_selection import PageSelection

logger = logging.getLogger(__name__)
_UNTRIED = "kernels that were checked without a GPU only"
#: Ours on CUDA in this scheduler process.
_backend: Any | None = None


@dataclass(frozen=True)
class AttentionParts:
    """What a server's attention backend can do. None: keys are read as cached, no policy needs
    attention statistics, a decode step reads all pages."""

    rotation: KeyRotation | None = None
    statistics: AttentionStatistics | None = None
    selection: PageSelection | None = None
    skips_evicted: bool = False


def attention_backend(
    model_runner: ModelRunner,
    config: ReasonCacheConfig,
    name: str,
    stock: Callable[[ModelRunner], Any],
    cached: CachedPositions,
) -> tuple[Any, AttentionParts]:
    """Our backend, which writes ``cached``, where the operator's choice allows it, else the
    ``stock`` one. ``name``: one of ``compat.CORRECTABLE_BACKENDS``. Raises ValueError where ours
    was requested and is not supported, or memory is missing."""
    backend = _own_backend(model_runner, config, name, cached)
    if backend is None:
        backend = stock(model_runner)
    paged: PagedAttention | None = getattr(backend, "paged", None)
    if paged is None:
        return backend, AttentionParts(getattr(backend, "rotation", None))
    if model_runner.prefill_attention_backend_str != model_runner.decode_attention_backend_str:
        return backend, AttentionParts(paged.rotation)
    statistics = selection = None
    needs, selector = needs_of(config.policies.evictors), config.policies.selector
    if needs is not None:
        try:
            statistics = paged.keep_statistics(needs)
        except MemoryError as error:
            queries = f"the newest {needs.latest} queries (window of snapkv, alpha of rkv)"
            reason = (
                f"keeps the weights of {queries} apart: {error}; lower that, or --context-length"
            )
            raise refusals.of_policy(config.policy, reason) from error
    if selector is not None:
        refusals.check_selected_page(selector.name, paged.allocator.page_size)
        try:
            selection = paged.select(*selector)
        except MemoryError as error:
            keys = f"keeps the least and largest key of each page beside the pool: {error}"
            reason = f"{keys}; lower --mem-fraction-static, or raise --page-size"
            raise refusals.of_policy(selector.name, reason) from error
    return backend, AttentionParts(paged.rotation, statistics, selection, backend.skips_evicted)


def resolve_positions(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> ReasonCacheConfig:
    """``config`` with ``--reasoncache-positions auto`` resolved by what the backend can do. Raises
    ValueError where corrected positions were requested and are not supported."""
    if parts.rotation is None and config.positions == "corrected":
        raise ValueError(
            "--reasoncache-positions corrected needs --attention-backend "
            f"{', '.join(compat.CORRECTABLE_BACKENDS)}, this server runs "
            f"{model_runner.decode_attention_backend_str}; use as-cached with it"
        )
    found = "as-cached" if parts.rotation is None else "corrected"
    resolved = config.positions.replace("auto", found)
    if resolved != config.positions:
        logger.warning("reasoncache: --reasoncache-positions auto is %s here", resolved)
    return dataclasses.replace(config, positions=resolved)


def check_policies(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> None:
    """Raises ValueError for a policy that this server's attention does not support."""
    decode = model_runner.decode_attention_backend_str
    names = " and ".join(sorted({model_runner.prefill_attention_backend_str, decode}))
    both, policies = f"--attention-backend {names}", config.policies
    if policies.selector is not None and parts.selection is None:
        raise refusals.reads_everything(policies.selector.name, both)
    if policies.evictors and not parts.skips_evicted:
        raise refusals.reads_evicted(config.policy, both)
    for name, policy in policies.evictors:
        if UNROTATED_KEYS in policy.needs and config.positions != "corrected":
            takes = f"--reasoncache-positions corrected, got {config.positions}"
            raise refusals.of_policy(name, f"needs unrotated keys, which takes {takes}")
        if ATTENTION in policy.needs and parts.statistics is None:
            instead = f"does not give; use {' or '.join(compat.EVICTION_BACKENDS)}"
            reason = f"needs attention statistics, which --attention-backend {decode} {instead}"
            raise refusals.of_policy(name, reason)


def _own_backend(
    model_runner: ModelRunner, config: ReasonCacheConfig, name: str, cached: CachedPositions
) -> Any:
    """None where SGLang's serves as it is."""
    prefill = model_runner.prefill_attention_backend_str
    decode = model_runner.decode_attention_backend_str
    on_cuda, asked = name in compat.CUDA_BACKENDS, config.positions == "corrected"
    needs_ours = config.policies.evictors or config.policies.selector is not None
    if model_runner.is_draft_worker:
        return None
    if on_cuda and needs_ours and not asked:
        # Our kernels run what a policy needs; check_policies refuses two backends by their names.
        if prefill != decode:
            return None
        requested_by = f"{flag_of('policy')} {config.policy}"
        logger.warning("reasoncache: %s asks for %s", requested_by, _UNTRIED)
        return make_cuda(model_runner, name, None, requested_by=requested_by)
    if config.positions == "as-cached":
        return None
    if on_cuda and not asked:
        # Kernels that no GPU has run yet are not the default.
        told = "shared keys are read as cached; --reasoncache-positions corrected asks for"
        logger.warning("reasoncache: %s %s", told, _UNTRIED)
        return None
    if prefill != decode:
        # Each would see only its own forwards, and the one that writes a slot writes its position.
        if asked:
            raise ValueError(
                "--reasoncache-positions corrected needs one attention backend for prefill and "
                f"decode, got {prefill} and {decode}"
            )
        return None
    try:
        if name == compat.CPU_BACKEND:
            return cpu_attention.make(model_runner, cached)
        if on_cuda:
            requested_by = f"{flag_of('positions')} corrected"
            return make_cuda(model_runner, name, cached, requested_by=requested_by)
        from sglang_reasoncache.attention.paged_cpu import CorrectedTorchNativeBackend

        return CorrectedTorchNativeBackend(model_runner, cached)
    except ValueError as error:
        if asked:
            raise
        logger.warning("reasoncache: --reasoncache-positions falls back to as-cached: %s", error)
        return None


def make_cuda(
    model_runner: ModelRunner, name: str, cached: CachedPositions | None, *, requested_by: str
) -> Any:
    """The backend of a scheduler process.

    ``name``: one of ``compat.CUDA_BACKENDS``. ``cached``: None reads every key as cached.
    ``requested_by``: the flag that does, the beginning of every message. Raises ValueError for
    what is not supported, by name, RuntimeError where SGLang could not apply a hook.
    """
    global _backend
    requested_by = f"{requested_by} over --attention-backend {name}"
    if torch.device(model_runner.device).type != "cuda" or torch.version.hip is not None:
        device = f"{model_runner.device} (ROCm)" if torch.version.hip else model_runner.device
        raise ValueError(f"{requested_by} needs an NVIDIA GPU, this server runs on {device}")
    refusals.check_corrected(model_runner.server_args, requested_by)
    kwargs = {}
    if name == "flashinfer":
        # As SGLang's registry does.
        kwargs["init_new_workspace"] = model_runner.init_new_workspace
    backend = backend_class(name)(model_runner, cached, requested_by=requested_by, **kwargs)
    if backend.paged.backend != "triton":
        raise ValueError(f"{requested_by} needs Triton kernels, which cannot be had here")
    backend.paged.warm_up()
    _install_hooks()
    _backend = backend
    return backend


def backend_class(name: str) -> type:
    """Our class over SGLang's backend ``name``. Raises ImportError where SGLang's is missing."""
    from sglang_reasoncache.attention.paged_cuda import SharedSlotReads

    stock = {"flashinfer": "FlashInferAttnBackend", "triton": "TritonAttnBackend"}[name]
    bases = (SharedSlotReads, getattr(compat, stock))
    return type(f"Corrected{stock}", bases, {"__module__": __name__})


def _install_hooks() -> None:
    batch, variants = (compat.CUDA_HOOK_TARGETS[key] for key in ("forward_batch", "graph_variants"))
    compat.apply_hooks({batch: (_after_forward_batch, compat.HookType.AFTER)})
    compat.apply_hooks({variants: (_around_graph_variants, compat.HookType.AROUND)})


def _after_forward_batch(
    result: Any, _cls: type, batch: Any, model_runner: ModelRunner, **_kwargs: Any
) -> None:
    """Batches without our tree (SGLang's own trial runs) stay unknown."""
    tree: Any = getattr(batch, "tree_cache", None)
    if _backend is None or model_runner.is_draft_worker or not hasattr(tree, "reads_shifted"):
        return
    # SGLang builds a batch on the stream that its forward runs on.
    with tree.controller.containment:
        shifted = _backend.mark.corrected and tree.reads_shifted(batch.reqs)
        _backend.mark.note(result.rids, shifted or tree.reads_evicted(batch.reqs))
        statistics, mode = _backend.paged.statistics, result.forward_mode
        if statistics is not None and not mode.is_idle():
            new = None if mode.is_decode() else result.extend_seq_lens_cpu
            prefill = statistics.begin(batch.req_pool_indices_cpu, batch.seq_lens_cpu, new)
            if prefill is not None:
                _backend.expect(result.rids, prefill)


def _around_graph_variants(original: Callable[[Any], Any], hf_config: Any) -> Any:
    variants = original(hf_config)
    if _backend is None:
        return variants
    if variants is not None:
        own = f"variants of their own ({', '.join(variants.capture_labels)})"
        raise ValueError(f"{_backend.requested_by}: this model's decode graphs have {own}")
    from sglang_reasoncache.attention.paged_cuda import GraphVariants

    return GraphVariants(_backend)

# SPDX-License-Identifier: Apache-2.0
"""Makes a server's attention backend and what other parts take from it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig, flag_of
from sglang_reasoncache.eviction.attention import needs_of
from sglang_reasoncache.eviction.policies.contract import ATTENTION, UNROTATED_KEYS
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.plugin import cpu_attention, cuda_attention, refusals

if TYPE_CHECKING:
    from sglang_reasoncache.attention.paged import PagedAttention
    from sglang_reasoncache.compat.types import ModelRunner
    from sglang_reasoncache.eviction.statistics import AttentionStatistics
    from sglang_reasoncache.selection.page_selection import PageSelection

logger = logging.getLogger(__name__)
_UNTRIED = "kernels that were checked without a GPU only"


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
    """Our backend where the operator's choice allows it, else the ``stock`` one.

    ``name``: one of ``compat.CORRECTABLE_BACKENDS``. ``cached`` is written by our backend.
    Raises ValueError where ours was requested and is not supported, or memory is missing.
    """
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
            raise ValueError(
                f"{flag_of('policy')} {config.policy} keeps the weights of the newest "
                f"{needs.latest} queries (window of snapkv, alpha of rkv) apart: {error}; lower "
                "that, or --context-length"
            ) from error
    if selector is not None:
        refusals.check_selected_page(selector.name, paged.allocator.page_size)
        try:
            selection = paged.select(*selector)
        except MemoryError as error:
            raise ValueError(
                f"{flag_of('policy')} {selector.name} keeps the least and largest key of each page "
                f"beside the pool: {error}; lower --mem-fraction-static, or raise --page-size"
            ) from error
    return backend, AttentionParts(paged.rotation, statistics, selection, backend.skips_evicted)


def resolve_positions(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> ReasonCacheConfig:
    """``config`` with ``--reasoncache-positions auto`` resolved by what the backend can do.

    Raises ValueError where corrected positions were requested and are not supported.
    """
    resolved = config.positions.replace("auto", "corrected")
    if parts.rotation is None:
        if config.positions == "corrected":
            raise ValueError(
                "--reasoncache-positions corrected needs --attention-backend "
                f"{', '.join(compat.CORRECTABLE_BACKENDS)}, this server runs "
                f"{model_runner.decode_attention_backend_str}; use as-cached with it"
            )
        resolved = "as-cached"
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
        if UNROTATED_KEYS in policy.needs and not config.corrected:
            raise ValueError(
                f"{flag_of('policy')} {name} needs unrotated keys, which takes "
                f"--reasoncache-positions corrected, got {config.positions}"
            )
        if ATTENTION in policy.needs and parts.statistics is None:
            raise ValueError(
                f"{flag_of('policy')} {name} needs attention statistics, which --attention-backend "
                f"{decode} does not give; use {' or '.join(compat.EVICTION_BACKENDS)}"
            )


def _own_backend(
    model_runner: ModelRunner, config: ReasonCacheConfig, name: str, cached: CachedPositions
) -> Any:
    """None where SGLang's serves as it is."""
    prefill = model_runner.prefill_attention_backend_str
    decode = model_runner.decode_attention_backend_str
    on_cuda, asked = name in compat.CUDA_BACKENDS, config.positions == "corrected"
    needs_ours = config.evictions or config.policies.selector is not None
    if model_runner.is_draft_worker:
        return None
    if on_cuda and needs_ours and not asked:
        # Keys as cached: our kernels run what a policy needs, SGLang's everything else.
        # Two backends are refused by check_policies, with both names.
        if prefill != decode:
            return None
        requested_by = f"{flag_of('policy')} {config.policy}"
        logger.warning("reasoncache: %s asks for %s", requested_by, _UNTRIED)
        return cuda_attention.make(model_runner, name, None, requested_by=requested_by)
    if config.positions == "as-cached":
        return None
    if on_cuda and not asked:
        # Kernels that no GPU has run yet are not the default.
        logger.warning(
            "reasoncache: shared keys are read as cached; --reasoncache-positions corrected asks "
            "for %s",
            _UNTRIED,
        )
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
            return cuda_attention.make(model_runner, name, cached, requested_by=requested_by)
        from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend

        return CorrectedTorchNativeBackend(model_runner, cached)
    except ValueError as error:
        if asked:
            raise
        logger.warning("reasoncache: --reasoncache-positions falls back to as-cached: %s", error)
        return None

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
from sglang_reasoncache.plugin import refusals

if TYPE_CHECKING:
    from sglang_reasoncache.attention.paged import PagedAttention
    from sglang_reasoncache.compat.types import ModelRunner
    from sglang_reasoncache.eviction.statistics import AttentionStatistics
    from sglang_reasoncache.selection.page_selection import PageSelection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionParts:
    """What a server's attention backend can do.

    Attributes:
        rotation: Rotates keys to where they are used; None: keys are read as cached.
        statistics: Attention statistics; None: no policy needs them.
        selection: Which pages a decode step reads; None: all.
        skips_evicted: Evicted positions are not read.
    """

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
    """Our backend where the operator's choice allows it, else the stock one.

    Args:
        name: One of ``compat.CORRECTABLE_BACKENDS``.
        stock: Makes the backend of that name without correction.
        cached: Slots' cached positions; written by our backend.

    Raises:
        ValueError: our backend was requested and is not supported, or memory is missing.
    """
    backend = _backend(model_runner, config, name, stock, cached)
    paged: PagedAttention | None = getattr(backend, "paged", None)
    if paged is None:
        return backend, AttentionParts(rotation=getattr(backend, "rotation", None))
    decode = model_runner.decode_attention_backend_str
    if model_runner.prefill_attention_backend_str != decode:
        return backend, AttentionParts(paged.rotation)
    made = _made_for_policies(paged, config)
    return backend, AttentionParts(paged.rotation, *made, backend.skips_evicted)


def _made_for_policies(
    paged: PagedAttention, config: ReasonCacheConfig
) -> tuple[AttentionStatistics | None, PageSelection | None]:
    """What the policies need of attention."""
    statistics = selection = None
    needs = needs_of(config.policies.evictors)
    if needs is not None:
        try:
            statistics = paged.keep_statistics(needs)
        except MemoryError as error:
            raise ValueError(refusals.no_memory_for_weights(config, needs, error)) from error
    selector = config.policies.selector
    if selector is not None:
        refusals.check_selected_page(selector.name, paged.allocator.page_size)
        try:
            selection = paged.select(*selector)
        except MemoryError as error:
            raise ValueError(refusals.no_memory_for_bounds(selector.name, error)) from error
    return statistics, selection


def resolve_positions(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> ReasonCacheConfig:
    """``config`` with ``--reasoncache-positions auto`` resolved by what the backend can do.

    Raises:
        ValueError: corrected positions were requested and are not supported.
    """
    if config.positions == "corrected" and parts.rotation is None:
        raise ValueError(
            "--reasoncache-positions corrected needs --attention-backend "
            f"{', '.join(compat.CORRECTABLE_BACKENDS)}, this server runs "
            f"{model_runner.decode_attention_backend_str}; use as-cached with it"
        )
    resolved = config.positions.replace("auto", "corrected")
    if parts.rotation is None:
        resolved = "as-cached"
    if resolved != config.positions:
        logger.warning("reasoncache: --reasoncache-positions auto is %s here", resolved)
    return dataclasses.replace(config, positions=resolved)


def check_policies(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> None:
    """Refuse policies that this server's attention does not support.

    Raises:
        ValueError: evicted positions would be read, keys cannot be un-rotated, there are no
            attention statistics, or nothing is selected.
    """
    decode = model_runner.decode_attention_backend_str
    names = " and ".join(sorted({model_runner.prefill_attention_backend_str, decode}))
    flag = "--attention-backend"
    selector = config.policies.selector
    if selector is not None and parts.selection is None:
        raise ValueError(refusals.reads_everything(selector.name, flag, names))
    evictors = config.policies.evictors
    if evictors and not parts.skips_evicted:
        raise ValueError(refusals.reads_evicted(config, flag, names))
    for name, policy in evictors:
        if UNROTATED_KEYS in policy.needs and not config.corrected:
            raise ValueError(
                f"{flag_of('policy')} {name} needs unrotated keys, which takes "
                f"--reasoncache-positions corrected, got {config.positions}"
            )
        if ATTENTION in policy.needs and parts.statistics is None:
            raise ValueError(refusals.tells_no_weights(name, flag, decode))


def _backend(
    model_runner: ModelRunner,
    config: ReasonCacheConfig,
    name: str,
    stock: Callable[[ModelRunner], Any],
    cached: CachedPositions,
) -> Any:
    if model_runner.is_draft_worker:
        return stock(model_runner)
    prefill = model_runner.prefill_attention_backend_str
    decode = model_runner.decode_attention_backend_str
    on_cuda = name in compat.CUDA_BACKENDS
    needs_ours = config.evictions or config.policies.selector is not None
    if on_cuda and needs_ours and config.positions != "corrected":
        # Keys as cached: our kernels run what a policy needs, SGLang's everything else.
        # Two backends are refused by check_policies, with both names.
        if prefill != decode:
            return stock(model_runner)
        from sglang_reasoncache.plugin import cuda_attention

        requested_by = f"{flag_of('policy')} {config.policy}"
        logger.warning(
            "reasoncache: %s asks for kernels that were checked without a GPU only", requested_by
        )
        return cuda_attention.make(model_runner, name, None, requested_by=requested_by)
    if config.positions == "as-cached":
        return stock(model_runner)
    if config.positions == "auto" and on_cuda:
        # Kernels that no GPU has run yet are not the default.
        logger.warning(
            "reasoncache: shared keys are read as cached; --reasoncache-positions corrected asks "
            "for kernels that were checked without a GPU only"
        )
        return stock(model_runner)
    if prefill != decode:
        # Each would see only its own forwards, and a slot's cached position is
        # written by the forward that writes the slot.
        if config.positions == "corrected":
            raise ValueError(
                "--reasoncache-positions corrected needs one attention backend for prefill and "
                f"decode, got {prefill} and {decode}"
            )
        return stock(model_runner)
    try:
        return _corrected_backend(model_runner, name, cached)
    except ValueError as error:
        if config.positions == "corrected":
            raise
        logger.warning("reasoncache: --reasoncache-positions falls back to as-cached: %s", error)
        return stock(model_runner)


def _corrected_backend(model_runner: ModelRunner, name: str, cached: CachedPositions) -> Any:
    if name == compat.CPU_BACKEND:
        from sglang_reasoncache.plugin import cpu_attention

        return cpu_attention.make(model_runner, cached)
    if name in compat.CUDA_BACKENDS:
        from sglang_reasoncache.plugin import cuda_attention

        requested_by = f"{flag_of('positions')} corrected"
        return cuda_attention.make(model_runner, name, cached, requested_by=requested_by)
    from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend

    return CorrectedTorchNativeBackend(model_runner, cached)

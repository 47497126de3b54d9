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
from sglang_reasoncache.eviction.policies.contract import ATTENTION, UNROTATED_KEYS, needs_of
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.plugin import refusals

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

    Raises:
        ValueError: our backend was requested and is not supported, or memory is missing.
    """
    backend = _backend(model_runner, config, name, stock, cached)
    paged: PagedAttention | None = getattr(backend, "paged", None)
    if paged is None:
        return backend, AttentionParts(getattr(backend, "rotation", None))
    if model_runner.prefill_attention_backend_str != model_runner.decode_attention_backend_str:
        return backend, AttentionParts(paged.rotation)
    statistics, selection = _made_for_policies(paged, config)
    return backend, AttentionParts(paged.rotation, statistics, selection, backend.skips_evicted)


def _made_for_policies(
    paged: PagedAttention, config: ReasonCacheConfig
) -> tuple[AttentionStatistics | None, PageSelection | None]:
    statistics = selection = None
    needs, selector = needs_of(config.policies.evictors), config.policies.selector
    if needs is not None:
        try:
            statistics = paged.keep_statistics(needs)
        except MemoryError as error:
            raise refusals.of_policy(
                refusals.NO_MEMORY_FOR_WEIGHTS, config.policy, queries=needs.latest, error=error
            ) from error
    if selector is not None:
        refusals.check_selected_page(selector.name, paged.allocator.page_size)
        try:
            selection = paged.select(*selector)
        except MemoryError as error:
            reason = refusals.NO_MEMORY_FOR_BOUNDS
            raise refusals.of_policy(reason, selector.name, error=error) from error
    return statistics, selection


def resolve_positions(
    config: ReasonCacheConfig, parts: AttentionParts, model_runner: ModelRunner
) -> ReasonCacheConfig:
    """``config`` with ``--reasoncache-positions auto`` resolved by what the backend can do.

    Raises:
        ValueError: corrected positions were requested and are not supported.
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
    both, evictors = f"--attention-backend {names}", config.policies.evictors
    selector = config.policies.selector
    if selector is not None and parts.selection is None:
        raise refusals.of_policy(refusals.READS_EVERYTHING, selector.name, backend=both)
    if evictors and not parts.skips_evicted:
        raise refusals.of_policy(refusals.READS_EVICTED, config.policy, backend=both)
    for name, policy in evictors:
        if UNROTATED_KEYS in policy.needs and not config.corrected:
            raise ValueError(
                f"{flag_of('policy')} {name} needs unrotated keys, which takes "
                f"--reasoncache-positions corrected, got {config.positions}"
            )
        if ATTENTION in policy.needs and parts.statistics is None:
            backend = f"--attention-backend {decode}"
            raise refusals.of_policy(refusals.NO_STATISTICS, name, backend=backend)


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
        requested_by = f"{flag_of('policy')} {config.policy}"
        logger.warning("reasoncache: %s asks for %s", requested_by, _UNTRIED)
        return _cuda_backend(model_runner, name, None, requested_by)
    if config.positions == "as-cached":
        return stock(model_runner)
    if config.positions == "auto" and on_cuda:
        # Kernels that no GPU has run yet are not the default.
        logger.warning(
            "reasoncache: shared keys are read as cached; --reasoncache-positions corrected asks "
            "for %s",
            _UNTRIED,
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


def _cuda_backend(
    model_runner: ModelRunner, name: str, cached: CachedPositions | None, requested_by: str
) -> Any:
    from sglang_reasoncache.plugin import cuda_attention

    return cuda_attention.make(model_runner, name, cached, requested_by=requested_by)


def _corrected_backend(model_runner: ModelRunner, name: str, cached: CachedPositions) -> Any:
    if name == compat.CPU_BACKEND:
        from sglang_reasoncache.plugin import cpu_attention

        return cpu_attention.make(model_runner, cached)
    if name in compat.CUDA_BACKENDS:
        return _cuda_backend(model_runner, name, cached, f"{flag_of('positions')} corrected")
    from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend

    return CorrectedTorchNativeBackend(model_runner, cached)

# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of a scheduler process together from what SGLang built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.tree import SharedRadixCache
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.apply import EvictionApplier
from sglang_reasoncache.eviction.attention import AttentionSource
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.eviction.keys import KeySource
from sglang_reasoncache.eviction.pressure import PoolPressure, pool_use
from sglang_reasoncache.filter.span import ReasoningMarkers
from sglang_reasoncache.metrics import SharingMetrics
from sglang_reasoncache.plugin import attention, refusals
from sglang_reasoncache.plugin.controller import Controller
from sglang_reasoncache.plugin.encoder import make_encoder
from sglang_reasoncache.plugin.engines import make_engine
from sglang_reasoncache.plugin.report import Report
from sglang_reasoncache.plugin.span import reasoning_markers
from sglang_reasoncache.sharing.acceptor import Acceptor
from sglang_reasoncache.sharing.calibrated import CalibratedThreshold, filter_config
from sglang_reasoncache.sharing.measure import BlockMeter
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.ranks import Ranks
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

logger = logging.getLogger(__name__)


def shared_allocator(stock: Any) -> Any:
    """Our allocator in place of ``stock``, with the slots' cached positions attached.

    Raises:
        ValueError: a pool whose buffers are not ``[slots, heads, head_dim]``.
    """
    pool = stock.get_kvcache()
    plain = (
        type(pool) is compat.MHATokenToKVPool
        and pool.kv_cache_layout == "nhd"
        and not pool.is_quantized_kv_cache
    )
    if not plain:
        raise ValueError(
            "--enable-reasoncache supports models with one plain multi-head KV pool in NHD layout "
            f"without block quantisation, this server uses {type(pool).__name__} "
            f"({getattr(pool, 'kv_cache_layout', 'own layout')})"
        )
    allocator = shared_allocator_of(stock)
    num_slots = pool.get_key_buffer(pool.start_layer).shape[0]
    allocator.cached_at = CachedPositions(num_slots, allocator.device)
    # TODO(w-core): filled in by attention_backend.
    allocator.attention_parts = attention.AttentionParts()
    return allocator


def attention_backend(
    model_runner: Any, config: ReasonCacheConfig, name: str, stock: Callable[[Any], Any]
) -> Any:
    """See :func:`~sglang_reasoncache.plugin.attention.attention_backend`."""
    # TODO(w-core): keep the parts in one object instead of on the allocator.
    allocator = model_runner.token_to_kv_pool_allocator
    backend, parts = attention.attention_backend(
        model_runner, config, name, stock, allocator.cached_at
    )
    allocator.attention_parts = parts
    return backend


def tree(context: Any, config: ReasonCacheConfig) -> SharedRadixCache:
    """Prefix cache with its controller. ``context``: SGLang's ``TreeCacheBuildContext``.

    Raises:
        ValueError: a model or pool that cannot be served.
    """
    if context.is_hybrid_swa or context.is_hybrid_ssm or context.is_dsa:
        raise ValueError(
            "--enable-reasoncache supports full-attention models only (no sliding window, state space or DSA)"
        )
    params = context.params
    refusals.check_page_size(params.page_size)
    allocator = params.token_to_kv_pool_allocator
    parts = allocator.attention_parts
    config = attention.resolve_positions(config, parts, context.tp_worker.model_runner)
    attention.check_policies(config, parts, context.tp_worker.model_runner)
    rows = params.req_to_token_pool
    pool = allocator.get_kvcache()
    group = params.tp_cache_group if context.tp_size > 1 else None
    ranks = Ranks(group)
    block = params.page_size if params.page_size > 1 else config.block
    # What is read of the pool's keys, and with whom sums are shared.
    reads = (
        pool,
        rows.req_to_token,
        allocator.cached_at,
        parts.rotation if config.corrected else None,
        pool.head_num * context.tp_size,
        group,
    )
    meter = BlockMeter(*reads, cosine=config.distance == "cosine")
    meter.warm_up(block)
    tokenizer = context.tp_worker.tokenizer
    markers = _markers(context, config, tokenizer)
    engine = make_engine(
        config,
        filter_config(config, block, params.page_size),
        tokenizer,
        markers,
        make_encoder(config, context.tp_worker.model_runner.model, context),
    )
    if ranks.first(engine.name) != engine.name:
        # They would shed and compare differently.
        raise ValueError(
            f"--reasoncache-engine: this tensor-parallel rank has only {engine.name}, the first "
            "one another; give all of them a C++ compiler or none (--reasoncache-engine python)"
        )
    keys = KeySource(*reads)
    weights = None
    if parts.statistics is not None:
        heads = context.model_config.num_attention_heads * pool.layer_num
        weights = AttentionSource(parts.statistics, heads, group)
    stats = SharingStats()
    threshold = CalibratedThreshold(
        config,
        block,
        params.page_size,
        model_key=_model_key(context, pool),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        model_path=context.server_args.model_path,
        writes=context.tp_rank == 0,
        agree=ranks.first,
    )
    tracker = RequestTracker(engine, stats, ranks, config.shares, markers)
    acceptor = Acceptor(allocator, rows, meter, copies=config.apply == "copy")
    pipeline = BlockPipeline(tracker, meter, acceptor, threshold, stats, ranks, block)
    eviction = EvictionController(
        config.policies.evictors,
        EvictionApplier(allocator, rows),
        keys,
        params.page_size,
        # The tree is made below.
        PoolPressure(lambda: pool_use(allocator, cache)),
        weights,
    )
    metrics = SharingMetrics(_labels(context)) if params.enable_metrics else None
    report = Report(config, stats, pipeline, eviction, engine.name, metrics, parts.selection)
    controller = Controller(config, stats, tracker, pipeline, eviction, report)
    if config.admission_credit > 0 and config.apply == "alias":
        allocator.credit_source = lambda: controller.forecast.credit
    cache = SharedRadixCache(
        params, publish_aliased=config.publish == "aliased" and config.apply == "alias"
    )
    cache.controller = controller
    logger.info(
        "reasoncache: on, block %d, page %d, steps by %s, distances by %s, %s",
        block,
        params.page_size,
        engine.name,
        meter.backend,
        config,
    )
    return cache


def _markers(context: Any, config: ReasonCacheConfig, tokenizer: Any) -> ReasoningMarkers | None:
    """Tokens around the reasoning part, None where all output may share.

    Raises:
        ValueError: ``--reasoncache-span reasoning`` without a parser that can be followed.
    """
    if config.span == "response":
        return None
    markers = reasoning_markers(context.server_args.reasoning_parser, tokenizer)
    if markers is None and config.span == "reasoning":
        raise ValueError(
            "--reasoncache-span reasoning needs a --reasoning-parser whose markers are single "
            f"tokens of the model, got {context.server_args.reasoning_parser!r}"
        )
    return markers


def _model_key(context: Any, pool: Any) -> str:
    """What distances depend on; a stored histogram is only read for the same key."""
    config = context.model_config.hf_config
    return "/".join(
        str(part)
        for part in (
            getattr(config, "model_type", "unknown"),
            f"layers{pool.layer_num}",
            f"heads{pool.head_num * context.tp_size}",
            f"dim{pool.head_dim}",
            f"vocab{getattr(config, 'vocab_size', 0)}",
        )
    )


def _labels(context: Any) -> dict[str, Any]:
    """Labels of SGLang's own scheduler series, as far as they tell servers apart."""
    parallel = compat.get_parallel()
    return {
        "model_name": context.server_args.served_model_name or context.server_args.model_path,
        "tp_rank": context.tp_rank,
        "dp_rank": parallel.dp_rank if parallel.dp_size > 1 else 0,
        **(compat.get_observability().extra_metric_labels or {}),
    }

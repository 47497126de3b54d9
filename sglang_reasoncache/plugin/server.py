# SPDX-License-Identifier: Apache-2.0
"""The parts of a scheduler process, built in the order in which SGLang builds its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention import served
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.tree import SharedRadixCache, publish_aliased
from sglang_reasoncache.compat.types import ModelRunner, SlotAllocator, TreeCacheBuildContext
from sglang_reasoncache.config import ReasonCacheConfig, filter_config, flag_of
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.filter.vocabulary import vocabulary_of
from sglang_reasoncache.plugin import attention, refusals
from sglang_reasoncache.plugin.controller import Controller
from sglang_reasoncache.plugin.report import Report, SharingMetrics
from sglang_reasoncache.plugin.step_filter import make_encoder, reasoning_markers
from sglang_reasoncache.sharing.acceptor import Acceptor
from sglang_reasoncache.sharing.calibration import CalibratedThreshold, CalibrationKey
from sglang_reasoncache.sharing.measure import BlockMeter
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

logger = logging.getLogger(__name__)


class ServerParts:
    """One per scheduler process: allocator first, then attention, then the prefix tree.

    ``stock``: SGLang's allocator, just made; ours takes its place. Raises ValueError for a pool
    whose buffers are not ``[slots, heads, head_dim]``.
    """

    def __init__(self, config: ReasonCacheConfig, stock: SlotAllocator) -> None:
        pool = stock.get_kvcache()
        served.check_pool(pool)
        self.config = config
        self.allocator = shared_allocator_of(stock)
        num_slots = pool.get_key_buffer(pool.start_layer).shape[0]
        self.cached = CachedPositions(num_slots, self.allocator.device)
        self.attention = attention.AttentionParts()
        self.uncorrected: str | None = None
        self.controller: Controller | None = None

    def attention_backend(
        self, model_runner: ModelRunner, name: str, stock: Callable[[ModelRunner], Any]
    ) -> Any:
        made = attention.attention_backend(model_runner, self.config, name, stock, self.cached)
        backend, self.attention = made
        return backend

    def tree(self, context: TreeCacheBuildContext) -> SharedRadixCache:
        """With its controller. Raises ValueError for what is not supported."""
        served.check_kind(context)
        params, runner = context.params, context.tp_worker.model_runner
        refusals.check_page_size(params.page_size)
        asked, parts = self.config, self.attention
        self.config, self.uncorrected = attention.resolve_positions(asked, parts, runner)
        config = self.config
        attention.check_policies(config, self.attention, runner)
        if config.publish == "aliased" and config.apply == "alias":
            publish_aliased(params)
        tree: SharedRadixCache
        tree = compat.create_unified_radix_cache(context, cache_class=SharedRadixCache)
        self.controller = controller = self._controller(context, tree)
        tree.controller = controller
        self.allocator.once_more = controller.containment.once_more
        if config.apply == "alias":
            self.allocator.shareable, self.allocator.reclaim = (
                controller.shareable,
                controller.reclaim,
            )
            self.allocator.refused = controller.pipeline.refused
        if config.admission_credit > 0 and config.apply == "alias":
            self.allocator.credit_source = lambda: controller.forecast.credit
        return tree

    def _controller(self, context: TreeCacheBuildContext, tree: SharedRadixCache) -> Controller:
        config, params = self.config, context.params
        pool, rows = self.allocator.get_kvcache(), params.req_to_token_pool
        group = params.tp_cache_group if context.tp_size > 1 else None
        ranks, stats = Ranks(group), SharingStats()
        page = params.page_size
        block = page if page > 1 else config.block
        rotation = self.attention.rotation if config.positions == "corrected" else None
        num_heads = pool.head_num * context.tp_size
        reads = pool, rows.req_to_token, self.cached, rotation, num_heads, ranks
        meter = BlockMeter(*reads)
        if config.shares:
            meter.warm_up(block)
        worker, markers = context.tp_worker, _markers(context, config)
        engine = None
        if config.shares:
            knobs = filter_config(config, block, page)
            vocabulary = vocabulary_of(worker.tokenizer)
            ids = None if markers is None else markers[:2]
            encoder = make_encoder(config, worker.model_runner.model, context) or ("", None)
            engine = FilterProcess(knobs, vocabulary, ids, config.max_pending, *encoder)
        groups = config.scope == "prompt"
        tracker = RequestTracker(engine, stats, ranks, markers, groups)
        acceptor = Acceptor(self.allocator, rows, meter, copies=config.apply == "copy")
        # Each rank holds other weights.
        key = agreed(ranks, self._calibration_key(context, block))
        path = context.server_args.model_path
        writes = context.tp_rank == 0
        threshold = CalibratedThreshold(config, key, path, writes, agree=ranks.first)
        use = functools.partial(_pool_use, self.allocator, tree)
        parts = tracker, meter, acceptor, threshold, block, config.min_age, config.shares_at_once
        pipeline = BlockPipeline(*parts, use)
        stream = worker.model_runner.forward_stream if self.cached.positions.is_cuda else None
        source = KeySource(*reads[:4], queries=self.attention.queries, stream=stream)
        evictors = config.policies.evictors
        eviction = EvictionController(evictors, self.allocator, rows, source, ranks)
        metrics = SharingMetrics(_labels(context)) if params.enable_metrics else None
        others = metrics, self.attention.selection, self.uncorrected
        report = Report(config, stats, pipeline, eviction, *others)
        told = "reasoncache: %s, block %d, page %d, distances by %s, %s"
        begins = "on" if config.is_active else "idle"
        logger.info(told, begins, block, page, meter.backend, config)
        return Controller(config, stats, tracker, pipeline, eviction, report)

    def _calibration_key(self, context: TreeCacheBuildContext, block: int) -> CalibrationKey:
        config, pool = self.config, self.allocator.get_kvcache()
        model = context.model_config.hf_config
        parts = (
            getattr(model, "model_type", "unknown"),
            f"layers{pool.layer_num}",
            f"heads{pool.head_num * context.tp_size}",
            f"dim{pool.head_dim}",
            f"vocab{getattr(model, 'vocab_size', 0)}",
            f"page{context.params.page_size}",
            config.align if config.match == "steps" else config.match,
            *(["across"] if config.scope == "prompt" else []),
            f"weights{fingerprint(context.tp_worker.model_runner.model)}",
        )
        dtype = str(pool.dtype).removeprefix("torch.")
        return CalibrationKey("/".join(parts), block, config.positions, dtype)


def _pool_use(allocator: Any, tree: Any) -> float:
    """Share of the slots that are neither free nor evictable, as SGLang's log line has it."""
    return 1.0 - (allocator.available_size() + tree.evictable_size()) / allocator.size


def agreed(ranks: Ranks, own: CalibrationKey) -> CalibrationKey:
    """The first rank's. Raises ValueError where keys can be corrected on one of both only."""
    first: CalibrationKey = ranks.first(own)
    if own.positions != first.positions:
        told = f"{own.positions} on this tensor-parallel rank, {first.positions} on the first"
        raise ValueError(f"{flag_of('positions')} auto is {told}; corrected says why")
    return first


def fingerprint(model: torch.nn.Module) -> str:
    """16 hexadecimal digits out of the first numbers, at most 64, of each parameter as it is loaded.

    A fine-tune of the same shape has other ones, unless it left all of these as they were.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        # Kinds of parameters that have no such numbers (sparse, lazy, distributed) raise.
        with contextlib.suppress(RuntimeError, ValueError, TypeError, NotImplementedError):
            if weight.numel() and not weight.is_meta:
                # Without a copy of the whole parameter.
                first = weight.detach()[(0,) * (weight.ndim - 1)].reshape(-1)[:64].cpu()
                digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _markers(context: TreeCacheBuildContext, config: ReasonCacheConfig) -> ReasoningMarkers | None:
    """Tokens around the reasoning part, None where all output may share."""
    if config.span == "response":
        return None
    parser = context.server_args.reasoning_parser
    markers = reasoning_markers(parser, context.tp_worker.tokenizer)
    if markers is None and config.span == "reasoning":
        raise ValueError(
            "--reasoncache-span reasoning needs a --reasoning-parser whose markers are single "
            f"tokens of the model, got {parser!r}"
        )
    return markers


def _labels(context: TreeCacheBuildContext) -> dict[str, Any]:
    """Labels of SGLang's own scheduler series, as far as they tell servers apart."""
    parallel = compat.get_parallel()
    return {
        "model_name": context.server_args.served_model_name or context.server_args.model_path,
        "tp_rank": context.tp_rank,
        "dp_rank": parallel.dp_rank if parallel.dp_size > 1 else 0,
        **(compat.get_observability().extra_metric_labels or {}),
    }

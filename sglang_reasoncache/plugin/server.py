# SPDX-License-Identifier: Apache-2.0
"""Builds the plugin's parts in a scheduler process: allocator, attention backend, prefix tree, controller."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.attention import models, rotations
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.cache.tree import SharedRadixCache
from sglang_reasoncache.compat.types import ModelRunner, SlotAllocator, TreeCacheBuildContext
from sglang_reasoncache.config import ReasonCacheConfig, filter_config, flag_of
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.filter.vocabulary import vocabulary_of
from sglang_reasoncache.plugin import attention, refusals
from sglang_reasoncache.plugin.controller import Controller
from sglang_reasoncache.plugin.reasoning import reasoning_markers
from sglang_reasoncache.plugin.report import Report, SharingMetrics
from sglang_reasoncache.sharing.measure import AdaptiveThreshold, BlockMeter
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.redirect import Redirector
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

logger = logging.getLogger(__name__)


class ServerParts:
    """The plugin's parts in a scheduler process. SGLang asks for the allocator first, then for the
    attention backends, then for the prefix tree. The controller is built together with the tree.

    ``stock``: SGLang's allocator, which ours replaces. Raises ValueError for a KV pool that the plugin or an
    evicting policy does not support."""

    def __init__(self, config: ReasonCacheConfig, stock: SlotAllocator) -> None:
        pool = stock.get_kvcache()
        models.check_pool(pool)
        attention.check_latent_policies(config, pool)
        self.config = config
        self.allocator = shared_allocator_of(stock)
        num_slots = pool.get_key_buffer(compat.shared_layers(pool)[0]).shape[0]
        self.cached = CachedPositions(num_slots, self.allocator.device)
        self.attention = attention.AttentionParts()
        self.uncorrected: str | None = None
        self.controller: Controller | None = None
        #: Number of ranks over which the attention heads of a request are spread.
        self.attention_ranks: int = compat.get_parallel().attn_tp_size

    def attention_backend(
        self, model_runner: ModelRunner, name: str, stock: Callable[[ModelRunner], Any]
    ) -> Any:
        self._read_as_cached(model_runner)
        backend, self.attention = attention.attention_backend(
            model_runner, self.config, name, stock, self.cached
        )
        return backend

    def _read_as_cached(self, model_runner: ModelRunner) -> None:
        """Set ``positions`` to ``as-cached`` if the model does not rotate its keys: they need no correction."""
        if rotations.is_without_positions(model_runner.model):
            self.config = dataclasses.replace(self.config, positions="as-cached")

    def tree(self, context: TreeCacheBuildContext) -> SharedRadixCache:
        """Build the prefix tree and its controller. Raises ValueError for a model or setting that is not
        supported."""
        models.check_kind(context)
        pool = self.allocator.get_kvcache()
        models.check_latent(pool, context.server_args)
        params, runner = context.params, context.tp_worker.model_runner
        refusals.check_page_size(params.page_size)
        # Done here too, because :meth:`attention_backend` is not called if SGLang chose a backend that we
        # do not extend.
        self._read_as_cached(runner)
        config, self.uncorrected = attention.resolve_positions(self.config, self.attention, runner)
        attention.check_policies(config, self.attention, runner)
        if config.shares and params.page_size > 1:
            told = "a repeat shares only if it begins at the same place of a page; --page-size 1 shares more"
            logger.warning(f"reasoncache: at --page-size {params.page_size} {told}")
        # A block may share only after the sliding window has passed it.
        age = max(config.min_age, models.window_age(context))
        self.config = config = dataclasses.replace(config, min_age=age)
        tree: SharedRadixCache
        tree = compat.create_unified_radix_cache(context, cache_class=SharedRadixCache)
        self.controller = controller = self._controller(context, tree)
        tree.controller = controller
        self.allocator.controller = controller
        tree.record_path = functools.partial(
            self.cached.record_path, stream=self._forward_stream(runner)
        )
        self.allocator.once_more = controller.containment.once_more
        controller.report.documents_off = self._documents_off(tree)
        tree.composes = controller.report.documents_off is None
        return tree

    def _documents_off(self, tree: SharedRadixCache) -> str | None:
        """Why prompts are not composed of cached documents. None if prompts are composed."""
        pool = self.allocator.get_kvcache()
        reasons = {
            "keys are read as cached": self.config.positions != "corrected",
            "the page size is above 1": self.allocator.page_size > 1,
            "the prefix cache is off": tree.disable,
            "state layers have no state of a moved document": tree.is_mamba_enabled,
            "layers with a sliding window read prefixes as cached": tree.is_swa_enabled,
            "latent attention reads prefixes as cached": bool(compat.latent_rank(pool)),
            "a host tier may hold a document": tree.cache_controller is not None,
            "a policy evicts positions": bool(self.config.policies.evictors),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _controller(self, context: TreeCacheBuildContext, tree: SharedRadixCache) -> Controller:
        config, params, stats = self.config, context.params, SharingStats()
        # The ranks of ``tp_cache_group`` run the same requests.
        ranks = Ranks(params.tp_cache_group if self.attention_ranks > 1 else None)
        corrects = config.positions == "corrected"
        check_alike(Ranks(context.tp_group.cpu_group if context.tp_size > 1 else None), corrects)
        source = KeySource(
            pool=self.allocator.get_kvcache(),
            rows=params.req_to_token_pool.req_to_token,
            cached_at=self.cached,
            rotations=self.attention.rotations if corrects else None,
            queries=self.attention.queries,
            stream=self._forward_stream(context.tp_worker.model_runner),
        )
        allocator = self.allocator

        def use() -> float:
            # The fraction of slots that are neither free nor evictable. SGLang logs it as ``token usage``.
            return 1.0 - (allocator.free_size() + tree.evictable_size()) / allocator.size_full

        pipeline = self._pipeline(context, source, stats, ranks, use)
        rows, evictors = params.req_to_token_pool, config.policies.evictors
        eviction = EvictionController(evictors, self.allocator, rows, source, stats, ranks)
        metrics = SharingMetrics(_labels(context)) if params.enable_metrics else None
        parts = config, stats, pipeline, eviction, metrics, self.uncorrected
        report = Report(*parts, dp_rank=_dp_rank())
        told = "reasoncache: %s, block %d, page %d, distances by %s, %s"
        begins, backend = "on" if config.is_active else "idle", pipeline.meter.backend
        logger.info(told, begins, pipeline.block, params.page_size, backend, config)
        return Controller(config, stats, pipeline.tracker, pipeline, eviction, report)

    def _forward_stream(self, runner: ModelRunner) -> Any:
        return runner.forward_stream if self.cached.positions.is_cuda else None

    def _pipeline(
        self,
        context: TreeCacheBuildContext,
        source: KeySource,
        stats: SharingStats,
        ranks: Ranks,
        use: Callable[[], float],
    ) -> BlockPipeline:
        config, params, page = self.config, context.params, context.params.page_size
        block = page if page > 1 else config.block
        pool = source.pool
        # With latent attention all n ranks hold the same rows. ``BlockMeter`` adds up squares over ranks, so
        # the root of a sum is sqrt(n) times too large. Dividing by ``heads`` corrects this.
        latent = bool(compat.latent_rank(pool))
        heads = math.sqrt(self.attention_ranks) if latent else pool.head_num * self.attention_ranks
        meter = BlockMeter(*source[:4], heads, ranks)
        markers, process = _markers(context, config), None
        if config.shares:
            meter.warm_up(block)
            knobs = filter_config(config, block, page)
            vocabulary = vocabulary_of(context.tp_worker.tokenizer)
            ids = None if markers is None else markers[:2]
            process = FilterProcess(knobs, vocabulary, ids, config.max_pending)
        tracker = RequestTracker(process, stats, ranks, markers, config.scope == "prompt")
        rows = params.req_to_token_pool
        redirector = Redirector(self.allocator, rows, stats, ranks, config.min_age)
        threshold = AdaptiveThreshold(config.percentile, config.warmup)
        at_once = config.shares_at_once
        return BlockPipeline(tracker, meter, redirector, threshold, block, at_once, use)


def check_alike(ranks: Ranks, corrects: bool) -> None:
    """Raise ValueError if this tensor-parallel rank can correct shared keys and another rank cannot. All ranks
    call this together, even those of different DP-attention groups, because all need the same CUDA graphs."""
    if ranks.least(corrects) < corrects:
        told = "a tensor-parallel rank cannot correct shared keys and others can"
        raise ValueError(f"{flag_of('positions')} auto: {told}; corrected says why")


def _markers(context: TreeCacheBuildContext, config: ReasonCacheConfig) -> ReasoningMarkers | None:
    """The tokens that start and end reasoning. None if all output may share. Raises ValueError if
    ``config.span`` is ``reasoning`` and these tokens are unknown."""
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


def _dp_rank() -> int:
    """Index of the scheduler's data-parallel replica, or of the scheduler's DP-attention group."""
    return compat.get_parallel().dp_rank or 0


def _labels(context: TreeCacheBuildContext) -> dict[str, Any]:
    """Labels of our Prometheus series: the labels by which SGLang's own series tell servers and ranks apart."""
    return {
        "model_name": context.server_args.served_model_name or context.server_args.model_path,
        "tp_rank": context.tp_rank,
        "dp_rank": _dp_rank(),
        **(compat.get_observability().extra_metric_labels or {}),
    }

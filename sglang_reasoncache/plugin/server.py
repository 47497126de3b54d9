# SPDX-License-Identifier: Apache-2.0
"""Builds the plugin's parts in a scheduler process: allocator, attention backend, prefix tree, controller."""

import dataclasses
import functools
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention import models, rotations
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.swap import HostSwap, most_bytes_of
from sglang_reasoncache.cache.tree import SharedRadixCache
from sglang_reasoncache.compat.types import (
    KVPool,
    ModelRunner,
    ReqToTokenPool,
    ServerArgs,
    SlotAllocator,
    TreeCacheBuildContext,
)
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig, filter_config, flag_of
from sglang_reasoncache.device.host_memory import free_host_memory, gpus_of_machine
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.plugin import attention, refusals
from sglang_reasoncache.plugin.assemble import assemble, room_of
from sglang_reasoncache.plugin.build import build
from sglang_reasoncache.plugin.controller import Controller
from sglang_reasoncache.plugin.disaggregation import PreallocAdmission, states_run_ahead
from sglang_reasoncache.plugin.report import SharingMetrics
from sglang_reasoncache.plugin.tokenizer import (
    markers_of,
    settle_vocabulary,
    tokenizer_of,
)
from sglang_reasoncache.sharing.meter import BlockMeter
from sglang_reasoncache.sharing.stats import SharingStats

logger = logging.getLogger(__name__)

#: The part of the free host memory that may keep the KV of retracted requests by default.
_DEFAULT_SWAP = 0.1
#: ``SharedRadixCache.most_pairs``: 200 new tokens behind 20,000 of latent rows; 1,000 behind 130,000 of a model
#: with a window pool, some of which have sinks.
_MOST_PAIRS_OF_LATENTS = 1 << 22
_MOST_PAIRS_OF_WINDOW_POOLS = 1 << 27


class ServerParts:
    """The plugin's parts in a scheduler process. SGLang asks for the allocator first, then for the
    attention backends, then for the prefix tree. The controller is built together with the tree.

    Args:
        config: The operator's settings.
        stock: SGLang's allocator, which ours replaces.

    Raises ValueError for a KV pool that the plugin or an evicting policy does not support."""

    def __init__(self, config: ReasonCacheConfig, stock: SlotAllocator) -> None:
        pool = stock.get_kvcache()
        #: Why nothing is shared, where KV only goes to the host and back.
        self._only_copied = (
            models.why_only_copied(pool)
            if _may_only_copy(config, compat.get_server_args())
            else None
        )
        if self._only_copied is None:
            models.check_pool(pool)
        refusals.check_settled_speculation(compat.get_server_args())
        attention.check_pool_for_policies(config, pool)
        self.allocator = shared_allocator_of(stock)
        self.controller: Controller | None = None
        #: Decides on the decode server of a PD pair. None on other servers.
        self.admission: PreallocAdmission | None = None
        num_slots = pool.get_key_buffer(compat.shared_layers(pool)[0]).shape[0]
        self._config = config
        self._cached = CachedPositions(num_slots, self.allocator.device)
        self._attention = attention.AttentionParts()
        # The KV of draft models, in slots of the same numbers.
        self._draft_pools: list[KVPool] = []
        #: Number of ranks over which the attention heads of a request are spread.
        self._attention_ranks: int = compat.get_parallel().attn_tp_size

    def draft_model(self, model_runner: ModelRunner) -> None:
        """Called before a draft model's attention backend is made."""
        if model_runner.token_to_kv_pool not in self._draft_pools:
            self._draft_pools.append(model_runner.token_to_kv_pool)

    def attention_backend(
        self, model_runner: ModelRunner, name: str, stock: Callable[[ModelRunner], Any]
    ) -> Any:
        backend, self._attention = attention.attention_backend(
            model_runner, self._settings(model_runner), name, stock, self._cached
        )
        return backend

    def _settings(self, model_runner: ModelRunner) -> ReasonCacheConfig:
        """The operator's settings, but keys are read as cached if the model does not rotate its keys: they need
        no correction."""
        with_kv = compat.layer_ids(model_runner.token_to_kv_pool)
        if rotations.is_without_positions(model_runner.model, with_kv):
            return dataclasses.replace(self._config, positions="as-cached")
        return self._config

    def tree(self, context: TreeCacheBuildContext) -> SharedRadixCache:
        """Build the prefix tree and its controller. Raises ValueError for a model or setting that is not
        supported."""
        resolved = self._resolve(context)
        tree: SharedRadixCache
        tree = compat.create_unified_radix_cache(context, cache_class=SharedRadixCache)
        tree.most_pairs = self._most_pairs()
        self.controller = self._controller(context, tree, resolved)
        if _decodes_only(context.server_args):
            self.admission = PreallocAdmission(self.controller)
        return tree

    def _resolve(self, context: TreeCacheBuildContext) -> ResolvedConfig:
        """Settle the settings of this scheduler."""
        page = context.params.page_size
        if self._only_copied is None:
            models.check_kind(context)
            refusals.check_page_size(page)
        if self._attention.rotations is not None and not self._attention.corrects_prefills:
            models.check_latent(self.allocator.get_kvcache(), context.server_args)
        runner = context.tp_worker.model_runner
        uncorrected = self._only_copied or models.what_rows_keep(context.params.req_to_token_pool)
        if uncorrected is None:
            config, uncorrected = attention.resolve_positions(
                self._settings(runner), self._attention, runner
            )
        else:
            if self._config.positions == "corrected":
                raise ValueError(f"{flag_of('positions')} corrected: {uncorrected}")
            config = dataclasses.replace(self._config, positions="as-cached", percentile=0)
            logger.warning("reasoncache: nothing is shared, because: %s", uncorrected)
        attention.check_policies(config, self._attention, runner)
        if config.shares and page > 1:
            logger.warning(
                "reasoncache: at --page-size %d only what covers whole pages shares; smaller pages share more",
                page,
            )
        # A block may share only after the sliding window has passed it.
        min_age = max(config.min_age, models.window_age(context))
        reads_prompt = config.reads_prompt and _may_read_prompts(context)
        return ResolvedConfig(
            config=dataclasses.replace(config, min_age=min_age, reads_prompt=reads_prompt),
            page=page,
            uncorrected=uncorrected,
            learns=self._config.is_active,
        )

    def _documents_off(
        self, tree: SharedRadixCache, config: ReasonCacheConfig, args: ServerArgs
    ) -> str | None:
        """Why prompts are not composed of cached documents. None if prompts are composed."""
        pool = self.allocator.get_kvcache()
        reasons = {
            "keys are read as cached": config.positions != "corrected",
            "the page size is above 1": self.allocator.page_size > 1,
            "the prefix cache is off": tree.disable,
            "latent attention is not tested with it": bool(compat.latent_rank(pool)),
            "a draft model has KV of its own": refusals.has_draft_model(args),
        }
        reason = _first(reasons) or _has_host_tier(tree) or _needs_more_than_kv(tree, config, args)
        if reason is not None and config.documents == "auto":
            logger.warning("reasoncache: documents=auto has no effect: %s", reason)
        return reason

    def _most_pairs(self) -> int | None:
        """See ``SharedRadixCache``. On a GPU our prefills over shifted keys take longer than SGLang's, over
        latent rows and with sinks so much that long prompts are computed again sooner. No GPU checked that."""
        if not self._cached.positions.is_cuda or self._attention.expands:
            return None
        if compat.latent_rank(self.allocator.get_kvcache()):
            return _MOST_PAIRS_OF_LATENTS
        return _MOST_PAIRS_OF_WINDOW_POOLS if self.allocator.has_window_pool else None

    def _reads_as_cached(self, config: ReasonCacheConfig) -> str | None:
        """Why prefills read keys as cached although decode steps correct them. None if they do not."""
        if config.positions != "corrected" or self._attention.corrects_prefills:
            return None
        return "prefills of this model's latent attention read prefixes as cached"

    def _swap(
        self, tree: SharedRadixCache, resolved: ResolvedConfig, args: ServerArgs
    ) -> HostSwap | None:
        """Host memory for the KV of retracted requests. None if the operator wants none, if the settings switch
        the plugin off, on a decode server of a PD pair and, with a line in the log, where more than KV, states
        and windows is needed. A draft model's KV is copied, too."""
        config = resolved.config
        limit = config.host_swap_gb
        # On a decode server see :meth:`_handover`.
        if limit == 0 or not resolved.learns or _decodes_only(args):
            return None
        reasons = {
            "a draft model's KV was not found": refusals.has_draft_model(args)
            and not self._draft_pools,
            "a step in flight takes the only state further than the tokens that are known": (
                tree.is_mamba_enabled
                and not tree.enable_mamba_extra_buffer
                and compat.speculation(args) is not None
                and not compat.get_schedule().disable_overlap_schedule
            ),
        }
        least = tree.least_window_pool
        small = {
            f"SGLang might not admit a request again with a window pool of less than {least} slots": (
                tree.is_swa_enabled and self.allocator.size_swa < least
            )
        }
        reason = (
            _has_host_tier(tree)
            or models.what_rows_keep(tree.req_to_token_pool)
            or _first(reasons)
            or _needs_more_than_kv(tree, config, args, keeps_endings=True)
            or _first(small)
            or self._reads_as_cached(config)
        )
        if reason is not None:
            level = logging.INFO if limit is None else logging.WARNING
            logger.log(level, "reasoncache: host_swap_gb has no effect: %s", reason)
            return None
        cached = self._cached if config.positions == "corrected" else None
        most = _host_limit(config, args)
        return HostSwap(most, tree.req_to_token_pool, cached, self._draft_pools)

    def _handover(
        self,
        rows: ReqToTokenPool,
        config: ReasonCacheConfig,
        args: ServerArgs,
        stream: Any,
        ranks: Ranks,
    ) -> Handover | None:
        """What the decode server of a PD pair has for KV that it does not compute. None on other servers."""
        if not _decodes_only(args):
            return None
        if states_run_ahead(self.allocator.get_kvcache()):
            logger.warning(
                "reasoncache: SGLang goes on with a wrong state after a retraction, as the step in flight has "
                "taken it one token further; --disable-overlap-schedule avoids that"
            )
        backup = compat.get_disagg().disaggregation_decode_retraction_backup
        room = size = 0
        if backup == "host_pool":
            pools: list[Any] = [self.allocator.shared_pool, *self._draft_pools]
            if self.allocator.has_window_pool:
                pools.append(self.allocator.window_pool)
            # Of the padding slot, which has no peer in window pools, their own copy has nothing.
            pools += [pool.swa_kv_pool for pool in pools if compat.window_layers(pool)]
            padding = torch.zeros(1, dtype=torch.int64, device=self._cached.positions.device)
            size = sum(most_bytes_of(pool.get_cpu_copy(padding)) for pool in pools)
            # All ranks copy the same requests.
            room = ranks.least(_host_limit(config, args) // size)
        elif config.host_swap_gb is not None:
            logger.warning(
                "reasoncache: host_swap_gb has no effect with the retraction backup %s", backup
            )
        return Handover(rows, self._cached, stream, self._draft_pools, room, size)

    def _continues(
        self, tree: SharedRadixCache, config: ReasonCacheConfig, args: ServerArgs
    ) -> bool:
        """Whether what finished requests shared stays in the prefix cache. If it cannot, a line in the log says
        why."""
        approximates = config.shares or config.policies.selector is not None
        if not config.aliased_nodes or not approximates or tree.disable:
            return False
        # A draft model's KV is in the slots that the request named, as it was when the request read them.
        reasons = {
            "a draft model's prefixes end where no state is": tree.tree_core.is_eagle,
            "windows have a pool of their own, too": tree.is_swa_enabled,
            "SGLang copies states to a host tier": tree.cache_controller is not None,
            "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK leaves no room for states that requests began with": (
                compat.envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get()
            ),
        }
        reason = (
            _first(reasons if tree.is_mamba_enabled else {})
            or _needs_more_than_kv(tree, config, args, keeps_endings=True)
            or self._reads_as_cached(config)
        )
        if reason is not None:
            logger.info("reasoncache: aliased_nodes has no effect: %s", reason)
        return reason is None

    def _controller(
        self, context: TreeCacheBuildContext, tree: SharedRadixCache, resolved: ResolvedConfig
    ) -> Controller:
        active = resolved.config.is_active
        tokenizer = tokenizer_of(context) if active else context.tp_worker.tokenizer
        resolved, vocabulary = settle_vocabulary(resolved, tokenizer)
        config = resolved.config
        params = context.params
        args = context.server_args
        stats = SharingStats()
        # The ranks of ``tp_cache_group`` run the same requests.
        ranks = Ranks(params.tp_cache_group if self._attention_ranks > 1 else None)
        corrects = config.positions == "corrected"
        stream = context.tp_worker.model_runner.forward_stream
        source = KeySource(
            pool=self.allocator.get_kvcache(),
            rows=params.req_to_token_pool.req_to_token,
            cached_at=self._cached,
            rotations=self._attention.rotations if corrects else None,
            queries=self._attention.queries,
            stream=stream if self._cached.positions.is_cuda else None,
        )
        # Without the overlap schedule forwards run on the stream of the scheduler.
        forwards = None if compat.get_schedule().disable_overlap_schedule else source.stream
        meter = BlockMeter(
            pool=source.pool,
            rows=source.rows,
            cached_at=source.cached_at,
            rotations=source.rotations,
            num_heads=self._heads(),
            ranks=ranks,
        )
        # Settled: the operator may have let SGLang detect it (``--reasoning-parser auto``).
        markers = markers_of(compat.get_serving().reasoning_parser, tokenizer, config)
        swap = self._swap(tree, resolved, args)
        continues = self._continues(tree, config, args)
        documents_off = self._documents_off(tree, config, args)
        check_alike(
            attention.all_ranks(),
            {
                **config.to_dict(),
                "host_swap_gb": swap is not None,
                "aliased_nodes": continues,
                "documents_off": documents_off is not None,
                "vocabulary": vocabulary.pieces,
                "reasoning_markers": markers
                and [sorted(markers[0]), sorted(markers[1]), *markers[2:]],
            },
        )
        controller = assemble(
            resolved,
            allocator=self.allocator,
            rows=params.req_to_token_pool,
            ranks=ranks,
            stats=stats,
            meter=meter,
            eviction=EvictionController(
                evictors=config.policies.evictors,
                allocator=self.allocator,
                rows=params.req_to_token_pool,
                source=source,
                stats=stats.eviction,
                ranks=ranks,
            ),
            process=(_filter(resolved, meter, markers, vocabulary) if config.shares else None),
            room=functools.partial(room_of, self.allocator, tree),
            path_loaded=functools.partial(self._cached.record_path, stream=forwards),
            swap=swap,
            selection=self._attention.selection,
            continues=continues,
            handover=self._handover(params.req_to_token_pool, config, args, forwards, ranks),
            stream=source.stream,
            markers=markers,
            metrics=metrics_of(context),
            documents_off=documents_off,
            dp_rank=dp_rank(),
            hides_ids=bool(args.admin_api_key),
            ahead=compat.get_alloc_reserve_per_decode(),
        )
        logger.info(
            "reasoncache: %s, block %d, page %d, distances by %s, %s",
            "on" if config.is_active or config.policies.selector else "idle",
            config.block,
            resolved.page,
            meter.backend,
            config,
        )
        return controller

    def _heads(self) -> float:
        """KV heads of all ranks together, see :class:`BlockMeter`."""
        pool = self.allocator.get_kvcache()
        # With latent attention all n ranks hold the same rows. ``BlockMeter`` adds up squares over ranks, so
        # the root of a sum is sqrt(n) times too large. Dividing by the heads corrects this.
        if compat.latent_rank(pool):
            return math.sqrt(self._attention_ranks)
        return pool.head_num * self._attention_ranks


def _filter(
    resolved: ResolvedConfig,
    meter: BlockMeter,
    markers: ReasoningMarkers | None,
    vocabulary: Vocabulary,
) -> FilterProcess:
    """Start the filter process, once the meter has compiled its kernels."""
    config = resolved.config
    page = resolved.page
    # At page sizes above 1 alternatives are measured by the block.
    for length in {config.block, page} if page > 1 else {config.block}:
        meter.warm_up(length)
    return FilterProcess(
        filter_config(config),
        vocabulary,
        None if markers is None else markers[:2],
        config.max_pending,
    )


def schedulers_per_node(args: ServerArgs) -> int:
    """How many scheduler processes share the memory of this machine. Groups of DP attention divide the ranks of
    ``--tp-size``; replicas have ranks of their own. ``--dp-size`` counts groups beside the deprecated flag
    ``--enable-dp-attention``; what SGLang has settled counts replicas only."""
    settled = compat.resolving_view(args)
    return max(settled.tp_size * settled.pp_size * settled.dp_size // settled.nnodes, 1)


def _may_read_prompts(context: TreeCacheBuildContext) -> bool:
    """Whether blocks of responses may read blocks of their prompts. If they may not, a line in the log says
    why."""
    reasons = {
        # There SGLang replaces slots of nodes.
        "layers with a sliding window have a pool of their own": context.is_hybrid_swa,
        "state layers have states": context.is_hybrid_ssm,
        "another server prefills": _decodes_only(context.server_args),
    }
    reason = _first(reasons)
    if reason is not None:
        logger.warning("reasoncache: reads_prompt has no effect: %s", reason)
    return reason is None


def _host_limit(config: ReasonCacheConfig, args: ServerArgs) -> int:
    """Most bytes of host memory for retracted requests, of this rank."""
    if config.host_swap_gb is None:
        # Trainers start an engine for each GPU, or for a few.
        parts = max(schedulers_per_node(args), gpus_of_machine())
        limit = int(_DEFAULT_SWAP * free_host_memory()) // parts
    else:
        limit = int(config.host_swap_gb * 2**30)
    logger.info("reasoncache: up to %.2f GiB of host memory for retracted requests", limit / 2**30)
    return limit


def _may_only_copy(config: ReasonCacheConfig, args: ServerArgs) -> bool:
    """Whether a pool that cannot be shared may still be copied to the host. :meth:`ServerParts._swap` repeats
    some of this for all pools."""
    return (
        config.host_swap_gb != 0
        and config.is_active
        and config.positions != "corrected"
        and not config.policies.needs_our_attention
        and not args.enable_hierarchical_cache
        and not _decodes_only(args)
    )


def _decodes_only(args: ServerArgs) -> bool:
    """Whether this is the decode server of a PD pair."""
    return args.disaggregation_mode == "decode"


def _needs_more_than_kv(
    tree: SharedRadixCache,
    config: ReasonCacheConfig,
    args: ServerArgs,
    keeps_endings: bool = False,
) -> str | None:
    """Why the KV in the pool that is shared is not all that a request needs to go on here. None if it is.
    ``keeps_endings``: whether the caller keeps states and last windows, too."""
    reasons = {
        # SGLang itself keeps retracted requests there.
        "another server prefills": _decodes_only(args),
        "state layers have states": tree.is_mamba_enabled and not keeps_endings,
        "layers with a sliding window have a pool of their own": tree.is_swa_enabled
        and not keeps_endings,
        "a policy evicts positions": bool(config.policies.evictors),
        "with --enable-linear-replayssm-spec states lag behind the tokens": (
            tree.is_mamba_enabled
            and not tree.enable_mamba_extra_buffer
            and tree.req_to_token_pool.mamba_pool.replayssm_spec_write_pos is not None
        ),
    }
    return _first(reasons)


def _has_host_tier(tree: SharedRadixCache) -> str | None:
    """That SGLang itself copies prefixes to the host. None if it does not."""
    return _first({"a host tier is in use": tree.cache_controller is not None})


def _first(reasons: Mapping[str, bool]) -> str | None:
    """The first of ``reasons`` that holds."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def for_limited_queue(config: ReasonCacheConfig) -> ReasonCacheConfig:
    """With ``--max-queued-requests`` SGLang ends a retracted request that finds the queue full, so admission
    keeps SGLang's reserve, with which it hardly retracts. On the decode server of a PD pair retracted requests
    have a queue of their own."""
    args = compat.get_server_args()
    limited = args.max_queued_requests is not None and args.disaggregation_mode != "decode"
    if not limited or config.admission_credit == 0:
        return config
    logger.warning(
        "reasoncache: admission_credit is 0: with --max-queued-requests SGLang ends a request that it retracts "
        "while the queue is full, so admission reserves what SGLang reserves"
    )
    return dataclasses.replace(config, admission_credit=0.0)


def check_build(config: ReasonCacheConfig) -> None:
    """Raise ValueError on all tensor-parallel ranks unless all run the same build with the same settings of the
    operator. All call this together, before they exchange anything else, which another build might do in
    another way, or some ranks not at all."""
    ranks = attention.all_ranks()
    if not ranks.alone:
        check_alike(ranks, {"build": build()})
        check_alike(ranks, {**config.to_dict(), "host_swap_gb": config.host_swap_gb != 0})


def check_alike(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Raise ValueError on all tensor-parallel ranks unless all have these ``settings``: flags, variables and
    machines may differ between nodes, and ranks with different settings would wait for each other forever. All
    ranks call this together, even those of different DP-attention groups, because all need the same CUDA
    graphs."""
    differ = []
    for name, value in sorted(settings.items()):
        digest = zlib.crc32(repr(value).encode())
        # All ranks find the same: the smallest digest is the largest only if all are equal.
        if ranks.least(digest) != -ranks.least(-digest):
            differ.append(f"{name} (here {value!r:.100})")
    if differ:
        raise ValueError(
            "--enable-reasoncache needs the same build and settings on all tensor-parallel ranks, which "
            "differ in: " + "; ".join(differ)
        )


def dp_rank() -> int:
    """Index of the scheduler's data-parallel replica, or of the scheduler's DP-attention group."""
    return compat.get_parallel().dp_rank or 0


def metrics_of(context: TreeCacheBuildContext) -> SharingMetrics | None:
    """The scheduler's Prometheus series. None without ``--enable-metrics``."""
    return SharingMetrics(_labels(context)) if context.params.enable_metrics else None


def _labels(context: TreeCacheBuildContext) -> dict[str, Any]:
    """Labels of our Prometheus series: the labels by which SGLang's own series tell servers and ranks apart."""
    role = compat.DisaggregationMode.to_engine_type(context.server_args.disaggregation_mode)
    return {
        "model_name": context.server_args.served_model_name or context.server_args.model_path,
        "engine_type": role,
        "tp_rank": context.tp_rank,
        "dp_rank": dp_rank(),
        **(compat.get_observability().extra_metric_labels or {}),
    }

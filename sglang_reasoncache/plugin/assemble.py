# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of a scheduler's plugin together, without SGLang's context: servers and tests do it alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.swap import HostSwap
from sglang_reasoncache.compat.types import PrefixTree, ReqToTokenPool
from sglang_reasoncache.config import ResolvedConfig
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.plugin.controller import INTERVAL, Controller
from sglang_reasoncache.plugin.report import Report, SharingMetrics
from sglang_reasoncache.selection.pages import PageSelection
from sglang_reasoncache.sharing.headroom import LEAST
from sglang_reasoncache.sharing.meter import BlockMeter
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.records import Records
from sglang_reasoncache.sharing.redirect import Redirector
from sglang_reasoncache.sharing.rules import Rules
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from sglang_reasoncache.sharing.tracker import RequestTracker


def assemble(
    resolved: ResolvedConfig,
    *,
    allocator: Shared,
    rows: ReqToTokenPool,
    ranks: Ranks,
    stats: SharingStats,
    meter: BlockMeter,
    eviction: EvictionController,
    process: FilterProcess | None,
    room: Callable[[], int],
    path_loaded: Callable[[torch.Tensor], None],
    swap: HostSwap | None = None,
    selection: PageSelection | None = None,
    continues: bool = False,
    handover: Handover | None = None,
    stream: Any = None,
    markers: ReasoningMarkers | None = None,
    metrics: SharingMetrics | None = None,
    documents_off: str | None = None,
    dp_rank: int = 0,
    hides_ids: bool = False,
    interval: int = INTERVAL,
    ahead: float = LEAST,
) -> Controller:
    """Make the controller of a scheduler, and attach it to ``allocator``, as its owner.

    Args:
        rows: SGLang's pool of rows.
        stats: The totals, which ``eviction`` counts in too.
        process: The filter. None if sharing is off.
        room: Returns how many slots of the pool are free or evictable.
        path_loaded: See ``SlotOwner``.
        swap: Keeps the KV of retracted requests on the host. None if it is computed again.
        selection: Selects what decode steps read. None if they read everything.
        continues: Whether what finished requests shared stays in the prefix cache.
        handover: Records cached positions of what another server prefills. None if this server prefills.
        stream: The CUDA stream on which the overlap schedule runs forwards. None on a CPU.
        markers: Tokens that begin and end the reasoning part of an output. None if all output may share.
        documents_off: Why prompts are not composed of cached documents. None if prompts are composed.
        dp_rank: Index of the scheduler's data-parallel replica or DP-attention group.
        hides_ids: See ``Report``.
        interval: Decode steps between two polls.
        ahead: See ``Controller``.
    """
    config = resolved.config
    size = pool_size(allocator)
    records = Records(
        process,
        stats,
        markers,
        groups=config.scope == "prompt",
        reads_prompt=config.reads_prompt,
    )
    tracker = RequestTracker(process, records, stats, ranks)
    pipeline = BlockPipeline(
        tracker=tracker,
        records=records,
        rules=Rules(
            min_age=config.min_age,
            has_window_pool=allocator.has_window_pool,
            page=allocator.page_size,
        ),
        meter=meter,
        threshold=AdaptiveThreshold(config.percentile, config.warmup),
        redirector=Redirector(allocator, rows, stats, ranks),
        stats=stats,
        ranks=ranks,
        block=config.block,
        page=resolved.page,
        at_once=config.shares_at_once,
        use=lambda: 1.0 - room() / size,
    )
    report = Report(
        config=config,
        stats=stats,
        records=records,
        pipeline=pipeline,
        eviction=eviction,
        continuations=lambda: allocator.continuations,
        swap=swap,
        handover=handover,
        selection=selection,
        metrics=metrics,
        uncorrected=resolved.uncorrected,
        documents_off=documents_off,
        dp_rank=dp_rank,
        hides_ids=hides_ids,
    )
    controller = Controller(
        config=config,
        stats=stats,
        ranks=ranks,
        records=records,
        tracker=tracker,
        pipeline=pipeline,
        eviction=eviction,
        report=report,
        path_loaded=path_loaded,
        slots=size,
        room=room,
        interval=interval,
        ahead=ahead,
        learns=resolved.learns,
    )
    allocator.attach(controller, swap, continues, handover, stream)
    allocator.read_whole = None if selection is None else selection.budget
    return controller


def pool_size(allocator: Shared) -> int:
    """Number of slots of the pool whose slots can be shared."""
    return int(allocator.size_full)


def room_of(allocator: Shared, tree: PrefixTree) -> int:
    """Number of slots that are free or evictable."""
    return int(allocator.free_size() + tree.evictable_size())

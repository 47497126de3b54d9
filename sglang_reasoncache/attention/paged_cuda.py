# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backends on CUDA, extended to read shifted slots and to skip evicted positions.

A *shifted* slot is read at a position other than the one that its key was rotated for. Our kernels run forwards
with shifted slots or evicted positions, SGLang's kernels run all others. At page sizes above 1 our kernels run
all forwards whose rows share slots, rotated or not: SGLang's may look up only the first slot of a page. A graph
of decode steps with our kernels also contains the planning, which lists the slots to read. If a policy selects
what decode steps read, our kernels run all of them."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention import verification
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.attention.batch_mark import mark_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import AttentionLayer, ForwardBatch, ForwardMode, ModelRunner

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers

logger = logging.getLogger(__name__)
#: The variant of a decode graph with SGLang's attention kernels.
PLAIN = "plain"
#: The variant of a decode graph with our attention kernels.
SHIFTED = "shifted"


class GraphVote(enum.IntEnum):
    """A DP attention group's vote on the next decode graph (EAGER: none). The smallest vote decides for all.

    A vote replaces SGLang's bool "can run a graph": EAGER is false, SHIFTED and PLAIN are true.
    """

    EAGER = 0
    SHIFTED = 1
    PLAIN = 2


class SharedSlotReads(PagedBackend):
    """A mixin in front of one of SGLang's backends, as in ``class C(SharedSlotReads, TritonAttnBackend)``.

    If keys are read as cached at page size 1, our kernels run only if rows have evicted positions. A decode
    graph with speculative decoding verifies drafted tokens, which our kernels compute like a decode step.
    """

    def __init__(
        self, model_runner: ModelRunner, cached: CachedPositions | None, **named: Any
    ) -> None:
        """See ``PagedBackend``."""
        super().__init__(model_runner, cached, **named)
        # Buffers for plans of decode graphs. Graphs can share buffers, because replays follow one another
        # on one stream. A graph keeps using the buffers that were the newest when it was captured.
        self._graphs: list[dict[int, PlanBuffers]] = []
        self._graph_variant: str | None = None
        # What the drafted tokens of a graph's requests see of one another. None without speculation.
        self._sees: torch.Tensor | None = None

    def needs_ours(self, forward_batch: ForwardBatch) -> bool:
        """Whether rows of a batch may have shifted slots or evicted positions."""
        slots = self.paged.slots
        shared = self.paged.reads_shared and slots.has_shifted_slots
        if not (slots.has_evicted or shared):
            return False
        mark = mark_of(forward_batch)
        return mark is None or mark.needs_ours

    @property
    def selects(self) -> bool:
        """Whether a policy selects what decode steps read."""
        return self.paged.selection is not None

    # -- outside of graphs ------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a forward, for our kernels or SGLang's."""
        self.paged.forget()
        mode = forward_batch.forward_mode
        if forward_batch.out_cache_loc is None or mode.is_idle():
            super().init_forward_metadata(forward_batch)
            return
        self.paged.record(forward_batch)
        self.paged.begin_selection(forward_batch)
        if _decodes(mode):
            if self.selects or self.needs_ours(forward_batch):
                self.paged.begin_decode(forward_batch)
            else:
                super().init_forward_metadata(forward_batch)
            return
        if self.needs_ours(forward_batch) and self.paged.runs_prefills:
            mark = mark_of(forward_batch)
            self.paged.begin_extend(forward_batch, None if mark is None else mark.evicted)
            if not self.paged.expands:
                return
            # SGLang's kernels attend to what is expanded from rows that it fetches.
        super().init_forward_metadata(forward_batch)

    def get_fused_kv_write_buffers(self, layer: AttentionLayer, forward_batch: ForwardBatch) -> Any:
        """Where a model may write keys and values itself (MiMo-V2, from SGLang 0.5.23 on). Not in a forward of
        our kernels: SGLang's answer rests on its own plan, which such a forward does not have."""
        if self.paged.rows is not None:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)

    # -- in graphs --------------------------------------------------------------

    @property
    def never_in_prefill_graphs(self) -> bool:
        """True if a policy needs recent queries or bounds of keys, which a prefill in a graph does not keep."""
        return self.paged.queries is not None or self.selects

    def can_run_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """Whether a prefill can run in a CUDA graph, which holds SGLang's kernels only."""
        if self.needs_ours(forward_batch) or self.never_in_prefill_graphs:
            return False
        stock = getattr(super(), "can_run_prefill_cuda_graph", None)
        return stock is None or stock(forward_batch)

    def choose_graph(self, forward_batch: ForwardBatch) -> str:
        """Choose the graph variant for the next replay, before the replay is prepared. A second call for the
        same batch gives the same answer."""
        # All DP groups must replay the same variant: SGLang's collectives use different memory in each variant.
        agreed = forward_batch.can_run_decode_cuda_graph is GraphVote.SHIFTED
        ours = self.selects or agreed or self.needs_ours(forward_batch)
        self._graph_variant = SHIFTED if ours else PLAIN
        return self._graph_variant

    def reserve_plans(self, requests: int) -> None:
        """Allocate memory for plans of decode graphs with up to ``requests`` requests. The server calls this
        when it starts, before SGLang captures graphs, because it can then still do without this backend.

        Raises ValueError, whose message names the bytes and the flags that make them fewer, if the plans would
        take more than half of the free GPU memory. The other half is for SGLang's graphs and prefills."""
        needed = self.paged.graph_bytes(requests)
        free = torch.cuda.mem_get_info(self.paged.device)[0]
        shortage = (
            f"{self.requested_by}: plans of decode graphs for {requests} requests x {self.paged.width} "
            f"positions take {needed} bytes of GPU memory, and may take half of the {free} bytes that are "
            "free; lower --cuda-graph-max-bs-decode, --context-length or --mem-fraction-static"
        )
        if needed > free // 2:
            raise ValueError(shortage)
        try:
            self._graphs.append(self.paged.graph_buffers(requests))
        except torch.OutOfMemoryError as error:
            raise ValueError(shortage) from error
        logger.info(
            "reasoncache: plans of decode graphs, %d requests x %d positions, take %.1f MiB",
            requests,
            self.paged.width,
            needed / 2**20,
        )

    def init_cuda_graph_state(self, max_bs: int, *args: Any, **kwargs: Any) -> None:
        """Called before SGLang captures decode graphs with up to ``max_bs`` requests."""
        super().init_cuda_graph_state(max_bs, *args, **kwargs)
        # SGLang captures the graphs that it announced, unless it captures again, after ranks have joined.
        if not self._graphs or self._graphs[-1][0].batch < max_bs:
            self._graphs.append(self.paged.graph_buffers(max_bs))

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Before a graph is captured or replayed, do the work that cannot be part of the graph."""
        self.paged.forget()
        mode = forward_batch.forward_mode
        if not (_decodes(mode) or mode.is_idle()):
            self.paged.record(forward_batch)
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        variant = compat.get_capture_attention_variant() if in_capture else self._graph_variant
        if variant == PLAIN:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
        elif variant == SHIFTED and self._graphs:
            # SGLang's preparation is skipped, because this graph has none of SGLang's attention kernels. In a
            # capture, the preparation would also replace SGLang's own plans, which the plain graph reads.
            self.paged.begin_graph(self._graphs[-1], forward_batch, self._sees_of(forward_batch))
        else:
            raise RuntimeError(
                f"sglang-reasoncache: a decode graph of variant {variant!r}, known are "
                f"{PLAIN!r} and {SHIFTED!r}"
            )

    def _sees_of(self, forward_batch: ForwardBatch) -> torch.Tensor | None:
        """Memory for what a batch's drafted tokens see of one another. None if it has none."""
        drafted = verification.drafted(forward_batch)
        if not drafted:
            return None
        requests = self._graphs[-1][0].batch
        if self._sees is None or len(self._sees) < requests:
            # A captured graph goes on using the memory that it was captured with.
            self._sees = torch.zeros(requests, drafted, dtype=torch.int64, device=self.paged.device)
        return self._sees

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Queue the work that becomes part of a decode graph: record the positions of new keys, choose which
        queries to keep, and plan for the kernels that this graph contains."""
        mode = forward_batch.forward_mode
        if not (_decodes(mode) or mode.is_idle()):
            super().init_forward_metadata_in_graph(forward_batch)
            return
        self.paged.record(forward_batch)
        if self.paged.rows is None:
            super().init_forward_metadata_in_graph(forward_batch)
            return
        self.paged.begin_selection(forward_batch, self.paged.width)
        self.paged.plan_graph(self._graphs[-1], forward_batch)

    def shared_read_ends(self, fm: ForwardMode) -> Any:
        """The stage after which a forward reads no more rows. A decode graph with our kernels reads rows when
        its replay begins, so the stage of a decode step is ``IN_REPLAY`` or later."""
        stock = super().shared_read_ends(fm)
        if not (_decodes(fm) or fm.is_idle()):
            return stock
        return compat.SharedReadEnds.max_of((stock, compat.SharedReadEnds.IN_REPLAY))


def _decodes(mode: ForwardMode) -> bool:
    """Whether a forward is a decode step, or verifies drafted tokens instead."""
    return mode.is_decode() or mode.is_target_verify()


class GraphVariants:
    """Implements SGLang's ``AttentionGraphVariants``: one backend has two decode graphs per batch size. If a
    policy selects what decode steps read, it has only the one with our kernels."""

    def __init__(self, backend: SharedSlotReads) -> None:
        self._backend = backend

    @property
    def capture_labels(self) -> tuple[str, ...]:
        """SGLang captures the variants in this order, in one memory pool."""
        return (SHIFTED,) if self._backend.selects else (PLAIN, SHIFTED)

    def select(self, forward_batch: ForwardBatch) -> str:
        """The label of the graph that ``forward_batch`` runs."""
        return self._backend.choose_graph(forward_batch)

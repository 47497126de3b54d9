# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backends for CUDA, with shared keys read where they are used, evicted positions skipped.

The operator's backend stays what it is. A forward in which no slot is away from
home and no position was dropped runs the stock code and is only followed by a note of
its slots' positions; one with shifted slots or evicted positions is planned and computed by our
kernels. In a decode graph the plan is part of the graph, so replaying it costs the
host nothing.

Where a policy reads attention statistics our kernels serve every decode step, because
SGLang's tell no weights, and the last queries of every prefill once more. They serve every
decode step as well where a policy selects what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.shared_slots import SharedSlotAttention
from sglang_reasoncache.attention.supported import check_supported
from sglang_reasoncache.cache.batch_mark import BatchMark
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.eviction.policies.contract import Observation, Selector
from sglang_reasoncache.kernels.extend import ExtendPlan
from sglang_reasoncache.kernels.plan import RowPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_reasoncache.eviction.device_statistics import (
        Batch,
        DeviceStatistics,
        Noted,
        Queries,
    )
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers
    from sglang_reasoncache.selection.device_selection import DeviceSelection

    # What stands behind the mixin: any of SGLang's backends.
    _Stock = Any
else:
    _Stock = object

#: Graph variants: SGLang's kernels, and ours.
PLAIN, SHIFTED = "plain", "shifted"


class SharedSlotReads(_Stock):
    """Put in front of one of SGLang's backends, as in ``class C(SharedSlotReads, TritonAttnBackend)``.

    Args:
        model_runner: SGLang's runner, its pool already there.
        cached: Slots' cached positions. None reads every key as cached: only rows with evicted
            positions then need our kernels.
        requested_by: The flags that request it, the beginning of every message.
        **stock: For the backend behind.

    Raises:
        ValueError: a model or pool that cannot be served, by name.
    """

    skips_evicted = True

    def __init__(
        self, model_runner: Any, cached: CachedPositions | None, *, requested_by: str, **stock: Any
    ) -> None:
        check_supported(model_runner, requested_by)
        self.requested_by = requested_by
        # First, because it may refuse: SGLang's backend takes memory.
        self.shared_slots = SharedSlotAttention(model_runner, cached)
        super().__init__(model_runner, **stock)
        self.mark = BatchMark(model_runner.token_to_kv_pool_allocator, corrected=cached is not None)
        self._decode_plan: RowPlan | None = None
        self._extend_plan: ExtendPlan | None = None
        # Every graph's plan: replays follow one another on one stream.
        self._graph_buffers: PlanBuffers | None = None
        # Graphs captured before larger ones were asked for still write here.
        self._outgrown: list[tuple[PlanBuffers, torch.Tensor | None]] = []
        self._graph_variant: str | None = None
        self.statistics: DeviceStatistics | None = None
        self.selection: DeviceSelection | None = None
        self._coming: tuple[Sequence[str], Batch] | None = None
        self._noted: Noted | None = None
        self._queries: Queries | None = None
        self._graph_weights: torch.Tensor | None = None

    def observe(self, wanted: Observation) -> DeviceStatistics:
        """Note from now on how much weight positions get; the same object in every call.

        Raises:
            MemoryError: see ``DeviceStatistics``.
        """
        from sglang_reasoncache.eviction.device_statistics import DeviceStatistics

        if self.statistics is None:
            pool = self.req_to_token_pool
            self.statistics = DeviceStatistics(
                pool.req_to_token, pool.req_generation, wanted, lambda: pool.free_slots
            )
            self.statistics.warm_up(self.shared_slots.warm_up(observed=True))
        return self.statistics

    def select(self, name: str, selector: Selector) -> DeviceSelection:
        """Have decode steps read what ``selector`` keeps, from now on.

        Raises:
            ValueError: it fails, gives nonsense or waits for the device.
            MemoryError: there is none for the pages' bounds.
        """
        self.selection = self.shared_slots.selection(name, selector)
        return self.selection

    def expect(self, rids: Sequence[str], batch: Batch) -> None:
        """The next prefill is that of ``rids``, SGLang's list of its request ids."""
        self._coming = rids, batch

    def reads_ours(self, forward_batch: Any) -> bool:
        """Whether a decode step runs our kernels."""
        return self.always_ours or self.mark.reads_shifted(forward_batch.rids)

    @property
    def always_ours(self) -> bool:
        """Whether every decode step does."""
        return self.statistics is not None or self.selection is not None

    @property
    def rotation(self) -> Any:
        """The model's ``KeyRotation``, on the pool's device; None where keys are read as cached."""
        return self.shared_slots.rotation

    # -- outside of graphs ------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a forward, by our means or SGLang's."""
        self._forget()
        mode = forward_batch.forward_mode
        if forward_batch.out_cache_loc is None or mode.is_idle():
            super().init_forward_metadata(forward_batch)
            return
        self.shared_slots.record(forward_batch)
        if mode.is_decode():
            if not self.reads_ours(forward_batch):
                super().init_forward_metadata(forward_batch)
            elif not self.always_ours:
                self._decode_plan = self.shared_slots.plan(forward_batch)
            else:
                buffers = self.shared_slots.buffers_of(forward_batch, positions=True)
                self._decode_plan = self.shared_slots.plan_into(buffers, forward_batch)
                batch = forward_batch.req_pool_indices, forward_batch.seq_lens
                lengths = forward_batch.seq_lens_cpu
                longest = self.shared_slots.widest if lengths is None else int(lengths.max())
                if self.statistics is not None:
                    self._noted = self.statistics.of_decode(buffers, *batch, longest)
                if self.selection is not None:
                    observed = self.statistics is not None
                    self.selection.begin(*batch, buffers, longest=longest, observed=observed)
            return
        rows = self._observe_prompts(forward_batch)
        if not self.mark.reads_shifted(forward_batch.rids):
            super().init_forward_metadata(forward_batch)
            return
        rows = self.shared_slots.plan(forward_batch) if rows is None else rows
        self._extend_plan = self.shared_slots.plan_extend(rows, forward_batch)

    def _forget(self) -> None:
        self._decode_plan = self._extend_plan = self._noted = self._queries = None
        if self.selection is not None:
            self.selection.forget()

    def _observe_prompts(self, forward_batch: Any) -> RowPlan | None:
        """Settle what a prefill notes; the plan of its rows, None where it notes nothing."""
        coming, self._coming = self._coming, None
        # SGLang's own trial runs are of no known batch.
        if self.statistics is None or coming is None or coming[0] is not forward_batch.rids:
            return None
        buffers = self.shared_slots.buffers_of(forward_batch, positions=True)
        rows = self.shared_slots.plan_into(buffers, forward_batch)
        self._noted, self._queries = self.statistics.of_prompts(
            coming[1], buffers, rows, forward_batch.req_pool_indices, forward_batch.seq_lens
        )
        return rows

    # -- in graphs --------------------------------------------------------------

    def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """Prefill graphs hold SGLang's kernels; one that is not theirs alone runs without."""
        if self.always_ours or self.mark.reads_shifted(forward_batch.rids):
            return False
        stock = getattr(super(), "can_run_prefill_cuda_graph", None)
        return stock is None or stock(forward_batch)

    def choose_graph(self, forward_batch: Any) -> str:
        """Which variant the forward about to be replayed runs; its preparation comes next."""
        self._graph_variant = SHIFTED if self.reads_ours(forward_batch) else PLAIN
        return self._graph_variant

    def init_cuda_graph_state(self, max_bs: int, *args: Any, **kwargs: Any) -> None:
        """Allocate what graphs of up to ``max_bs`` requests read."""
        super().init_cuda_graph_state(max_bs, *args, **kwargs)
        if self._graph_buffers is None or len(self._graph_buffers.shifted) < max_bs:
            if self._graph_buffers is not None:
                self._outgrown.append((self._graph_buffers, self._graph_weights))
            observed = self.statistics is not None
            self._graph_buffers = self.shared_slots.buffers(max_bs, positions=self.always_ours)
            if self.selection is not None:
                self.selection.allocate_graphs(max_bs, observed=observed)
            if observed:
                entries = len(self._graph_buffers.kv_indices)
                self._graph_weights = torch.zeros(entries, device=self.shared_slots.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What has to be done before a graph is captured or replayed."""
        self._forget()
        if not forward_batch.forward_mode.is_decode_or_idle():
            self.shared_slots.record(forward_batch)
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        variant = compat.get_capture_attention_variant() if in_capture else self._graph_variant
        if variant == PLAIN:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
        elif variant == SHIFTED and self._graph_buffers is not None:
            # SGLang's kernels are not in this graph, and a capture would replace the
            # plans that the plain graph of this size reads.
            self._decode_plan = self.shared_slots.planned(
                self._graph_buffers, forward_batch.batch_size
            )
            if self.statistics is not None:
                self._noted = self.statistics.of_decode(
                    self._graph_buffers,
                    forward_batch.req_pool_indices,
                    forward_batch.seq_lens,
                    self.shared_slots.widest,
                    self._graph_weights,
                )
        else:
            raise RuntimeError(
                f"sglang-reasoncache: a decode graph of variant {variant!r}, known are "
                f"{PLAIN!r} and {SHIFTED!r}"
            )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What becomes part of a graph: cached positions of new slots, and our plan."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata_in_graph(forward_batch)
            return
        self.shared_slots.record(forward_batch)
        if self._decode_plan is None:
            super().init_forward_metadata_in_graph(forward_batch)
        else:
            assert self._graph_buffers is not None
            self.shared_slots.plan_into(self._graph_buffers, forward_batch)
            if self.selection is not None:
                batch = forward_batch.req_pool_indices, forward_batch.seq_lens
                self.selection.begin_graph(*batch, self._graph_buffers)

    def shared_read_ends(self, mode: Any) -> Any:
        """Our plan is the last to look at rows: in the graph, or before a forward without one."""
        stock = super().shared_read_ends(mode)
        if not mode.is_decode_or_idle():
            return stock
        return compat.SharedReadEnds.max_of((stock, compat.SharedReadEnds.IN_REPLAY))

    # -- a layer ----------------------------------------------------------------

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``."""
        plan = self._decode_plan
        if plan is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        sinks = self._sinks(kwargs)
        self.shared_slots.write(k, v, layer, forward_batch, save_kv_cache)
        noted, some = self._noted, None
        if self.selection is not None:
            self.selection.note(layer.layer_id, forward_batch.out_cache_loc)
            some = self.shared_slots.select(self.selection, q, layer)
        weights = None if noted is None else noted.weights
        rows, into = (plan, weights) if some is None else some
        longest = None if noted is None else noted.longest
        out = self.shared_slots.decode(q, layer, rows, sinks, weights=into, longest=longest)
        if noted is not None:
            if some is not None and self.selection is not None:
                self.selection.add(noted.weights)
            self._note(layer, noted)
        return out

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``."""
        plan, noted, queries = self._extend_plan, self._noted, self._queries
        sinks = kwargs.get("sinks")
        if plan is None:
            out = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        else:
            sinks = self._sinks(kwargs)
            self.shared_slots.write(k, v, layer, forward_batch, save_kv_cache)
            out = self.shared_slots.extend(q, layer, plan, forward_batch, sinks)
        if self.selection is not None:
            self.selection.note(layer.layer_id, forward_batch.out_cache_loc)
        if noted is not None and queries is not None:
            # Fused kernels tell no weights; these are a few queries of each prompt.
            self.shared_slots.decode(
                q.view(len(q), -1)[queries.tokens],
                layer,
                queries.rows,
                sinks,
                spans=queries.spans,
                weights=noted.weights,
                longest=noted.longest,
            )
            self._note(layer, noted)
        return out

    def _note(self, layer: Any, noted: Noted) -> None:
        """After the last layer: weights go to their rows."""
        if layer.layer_id == self.shared_slots.last_layer and self.statistics is not None:
            self.statistics.note(noted)

    def _sinks(self, kwargs: dict[str, Any]) -> torch.Tensor | None:
        sinks = kwargs.pop("sinks", None)
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise ValueError(
                f"{self.requested_by}: attention with {', '.join(unknown)} is not served"
            )
        return sinks


class GraphVariants:
    """SGLang's ``AttentionGraphVariants``: two decode graphs a batch size.

    Args:
        backend: The one whose forwards are captured.
    """

    def __init__(self, backend: SharedSlotReads) -> None:
        self._backend = backend

    @property
    def capture_labels(self) -> tuple[str, ...]:
        """SGLang captures in this order, all in one pool of memory."""
        return (SHIFTED,) if self._backend.always_ours else (PLAIN, SHIFTED)

    def select(self, forward_batch: Any) -> str:
        """The label of the graph that ``forward_batch`` runs."""
        return self._backend.choose_graph(forward_batch)

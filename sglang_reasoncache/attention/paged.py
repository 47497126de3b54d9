# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV pool by this project's kernels, on the pool's device.

A *row* of ``req_to_token`` has the slot of each position of a request, or a number below 0 if the position was
evicted. A *plan* lists the slots that a forward reads, and how far to rotate keys cached for other positions.
On a GPU, planning need not wait for the device: the row lengths, which size a plan, are in host memory too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_reasoncache import compat
from sglang_reasoncache.attention import absorbed, expanded, verification
from sglang_reasoncache.attention.batch_mark import mark_of
from sglang_reasoncache.attention.models import attention_layers, is_absorbed, reach_of, windows_of
from sglang_reasoncache.attention.rotations import key_rotations
from sglang_reasoncache.attention.slots import slots_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.repair import Repaired
from sglang_reasoncache.compat.types import AttentionLayer, ForwardBatch, ModelRunner
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.recent_queries import LayerShape, RecentQueries
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import ExtendPlan, add_attention, extend_attention
from sglang_reasoncache.kernels.paged import PagedKv, rotate_rows
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.kernels.row_plan import RowPlan
from sglang_reasoncache.selection.pages import PageSelection
from sglang_reasoncache.selection.quest import Quest

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers

_Method = TypeVar("_Method", bound=Callable[..., Any])


def once_more(work: _Method) -> _Method:
    """Decorates a method so that :meth:`Containment.once_more` calls the method again if the first call raises.
    The method may only make new results or overwrite old ones, so that a second call does no harm. (It may
    count what a selection chose twice.)"""

    @functools.wraps(work)
    def tried(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.slots.owner.once_more(work, self, *arguments, **named)

    return tried  # type: ignore[return-value]


class PagedAttention:
    """Makes the plan of each forward and runs our kernels. Each attention backend has one such object.

    ``rows`` is the plan of a decode step or of the verification of drafted tokens, ``extend_plan`` is the plan
    of a prefill. Both are None in a forward that SGLang's kernels run. Layers with sliding windows have further
    plans: a decode step has one for each window size, a prefill has one if SGLang keeps the KV of these layers
    in a separate *window pool*."""

    def __init__(
        self, model_runner: ModelRunner, cached: CachedPositions | None, unread: int = 0
    ) -> None:
        """See ``PagedBackend``. ``unread``: how many of a window's oldest positions decode steps do not read.
        Raises ValueError if ``cached`` is given and the model's cached keys cannot be rotated."""
        self.slots = slots_of(model_runner.token_to_kv_pool_allocator)
        self._rows = model_runner.req_to_token_pool
        pool = model_runner.token_to_kv_pool
        self._pool = pool
        self.dtype = model_runner.dtype
        self.cached = cached
        #: Whether only our kernels can read rows that share: keys are rotated, or a page of positions names
        #: slots of several pages, which SGLang's page tables cannot say.
        self.reads_shared = cached is not None or pool.page_size > 1
        self._cached_at = None if cached is None else cached.positions
        self.device = self._rows.req_to_token.device
        #: Number of positions of a row.
        self.width = self._rows.req_to_token.shape[1]
        #: Layer id -> rotation of the layer's keys. The dict is None if keys are read as cached.
        self.rotations: dict[int, KeyRotation] | None = None
        #: Whether the pool holds latent KV (MLA).
        self.latent = bool(compat.latent_rank(pool))
        #: Whether SGLang's kernels can run prefills over shifted latent rows (``expanded.py``).
        self.expands = False
        #: Whether the pool holds numbers of fewer bits than the model's.
        self.rounds = pool.dtype.itemsize < self.dtype.itemsize
        #: Whether our kernels can run prefills.
        self.runs_prefills = not self.latent or absorbed.is_possible(model_runner)
        layers = {layer: compat.kv_of(pool, layer) for layer in compat.layer_ids(pool)}
        #: Ids of layers with KV in the window pool. A row's slot has a *peer* there, which is never shared.
        self._of_window = compat.window_layers(pool)
        self._peers: Any = getattr(pool, "translate_loc_from_full_to_swa", None)
        if cached is not None:
            dims = next(iter(layers.values()))[0].shape[2] if self.latent else None
            self.rotations = key_rotations(model_runner, dims)
        rotations: Any = self.rotations or dict.fromkeys(layers)
        self.pools = {
            layer: PagedKv(keys, values, rotations[layer], latent=self.latent)
            for layer, (keys, values) in layers.items()
        }
        # A draft model may have windows only.
        shared = compat.shared_layers(pool)
        first = self.pools[shared[0] if shared else min(layers)]
        #: One of ``kernels.paged.BACKENDS``.
        self.backend = first.backend
        self._num_slots = first.num_slots if shared else pool.size + pool.page_size
        self.attention_layers = attention_layers(model_runner)
        # Size of a window, in positions -> how many of its positions a decode step reads.
        self._reaches = {reach: reach - unread for reach in sorted(windows_of(model_runner))}
        # How many drafted tokens of a request are verified in a step. 0 without speculation.
        self._drafts = compat.drafted_tokens(model_runner)
        # Whether prefills handle tokens singly, like decode: PyTorch's fused attention cannot soft-cap logits.
        self._singly = any(layer.logit_cap > 0 for layer in self.attention_layers)
        self.queries: RecentQueries | None = None  # None if no policy reads queries
        self.selection: PageSelection | None = None  # None if decode steps read all pages
        self.forget()

    # -- when the server starts -----------------------------------------------------

    def keep_queries(self, window: int) -> RecentQueries:
        """Keep the ``window`` newest queries of each row from now on. Raises MemoryError if memory runs out."""
        layers = {
            layer.layer_id: LayerShape(
                heads=layer.tp_q_head_num,
                dim=layer.qk_head_dim,
                scale=self._scales(layer)[0],
                logit_cap=layer.logit_cap,
            )
            for layer in self.attention_layers
        }
        generations = self._rows.req_generation
        self.queries = RecentQueries(layers, generations, window, self.dtype, self.device)
        return self.queries

    def select(self, quest: Quest) -> PageSelection:
        """Have decode steps read the pages that ``quest`` selects from now on. Raises MemoryError if memory is
        missing."""
        self.selection = PageSelection(
            quest,
            {layer: kv.keys for layer, kv in self.pools.items()},
            self._pool.page_size,
            self._rows.req_to_token,
            self._cached_at,
            self.backend,
        )
        return self.selection

    # -- planning -------------------------------------------------------------------

    @property
    def merges(self) -> bool:
        """Whether decode plans are merged (:class:`RowPlan`), so that a slot that a row repeats is read once.
        Not with a selection: each layer makes a plan then, and merging takes several launches on a GPU."""
        return self.cached is not None and self.selection is None

    def buffers(
        self, batch: int, entries: int | None = None, *, merge: bool = False
    ) -> PlanBuffers:
        """GPU memory for plans of ``batch`` requests with ``entries`` slots in total (None: for full rows)."""
        from sglang_reasoncache.kernels.plan_triton import PlanBuffers

        entries = batch * self.width if entries is None else entries
        return PlanBuffers.of(batch, entries, self.device, merge=merge)

    def graph_buffers(
        self, batch: int, device: torch.device | None = None
    ) -> dict[int, PlanBuffers]:
        """Memory for the plans in a decode graph of ``batch`` requests, by the number of positions that a layer
        sees (0: all). ``device``: None for the pool's device."""
        from sglang_reasoncache.kernels.plan_triton import PlanBuffers

        widths = {reach: self._seen(reach, self._drafts) for reach in self._reaches}
        return {
            reach: PlanBuffers.of(
                batch,
                batch * min(width, self.width),
                self.device if device is None else device,
                merge=self._merges_for(reach),
            )
            for reach, width in {0: self.width, **widths}.items()
        }

    def graph_bytes(self, batch: int) -> int:
        """How many bytes :meth:`graph_buffers`, and what a selection makes in a graph, take. Takes no memory
        itself."""
        shapes = self.graph_buffers(batch, torch.device("meta"))
        planned = sum(buffers.nbytes for buffers in shapes.values())
        if self.selection is None:
            return planned
        heads = max(layer.tp_q_head_num for layer in self.attention_layers)
        return planned + self.selection.graph_bytes(batch, heads)

    def _seen(self, reach: int, drafted: int) -> int:
        """How many of a row's last positions the plan of layers that see ``reach`` positions has (0: all), for
        a step that verifies ``drafted`` tokens a request (0: a decode step)."""
        if not drafted:
            return self._reaches.get(reach, 0)
        # SGLang's kernels verify like a prefill, which reads whole windows.
        return verification.window_entries(reach, drafted)

    def _merges_for(self, reach: int) -> bool:
        """Whether plans of layers that see ``reach`` positions (0: all) are merged. Drafted tokens see windows
        that begin at different entries, which a merged plan does not tell apart."""
        return self.merges and not (reach and (self._of_window or self._drafts))

    def _has_window_pool(self, reach: int) -> bool:
        """Whether layers that see ``reach`` positions (0: all) have a window pool. Keys in this pool are
        read as cached, because its slots are never shared."""
        return bool(reach and self._of_window)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return bool(self._reaches)

    @property
    def has_window_pool(self) -> bool:
        """Whether some layers read a window pool."""
        return bool(self._of_window)

    def plan_into(
        self,
        buffers: PlanBuffers,
        requests: Tensor,
        lengths: Tensor,
        reach: int = 0,
        drafted: int = 0,
    ) -> RowPlan:
        """Plan rows on a GPU for layers that see ``reach`` positions (0: all). ``drafted``: how many drafted
        tokens at the end of each row are verified. The queued work can be captured in a CUDA graph."""
        from sglang_reasoncache.kernels.plan_triton import plan_into

        has_window_pool = self._has_window_pool(reach)
        plan = plan_into(
            buffers,
            self._rows.req_to_token,
            requests,
            lengths,
            None if has_window_pool else self._cached_at,
            num_slots=self._num_slots,
            reach=self._seen(reach, drafted),
        )
        return self._in_window_pool(plan) if has_window_pool else self.readable(plan)

    def plan_graph(self, buffers: dict[int, PlanBuffers], batch: ForwardBatch) -> None:
        """Queue the planning as a part of a decode graph. Call :meth:`begin_graph` before."""
        # Use the returned plans. For a window pool these are new tensors, which ``buffers`` does not hold.
        lengths = verification.row_ends(batch)
        drafted = verification.drafted(batch)
        self._use(
            {
                reach: self.plan_into(memory, batch.req_pool_indices, lengths, reach, drafted)
                for reach, memory in buffers.items()
            }
        )
        self._find_peers(batch)

    def readable(self, plan: RowPlan) -> RowPlan:
        """``plan``, but without shifts if keys are read as cached: all shifts in the buffers are 0 then."""
        return plan if self.cached is not None else plan._replace(shift=None)

    def _plan(
        self,
        batch: ForwardBatch,
        *,
        merge: bool = False,
        reach: int = 0,
        lengths: Tensor | None = None,
    ) -> RowPlan:
        """Plan the rows of a batch. ``reach``: see :meth:`plan_into`. ``lengths``: row lengths, int64
        ``[batch]`` in host memory; None uses the lengths in ``batch``, with drafted tokens."""
        drafted = verification.drafted(batch)
        ends = (
            verification.row_ends(batch)
            if lengths is None
            else upload(lengths.numpy(), self.device)
        )
        has_window_pool = self._has_window_pool(reach)
        seen = self._seen(reach, drafted)
        merge = merge and self._merges_for(reach)
        if self.backend == "triton":
            if lengths is None and batch.seq_lens_cpu is not None:
                lengths = batch.seq_lens_cpu + drafted
            if lengths is not None and seen:
                lengths = lengths.clamp(max=seen)
            entries = _most_entries(batch, drafted) if lengths is None else int(lengths.sum())
            buffers = self.buffers(len(batch.seq_lens), entries, merge=merge)
            return self.plan_into(buffers, batch.req_pool_indices, ends, reach, drafted)
        plan = plan_rows(
            self._rows.req_to_token,
            batch.req_pool_indices,
            ends,
            None if has_window_pool or not self.slots.has_shifted_slots else self._cached_at,
            num_slots=self._num_slots,
            reach=seen,
            merge=merge and not drafted,
        )
        if drafted:
            plan = verification.one_by_one(plan, verification.sees_of(batch, drafted), reach)
        return self._in_window_pool(plan) if has_window_pool else plan

    def _in_window_pool(self, plan: RowPlan) -> RowPlan:
        """``plan`` with each slot replaced by its peer, or by SGLang's padding slot if the peer was freed."""
        return RowPlan(plan.kv_indptr, self._peers(plan.kv_indices).int(), None)

    # -- a forward ------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all plans. Nothing is planned until the next forward begins."""
        self.rows: RowPlan | None = None
        #: What the drafted tokens of ``rows`` see of one another (``verification.sees_of``). None in decode
        #: steps, and on a CPU, where each token has a plan of its own.
        self._sees: Tensor | None = None
        #: Window size -> plan of the layers with a window of this size. Other layers use the plan ``rows``.
        self.windows: dict[int, RowPlan] = {}
        self.extend_plan: ExtendPlan | None = None
        #: The plan of a prefill for layers with a window pool.
        self._window_extend: ExtendPlan | None = None
        self._evicted: Sequence[int] | None = None
        #: The peers of the new tokens' slots. None until a forward is planned, and without a window pool.
        self._new_peers: Tensor | None = None
        self._repairs: list[Repaired] = []
        #: The lists of slots that SGLang fetched from in this forward, each with its slots' shifts.
        self._fetched: list[tuple[Tensor, Tensor]] = []
        #: Memory for the plans of layers that select. None until the first one of a forward, and on a CPU.
        self._chosen: PlanBuffers | None = None
        if self.queries is not None:
            self.queries.forget()
        if self.selection is not None:
            self.selection.forget()

    def _repairs_of(self, batch: ForwardBatch) -> list[Repaired]:
        """This prefill's requests that recompute tokens of cached documents or whose attention is scored."""
        if batch.rids is None or batch.extend_seq_lens_cpu is None:
            return []
        return self.slots.repairs.of(batch.rids, batch.extend_seq_lens_cpu)

    @once_more
    def record(self, batch: ForwardBatch) -> None:
        """Set the positions of recomputed tokens, record the positions of new keys, choose queries to keep."""
        self._repairs = self._repairs_of(batch)
        for placed in self._repairs:
            places = upload(placed.positions, self.device, batch.positions.dtype)
            batch.positions[placed.token : placed.token + len(places)] = places
            if batch.mrope_positions is not None:
                # For text, each of the three components is the token's position.
                batch.mrope_positions[:, placed.token : placed.token + len(places)] = places
        if self.cached is not None:
            slots = batch.out_cache_loc
            drafted = verification.drafted(batch)
            key_positions = (
                verification.row_positions(batch, drafted) if drafted else batch.positions
            )
            # SGLang may pad either: with requests that hold no slots, or with slots of no request.
            count = min(len(key_positions), len(slots))
            self.cached.record(slots[:count], key_positions[:count])
        rows = batch.req_pool_indices
        positions = batch.positions
        if self.queries is None:
            return
        if batch.forward_mode.is_decode_or_idle():
            self.queries.begin_decode(rows, positions[: len(rows)])
        elif batch.rids is not None:
            # SGLang's own trial runs have no requests, so they keep no queries.
            self.queries.begin_extend(rows, positions, batch.extend_seq_lens_cpu)

    @once_more
    def begin_selection(self, batch: ForwardBatch, longest: int | None = None) -> None:
        """Have the selection read the rows of a forward, if there is one. Follows :meth:`record`. ``longest``:
        length of the longest row, or a greater number; None: as the batch says."""
        if self.selection is None:
            return
        # A captured graph takes memory of its own, not that of SGLang's trial runs.
        self._chosen = None
        if longest is None:
            lengths = batch.seq_lens_cpu
            if lengths is None and self.device.type == "cpu":
                lengths = batch.seq_lens
            longest = self.width if lengths is None else int(lengths.max())
        decodes = batch.forward_mode.is_decode()
        self.selection.begin(batch.req_pool_indices, batch.seq_lens, longest, decodes=decodes)

    @once_more
    def written(self, layer: AttentionLayer) -> None:
        """Called when the new keys of a layer are in the pool, whichever kernels compute its attention."""
        if self.selection is not None:
            # This call waits until SGLang has loaded the layer's KV from the host.
            self._pool.get_key_buffer(layer.layer_id)
            self.selection.written(layer.layer_id)

    @once_more
    def begin_decode(self, batch: ForwardBatch) -> None:
        """Plan a decode step, or the verification of drafted tokens, outside of graphs."""
        reaches = (0, *self._reaches)
        drafted = verification.drafted(batch)
        if drafted and self.backend == "triton":
            self._sees = verification.sees_of(batch, drafted)
        self._use({reach: self._plan(batch, merge=self.merges, reach=reach) for reach in reaches})
        self._find_peers(batch)

    def _use(self, plans: dict[int, RowPlan]) -> None:
        self.rows = plans.pop(0)
        self.windows = plans

    @once_more
    def begin_graph(
        self, buffers: dict[int, PlanBuffers], batch: ForwardBatch, sees: Tensor | None = None
    ) -> None:
        """Use the plans in ``buffers``, which the decode graph will write when it runs. ``sees``: memory for
        what drafted tokens see of one another, int64 ``[requests, drafted tokens]``, which is written now."""
        size = batch.batch_size
        drafted = verification.drafted(batch)
        if drafted:
            assert sees is not None, "memory for the drafted tokens of a graph"
            self._sees = sees[:size]
            self._sees.copy_(verification.sees_of(batch, drafted))
        self._use({reach: self.readable(memory.plan_of(size)) for reach, memory in buffers.items()})

    @once_more
    def begin_extend(self, batch: ForwardBatch, evicted: Sequence[int] | None = None) -> None:
        """Plan a prefill for our kernels. ``evicted``: number of evicted positions per row; None if unknown."""
        self._evicted = evicted
        lengths = None
        if self._repairs and batch.seq_lens_cpu is not None:
            # A row is read at least up to ``least``, because SGLang's length may exclude recomputed positions.
            lengths = batch.seq_lens_cpu.clone()
            for placed in self._repairs:
                lengths[placed.number].clamp_(min=placed.least)
        rows = self._plan(batch, lengths=lengths)
        self._plan_extend(rows, self._in_window_pool(rows) if self._of_window else None, batch)
        self._find_peers(batch)

    def _plan_extend(self, rows: RowPlan, of_window: RowPlan | None, batch: ForwardBatch) -> None:
        """``of_window``: ``rows`` with slots of the window pool; None without one."""
        self.extend_plan = self._planned_extend(rows, batch)
        if of_window is not None:
            self._window_extend = self._planned_extend(of_window, batch)

    def _find_peers(self, batch: ForwardBatch) -> None:
        """Look up the peers of the new tokens' slots. This belongs to planning: once a forward is planned,
        SGLang may change them for the next one."""
        if self._of_window:
            self._new_peers = self._peers(batch.out_cache_loc)

    def _planned_extend(self, rows: RowPlan, batch: ForwardBatch) -> ExtendPlan:
        new = batch.extend_seq_lens_cpu
        evicted = self._evicted if self.slots.has_evicted else [0] * len(new)
        entries = None
        # If ``evicted`` is unknown, only the device knows how many entries there are.
        if evicted is not None:
            lengths = zip(batch.extend_prefix_lens_cpu, new, evicted, strict=True)
            entries = [before + count - gone for before, count, gone in lengths]
            for placed in self._repairs:
                entries[placed.number] = max(entries[placed.number], placed.least)
        positions = {placed.number: placed.positions for placed in self._repairs}
        return ExtendPlan(
            rows, new, self.dtype, singly=self._singly, entries=entries, placed=positions
        )

    # -- a layer --------------------------------------------------------------------

    def put(
        self,
        k: Tensor | None,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> None:
        """Put new keys and values into the pool, as SGLang's backends do."""
        if save_kv_cache and k is not None and v is not None:
            peers = self._new_peers
            # SGLang may leave out padding here.
            peers = None if peers is None else peers[: len(batch.out_cache_loc)]
            location = compat.KVWriteLoc.for_batch(batch, swa_loc=peers)
            if self.latent:
                self._pool.set_kv_buffer(layer, location, k, v)
            else:
                self._pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)

    @once_more
    def decode(self, q: Tensor, layer: AttentionLayer, sinks: Tensor | None) -> Tensor:
        """A layer's decode attention. ``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``. In
        the verification of drafted tokens these have a row for each token, and may have more rows."""
        if self.rows is None:
            raise RuntimeError("forward_decode without a plan of its batch")
        reach = reach_of(layer)
        rows = self.windows.get(reach, self.rows)
        if self.selection is not None:
            rows = self._selected(q, layer, rows)
        several: dict[str, Any] = {}
        if self._sees is not None:
            several = {"sees": self._sees, "reach": reach}
        run = functools.partial(decode_attention, **several)
        planned = len(rows.kv_indptr) - 1
        if self._sees is not None:
            planned *= self._sees.shape[1]
        return _padded(self._attend(run, q[:planned], layer, rows, sinks), len(q))

    def _selected(self, q: Tensor, layer: AttentionLayer, rows: RowPlan) -> RowPlan:
        """The plan of a layer of a decode step: ``rows``, or what the selection chose."""
        assert self.selection is not None
        query = q[: len(rows.kv_indptr) - 1].reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        chosen = self.selection.choose(layer.layer_id, query, self._scales(layer)[0])
        if chosen is None:
            return rows
        table, lengths = chosen
        numbers = torch.arange(len(table), device=table.device)
        if self.backend != "triton":
            return plan_rows(
                table,
                numbers,
                lengths,
                self._cached_at if self.slots.has_shifted_slots else None,
                num_slots=self._num_slots,
            )
        from sglang_reasoncache.kernels.plan_triton import plan_into

        if self._chosen is None:
            self._chosen = self.buffers(len(table), table.numel())
        return self.readable(
            plan_into(
                self._chosen, table, numbers, lengths, self._cached_at, num_slots=self._num_slots
            )
        )

    @once_more
    def extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, sinks: Any) -> Tensor:
        """A layer's prefill attention. ``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``."""
        plan = self.extend_plan
        if plan is None:
            raise RuntimeError("forward_extend without a plan of its batch")
        if sinks is not None and plan.pieces:
            self._singly = True
            of_window = self._window_extend
            self._plan_extend(plan.rows, None if of_window is None else of_window.rows, batch)
        plan = self._window_extend if layer.layer_id in self._of_window else self.extend_plan
        assert plan is not None
        # This call waits until SGLang has loaded the layer's KV from the host.
        self._pool.get_key_buffer(layer.layer_id)
        reach = reach_of(layer)
        run = functools.partial(extend_attention, reach=reach)
        out = self._attend(run, q[: plan.num_tokens], layer, plan, sinks)
        for scored in self._repairs:
            if scored.received is not None:
                query = q[scored.token : scored.token + scored.new]
                query = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
                # If memory runs out, this layer adds nothing to the scores, which only rank tokens.
                with contextlib.suppress(RuntimeError):
                    add_attention(
                        query,
                        self.pools[layer.layer_id],
                        plan,
                        number=scored.number,
                        scale=self._scales(layer)[0],
                        received=scored.received,
                        reach=reach,
                    )
        return _padded(out, len(q))

    def is_expanded(self, layer: AttentionLayer) -> bool:
        """Whether a layer attends to keys and values of heads that SGLang expanded from latent rows."""
        return self.latent and not is_absorbed(layer, compat.latent_rank(self._pool))

    @once_more
    def rotate_fetched(
        self, keys: Tensor, layer: int, slots: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """The rotated dims of latent rows that SGLang fetched, ``[n, 1, dims]``, rotated to the positions where
        a prefill reads them. ``slots``: SGLang's list of their slots, int ``[n]``."""
        pool = self.pools[layer]
        if self._cached_at is None or pool.rotation is None:
            return keys
        shift = next((shift for known, shift in self._fetched if known is slots), None)
        if shift is None:
            shift = (expanded.read_positions(batch, slots) - self._cached_at[slots.long()]).int()
            # All layers fetch from the same lists.
            self._fetched.append((slots, shift))
        return rotate_rows(pool, keys, shift)

    @once_more
    def keep(self, q: Tensor, layer: AttentionLayer) -> None:
        """Keep the queries of a forward, whichever kernels compute its attention."""
        if self.queries is not None:
            self.queries.keep(layer.layer_id, q.reshape(len(q), -1))

    def _attend(
        self,
        run: Callable[..., Tensor],
        q: Tensor,
        layer: AttentionLayer,
        plan: RowPlan | ExtendPlan,
        sinks: Tensor | None,
    ) -> Tensor:
        """Run a layer's attention. ``run``: the attention function in ``kernels`` for decode or for extend."""
        scale, v_scale = self._scales(layer)
        out = run(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.pools[layer.layer_id],
            plan,
            scale=scale,
            logit_cap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(),
        )
        if v_scale != 1.0:
            out *= v_scale
        return out.view(out.shape[0], -1)

    def _scales(self, layer: AttentionLayer) -> tuple[float, float]:
        """Factors for logits (with the softmax scale) and outputs. They undo the scales by which SGLang divides
        keys and values that it caches in another dtype than the model's. Latent rows are not divided."""
        if self.latent or self._pool.dtype == self.dtype:
            return layer.scaling, 1.0
        k_scale = 1.0 if layer.k_scale_float is None else layer.k_scale_float
        v_scale = 1.0 if layer.v_scale_float is None else layer.v_scale_float
        return layer.scaling * k_scale, v_scale


def _padded(out: Tensor, rows: int) -> Tensor:
    """``out`` with zeros up to ``rows`` rows. SGLang pads the tokens of a forward if several ranks gather them:
    so that all groups of DP attention gather equally many, or a number that the ranks of a group divide."""
    return F.pad(out, (0, 0, 0, rows - len(out))) if rows > len(out) else out


def _most_entries(batch: ForwardBatch, drafted: int) -> int | None:
    """How many slots the rows of a batch name at most, if only the device knows their lengths. None if the
    batch is not marked. A request that SGLang adds to pad the batch has a length of 1."""
    mark = mark_of(batch)
    if mark is None or mark.slots is None:
        return None
    padding = max(0, len(batch.seq_lens) - len(mark))
    return mark.slots + padding * (1 + drafted)

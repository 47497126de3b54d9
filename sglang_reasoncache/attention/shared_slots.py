# SPDX-License-Identifier: Apache-2.0
"""Attention over rows with shifted slots or evicted positions, on the pool's device, by this project's kernels.

Nothing here waits for a device: lengths come from the host's copies, and a plan
has room for as many entries as they say.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.supported import attention_layers
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import ExtendPlan, extend_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from sglang_reasoncache.kernels.rotation import KeyRotation

if TYPE_CHECKING:
    from sglang_reasoncache.eviction.policies.contract import Selector
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers
    from sglang_reasoncache.selection.device_selection import DeviceSelection


class SharedSlotAttention:
    """Plans and computes; keeps nothing of a forward.

    Args:
        model_runner: SGLang's runner.
        cached: Slots' cached positions: shared keys are used at the position where they are
            read. None reads every key as cached.

    Raises:
        ValueError: no rotary embedding by which a key could be moved.
    """

    def __init__(self, model_runner: Any, cached: CachedPositions | None) -> None:
        self._allocator = model_runner.token_to_kv_pool_allocator
        self._rows = model_runner.req_to_token_pool
        self._pool = model_runner.token_to_kv_pool
        self._dtype = model_runner.dtype
        self.cached_at = cached
        self.device = self._rows.req_to_token.device
        rotation = None
        if cached is not None:
            rotation = KeyRotation.from_model(
                model_runner.model, model_runner.model_config.context_len
            )
        pool = self._pool
        self._layers = {
            layer: PagedKv(pool.get_key_buffer(layer), pool.get_value_buffer(layer), rotation)
            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num)
        }
        first = self._layers[pool.start_layer]
        self.backend = first.backend
        #: The model's, on the pool's device; None where keys are read as cached.
        self.rotation = first.rotation
        self._num_slots = first.num_slots
        # Soft-capped logits are beyond PyTorch's fused attention.
        self._attention = attention_layers(model_runner.model)
        #: The last of this rank's layers to run.
        self.last_layer = max(self._layers)
        self._singly = any(layer.logit_cap > 0 for layer in self._attention)

    def warm_up(self, *, observed: bool = False) -> PlanBuffers:
        """Compile what the first forwards over shifted slots would wait for, some seconds.

        Reads row 0, which is no request's, and writes nothing.

        Args:
            observed: What gives weights, instead of what gives none.

        Returns:
            The plan of that row.
        """
        from sglang_reasoncache.kernels.plan_triton import plan_into

        one = torch.ones(1, dtype=torch.int64, device=self.device)
        rows, entries = self._rows.req_to_token, 8
        buffers = self.buffers(1, entries, positions=observed)
        plan = plan_into(
            buffers,
            rows,
            one * 0,
            one * entries,
            self._cached_at,
            num_slots=self._num_slots,
        )
        plan = self._readable(plan)
        spans = (plan.kv_indptr[:1].clone(), plan.kv_indptr[1:].clone())
        for layer in {
            (x.tp_q_head_num, x.qk_head_dim, x.logit_cap): x for x in self._attention
        }.values():
            kv = self._layers[layer.layer_id]
            query = torch.zeros(
                (1, layer.tp_q_head_num, layer.qk_head_dim), dtype=self._dtype, device=self.device
            )
            # Addresses that are multiples of 16 bytes and others are kernels of their own.
            for some in (None, spans):
                decode_attention(
                    query,
                    kv,
                    plan,
                    scale=1.0,
                    logit_cap=layer.logit_cap,
                    spans=some,
                    weights=query.new_zeros(entries, dtype=torch.float32) if observed else None,
                    longest=entries,
                )
            for first in () if observed else (0, 1):
                shift = None if plan.shift is None else plan.shift[first:]
                gather_kv(kv, plan.kv_indices[first:], shift, self._dtype)
        return buffers

    def selection(self, name: str, selector: Selector) -> DeviceSelection:
        """What ``selector`` has read of the pool's pages, tried out and compiled.

        Raises:
            ValueError: it does not do, see ``DeviceSelection``.
            MemoryError: there is none for the pages' bounds.
        """
        from sglang_reasoncache.selection.device_selection import DeviceSelection

        rows = self._rows.req_to_token
        keys = {layer: kv.keys for layer, kv in self._layers.items()}
        made = DeviceSelection(
            name, selector, keys, self._allocator.page_size, rows, self._cached_at
        )
        one = SimpleNamespace(
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=self.device),
            seq_lens=torch.full((1,), self.widest, device=self.device),
        )
        whole = self.buffers(1, positions=True)
        self.plan_into(whole, one)
        # The last layer of each shape: the first ones may read everything.
        alike = {(layer.tp_q_head_num, layer.qk_head_dim): layer for layer in self._attention}
        made.try_out(
            whole,
            {
                layer.layer_id: torch.zeros((1, *shape), dtype=self._dtype, device=self.device)
                for shape, layer in alike.items()
            },
        )
        return made

    def record(self, forward_batch: Any) -> None:
        """Note where the forward's new tokens are at home, where that will be asked for."""
        if self.cached_at is None:
            return
        slots = forward_batch.out_cache_loc
        self.cached_at.record(slots, forward_batch.positions[: slots.shape[0]])

    def buffers(
        self, batch: int, entries: int | None = None, *, positions: bool = False
    ) -> PlanBuffers:
        """Room for plans of ``batch`` requests and ``entries``; None: whole rows.

        ``positions``: plans tell those of their entries too.
        """
        from sglang_reasoncache.kernels.plan_triton import PlanBuffers

        return PlanBuffers.of(
            batch,
            batch * self.widest if entries is None else entries,
            self.device,
            positions=positions,
        )

    def buffers_of(self, forward_batch: Any, *, positions: bool = False) -> PlanBuffers:
        """Room for the plan of one forward; see :meth:`buffers`."""
        lengths = forward_batch.seq_lens_cpu
        entries = None if lengths is None else int(lengths.sum())
        return self.buffers(forward_batch.seq_lens.shape[0], entries, positions=positions)

    @property
    def widest(self) -> int:
        """Positions of a row."""
        return self._rows.req_to_token.shape[1]

    def plan_into(self, buffers: PlanBuffers, forward_batch: Any) -> RowPlan:
        """Plan a batch's rows; what this queues on the device can be captured in a CUDA graph."""
        from sglang_reasoncache.kernels.plan_triton import plan_into

        plan_into(buffers, *self._read(forward_batch), num_slots=self._num_slots)
        return self.planned(buffers, forward_batch.seq_lens.shape[0])

    def planned(self, buffers: PlanBuffers, batch: int) -> RowPlan:
        """What was, or will be, planned into ``buffers`` for ``batch`` requests."""
        return self._readable(buffers.plan_of(batch))

    def _readable(self, plan: RowPlan) -> RowPlan:
        """Without shifts where no key can be rotated; buffers have room for them anyway."""
        return plan if self.cached_at is not None else plan._replace(shift=None)

    def plan(self, forward_batch: Any) -> RowPlan:
        """Plan a batch in memory of its own."""
        if self.backend != "triton":
            return plan_rows(*self._read(forward_batch), num_slots=self._num_slots)
        return self.plan_into(self.buffers_of(forward_batch), forward_batch)

    @property
    def _cached_at(self) -> torch.Tensor | None:
        return None if self.cached_at is None else self.cached_at.positions

    def _read(self, forward_batch: Any) -> tuple[Any, ...]:
        return (
            self._rows.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self._cached_at,
        )

    def plan_extend(self, rows: RowPlan, forward_batch: Any) -> ExtendPlan:
        """Plan a batch of new tokens over their prefixes; ``rows`` as :meth:`plan` plans them."""
        return self._extend_plan(rows, forward_batch, self._singly)

    def _extend_plan(self, rows: RowPlan, forward_batch: Any, singly: bool) -> ExtendPlan:
        new, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        entries = None
        # Only the device knows how many positions of a row were dropped. Reading that waits
        # for it, in prefills beside requests with evicted positions.
        if not self._allocator.has_evicted:
            entries = [a + b for a, b in zip(before, new, strict=True)]
        return ExtendPlan(rows, new, self._dtype, singly=singly, entries=entries)

    def write(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> None:
        """Put new keys and values into the pool, as SGLang's backends do."""
        if not save_kv_cache or k is None or v is None:
            return
        self._pool.set_kv_buffer(
            layer,
            compat.KVWriteLoc.for_batch(forward_batch),
            k,
            v,
            layer.k_scale,
            layer.v_scale,
        )

    def select(
        self, selection: DeviceSelection, q: torch.Tensor, layer: Any
    ) -> tuple[RowPlan, torch.Tensor | None] | None:
        """What of the step's plan a layer reads, see ``DeviceSelection.plan``."""
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return selection.plan(layer.layer_id, query, self._scales(layer)[0])

    def decode(
        self,
        q: torch.Tensor,
        layer: Any,
        plan: RowPlan,
        sinks: torch.Tensor | None,
        *,
        spans: tuple[torch.Tensor, torch.Tensor] | None = None,
        weights: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> torch.Tensor:
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``.

        ``spans``, ``weights``, ``longest``: see ``decode_attention``.
        """
        scale, v_scale = self._scales(layer)
        out = decode_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self._layers[layer.layer_id],
            plan,
            scale=scale,
            logit_cap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(),
            spans=spans,
            weights=weights,
            longest=longest,
        )
        return _flat(out, v_scale)

    def extend(
        self,
        q: torch.Tensor,
        layer: Any,
        plan: ExtendPlan,
        forward_batch: Any,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``."""
        scale, v_scale = self._scales(layer)
        if sinks is not None and plan.pieces:
            self._singly = True
            plan = self._extend_plan(plan.rows, forward_batch, singly=True)
        out = extend_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self._layers[layer.layer_id],
            plan,
            scale=scale,
            logit_cap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(),
        )
        return _flat(out, v_scale)

    def _scales(self, layer: Any) -> tuple[float, float]:
        """What logits are multiplied by, and outputs: the pool divides only what it narrows."""
        if self._pool.dtype == self._dtype:
            return layer.scaling, 1.0
        k_scale, v_scale = layer.k_scale_float, layer.v_scale_float
        return (
            layer.scaling * (1.0 if k_scale is None else k_scale),
            1.0 if v_scale is None else v_scale,
        )


def _flat(out: torch.Tensor, v_scale: float) -> torch.Tensor:
    if v_scale != 1.0:
        out *= v_scale
    return out.view(out.shape[0], -1)

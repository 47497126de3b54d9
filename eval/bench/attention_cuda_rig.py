# SPDX-License-Identifier: Apache-2.0
"""A batch on a GPU: our operations and FlashInfer's decode on the same pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eval.bench.attention_rows import Shape, cached_positions, lay_rows
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.kernels.rotation import KeyRotation

_SEED = 5
#: FlashInfer's own recommendation.
_WORKSPACE_BYTES = 128 << 20
#: Largest difference from fp32 attention relative to its norm: bf16 has 8 bits, and a kernel
#: may round weights and result.
_TOLERANCE = 2 * 2.0**-8
_CHECKED = 3


class GpuStep:
    """Decode attention of one layer.

    Args:
        shape: Of the batch and the pool.
        place: Device of the pool; on a CPU Triton has to run interpreted.
    """

    def __init__(self, shape: Shape, place: str = "cuda") -> None:
        torch.manual_seed(_SEED)
        self.shape = shape
        device = torch.device(place)
        dim = shape.head_dim
        side = (shape.slots, shape.kv_heads, dim)
        keys, values = (
            torch.empty(side, dtype=torch.bfloat16, device=device).uniform_(-1, 1) for _ in range(2)
        )
        powers = torch.arange(0, dim, 2, device=device) / dim
        angles = torch.arange(shape.tokens, device=device)[:, None] * 1e4**-powers
        rotation = KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, True)
        self._kv = PagedKv(keys, values, rotation, backend="triton")
        self._reference = PagedKv(keys, values, rotation, backend="torch")
        self._scale = dim**-0.5
        self._query = torch.randn((shape.requests, shape.heads, dim), device=device).bfloat16()
        self._out = torch.empty_like(self._query)
        self._cached_at = cached_positions(shape).to(device)
        self._requests = torch.arange(shape.requests, device=device)
        self._lengths = torch.full((shape.requests,), shape.tokens, device=device)
        self._own = lay_rows(shape, 0).to(device)
        self._rows = self._own
        self._buffers = PlanBuffers.of(shape.requests, shape.slots - 1, device)
        self.share(0)

    def share(self, percent: int) -> None:
        """Lay the rows anew, so much of each in blocks at the slots of earlier blocks."""
        shape = self.shape
        self._rows = lay_rows(shape, percent).to(self._own.device)
        self._plan = plan_rows(
            self._rows,
            self._requests,
            self._lengths,
            self._cached_at,
            num_slots=shape.slots,
        )
        shifted = 0 if self._plan.shift is None else int(self._plan.shift.count_nonzero())
        if (shifted > 0) != (percent > 0):
            raise RuntimeError(f"{shape}, {percent}% shared: the plan moves {shifted} entries")

    def plan(self) -> RowPlan:
        """As for a step of a server: into the same buffers."""
        return plan_into(
            self._buffers,
            self._rows,
            self._requests,
            self._lengths,
            self._cached_at,
            num_slots=self.shape.slots,
        )

    def decode(self) -> torch.Tensor:
        return decode_attention(self._query, self._kv, self._plan, scale=self._scale, out=self._out)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self._plan
        return gather_kv(self._kv, plan.kv_indices, plan.shift, torch.bfloat16)

    def flashinfer(self, as_cached: bool) -> Callable[[], torch.Tensor]:
        """Planned; of the rows as they are, or of each request's own slots.

        Raises:
            RuntimeError: its result is not the reference's.
        """
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shape, rows = self.shape, self._rows if as_cached else self._own
        device = rows.device
        indptr = torch.arange(shape.requests + 1, dtype=torch.int32, device=device) * shape.tokens
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            # As SGLang decides it for 16-bit pools.
            use_tensor_cores=shape.heads // shape.kv_heads >= 4,
        )
        wrapper.plan(
            indptr,
            rows.flatten(),
            torch.ones(shape.requests, dtype=torch.int32, device=device),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            1,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            sm_scale=self._scale,
        )
        pool = (self._kv.keys[:, None], self._kv.values[:, None])
        out = torch.empty_like(self._query)

        def run() -> torch.Tensor:
            found: torch.Tensor = wrapper.run(self._query, pool, out=out)
            return found

        plan = RowPlan(indptr, rows.flatten(), None)
        self._compare("FlashInfer", run(), plan)
        return run

    def check(self) -> None:
        """Raises RuntimeError where a plan's, decode's or gather's result is not the reference's."""
        # Planned either way, it is the same plan.
        for found, expected in zip(self.plan(), self._plan, strict=True):
            assert found is not None
            if not torch.equal(found, torch.zeros_like(found) if expected is None else expected):
                raise RuntimeError(f"plan_into, {self.shape}: not what plan_rows says")
        self._out.fill_(torch.nan)
        self._compare(f"decode_attention ({self._kv.backend})", self.decode(), self._plan)
        for request in self._some():
            entries = slice(*self._plan.kv_indptr[request : request + 2].tolist())
            part = [None if t is None else t[entries] for t in self._plan[1:]]
            assert part[0] is not None
            pairs = (gather_kv(kv, part[0], part[1], torch.bfloat16) for kv in self._both())
            for name, found, expected in zip("KV", *pairs, strict=True):
                self._judge(f"gather_kv ({self._kv.backend}), {name}", found, expected)

    def _compare(self, name: str, found: torch.Tensor, plan: RowPlan) -> None:
        """Some requests of ``found`` against the reference over their part of ``plan``."""
        for request in self._some():
            entries = slice(*plan.kv_indptr[request : request + 2].tolist())
            indptr = torch.tensor(
                [0, entries.stop - entries.start], dtype=torch.int32, device=found.device
            )
            shift = None if plan.shift is None else plan.shift[entries]
            part = RowPlan(indptr, plan.kv_indices[entries], shift)
            query = self._query[request : request + 1].float()
            expected = decode_attention(query, self._reference, part, scale=self._scale)
            self._judge(name, found[request : request + 1], expected)

    def _judge(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        if not error <= _TOLERANCE:  # NaN is not
            raise RuntimeError(f"{name}, {self.shape}: relative error {error:.3g}")

    def _some(self) -> list[int]:
        last = self.shape.requests - 1
        return sorted({last * part // (_CHECKED - 1) for part in range(_CHECKED)})

    def _both(self) -> tuple[PagedKv, PagedKv]:
        return self._kv, self._reference

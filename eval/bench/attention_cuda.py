# SPDX-License-Identifier: Apache-2.0
"""Decode attention on a GPU: our operations and FlashInfer's decode on one layer's pool.

Every call comes after the L2 cache was emptied. FlashInfer reads pages of one token and plans
outside of the timing. Each result is compared with fp32 attention before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import pandas as pd
import torch

from eval.bench import distance
from eval.bench.attention_cases import Shape
from eval.bench.attention_rig import Rig, Row
from eval.bench.turns import Side, spread
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into

#: Layers of the model whose step the planner is compared with; it runs once for all.
_LAYERS = 32
#: Beside a pool: FlashInfer's workspace, the yardstick's arrays, copies of `gather`.
_SPARE_BYTES = 8 << 30
#: FlashInfer's own recommendation.
_WORKSPACE_BYTES = 128 << 20
#: What a round times of each side, in ms.
_ROUND_MS = 100.0


class CudaRig(Rig):
    """Decode attention of one layer; with a pool on a CPU Triton has to run interpreted."""

    device_type = "cuda"
    columns: ClassVar = {
        "shape": ("requests x tokens - heads/KV heads x dim", 0),
        "shared_percent": ("shared, %", 0),
        "ours": ("ours, ms", 3),
        "flashinfer": ("FlashInfer unshared, ms", 3),
        "flashinfer_as_cached": ("FlashInfer as cached, ms", 3),
        "decode_gb_per_s": ("GB/s", 0),
        "decode_of_copy": ("of copy", 2),
        "copy_gb_per_s": ("copy, GB/s", 0),
        "plan_us": ("plan, us", 0),
        "plan_of_step": ("of a step", 3),
        "gather_gb_per_s": ("gather, GB/s", 0),
    }
    times = ("ours", "flashinfer", "FlashInfer")
    bandwidth = ("copy", 2.0)
    warm_up_rounds = 0  # each call of `do_bench` warms up
    # bf16 has 8 bits, and a kernel may round weights and result.
    tolerance = 2 * 2.0**-8

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        super().__init__(shape, device)
        self._kv = PagedKv(*self.pool, self.rotation, backend="triton")
        self._buffers = PlanBuffers.of(shape.requests, shape.slots - 1, self.device)

    def make_pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        size = (2, self.shape.slots, self.shape.kv_heads, self.shape.head_dim)
        keys, values = torch.empty(size, dtype=torch.bfloat16, device=self.device).uniform_(-1, 1)
        return keys, values

    def share(self, percent: int) -> None:
        super().share(percent)
        self._plan = self.plan_of(self.rows)
        shifted = 0 if self._plan.shift is None else int(self._plan.shift.count_nonzero())
        if (shifted > 0) != (percent > 0):
            raise RuntimeError(f"{self.shape}, {percent}% shared: the plan shifts {shifted} keys")
        self._check_ours()

    def plan(self) -> RowPlan:
        """As for a step of a server: into the same buffers."""
        args = (self._buffers, self.rows, self.requests, self.lengths, self.cached_at)
        return plan_into(*args, num_slots=self.shape.slots)

    def decode(self) -> torch.Tensor:
        return decode_attention(self.query, self._kv, self._plan, scale=self.scale)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        return _gather(self._kv, self._plan)

    def flashinfer(self, as_cached: bool) -> Callable[[], torch.Tensor]:
        """Planned; of the rows as they are, or of each request's own slots.

        Raises:
            RuntimeError: its result is not the reference's.
        """
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shape, rows = self.shape, self.rows if as_cached else self.own_rows
        ones = torch.ones(shape.requests, dtype=torch.int32, device=self.device)
        indptr = torch.arange(shape.requests + 1, dtype=torch.int32, device=self.device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device),
            "NHD",
            # As SGLang decides it for 16-bit pools.
            use_tensor_cores=shape.heads // shape.kv_heads >= 4,
        )
        wrapper.plan(
            indptr * shape.tokens,
            rows.flatten(),
            ones,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            1,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            sm_scale=self.scale,
        )
        pool = (self.pool[0][:, None], self.pool[1][:, None])
        run = functools.partial(wrapper.run, self.query, pool, out=torch.empty_like(self.query))
        self.check("FlashInfer", run(), rows, as_cached=True)
        return run

    def sides(self, curves_only: bool) -> dict[str, Side]:
        calls: dict[str, Callable[[], object]] = {
            "ours": self.decode,
            "flashinfer": self.flashinfer(as_cached=False),
        }
        if not curves_only:
            calls |= {"plan": self.plan, "gather": self.gather}
            if self.shared_percent:
                calls["as cached"] = self.flashinfer(as_cached=True)
        return {name: functools.partial(_bench, call) for name, call in calls.items()}

    def row(self, samples: pd.DataFrame) -> Row:
        """Times in ms; GB/s counts every entry's K and V once, of ``gather`` read and written.

        ``flashinfer`` reads the same tokens unshared, each request's own;
        ``flashinfer_as_cached`` the shared rows, None where nothing is shared. ``plan`` is ours,
        once for all layers, and ``plan_of_step`` its share of plan and attention of a model.
        """
        ms = {str(side): spread(group["ms"]) for side, group in samples.groupby("side")}
        ours, size = ms["ours"]["median"], self.shape.layer_bytes / 1e6
        found: Row = {
            "ours": ms["ours"],
            "flashinfer": ms["flashinfer"],
            "flashinfer_as_cached": ms.get("as cached"),
            "decode_gb_per_s": size / ours,
            "decode_of_copy": size / ours / float(samples["bandwidth"].median()),
        }
        if "plan" in ms:
            plan, gather = ms["plan"], ms["gather"]
            found |= {
                "plan": plan,
                "plan_us": plan["median"] * 1e3,
                "plan_of_step": plan["median"] / (plan["median"] + _LAYERS * ours),
                "gather": gather,
                "gather_gb_per_s": 2 * size / gather["median"],
            }
        return found

    def _check_ours(self) -> None:
        """Plan, decode and gather against the reference."""
        for found, expected in zip(self.plan(), self._plan, strict=True):
            assert found is not None
            if not torch.equal(found, torch.zeros_like(found) if expected is None else expected):
                raise RuntimeError(f"plan_into, {self.shape}: not what the rows say")
        self.check("decode_attention", self.decode(), self.rows)
        plan, size = self.plan_of(self.rows[self.checked]), (self.shape.requests, -1)
        both = zip(self.gather(), _gather(self.reference, plan), strict=True)
        for name, (got, wanted) in zip("KV", both, strict=True):
            self.judge(f"gather_kv, {name}", got.view(size)[self.checked], wanted)

    @staticmethod
    def fits(shape: Shape) -> bool:
        """Whether the device has memory for the pool and what `gather` copies out of it."""
        # PyTorch keeps what a smaller pool took until it is asked for it.
        torch.cuda.empty_cache()
        return 2 * shape.layer_bytes + _SPARE_BYTES <= torch.cuda.mem_get_info()[0]

    @staticmethod
    def key_figures(rows: Sequence[Row]) -> dict[str, float]:
        """By the names of the goals: FlashInfer's time over ours unshared (at least 0.95), ours over
        FlashInfer's with 22% shared (at most 0.85), and the rest as fractions."""
        found: dict[str, float] = {}
        for row in rows:
            ours, theirs = row["ours"]["median"], row["flashinfer"]["median"]
            if row["shared_percent"] == 0:
                copy = row["copy_gb_per_s"]["median"]
                found["decode_vs_flashinfer"] = theirs / ours
                found["decode_fraction_of_copy"] = row["decode_of_copy"]
                found["gather_fraction_of_copy"] = row["gather_gb_per_s"] / copy
            if row["shared_percent"] == 22:
                found["decode_shared22_vs_flashinfer"] = ours / theirs
                found["plan_fraction_of_step"] = row["plan_of_step"]
        return found


def _gather(kv: PagedKv, plan: RowPlan) -> tuple[torch.Tensor, torch.Tensor]:
    return gather_kv(kv, plan.kv_indices, plan.shift, torch.bfloat16)


def _bench(call: Callable[[], object]) -> list[dict[str, float]]:
    from triton.testing import do_bench

    # Empties the L2 cache before each call, which also hides the launch.
    return [{"ms": ms} for ms in do_bench(call, rep=_ROUND_MS, return_mode="all")]


def distance_of_copy(runs: int = 8) -> float:
    """Worse of as cached and corrected, 256 pairs of 16 interleaved tokens, over copy bandwidth."""
    pool = distance.Shape(layers=32, heads=8, head_dim=128, slots=32_768)
    rates = distance.read_rates(pool, ["triton"], torch.device("cuda"), runs)
    many = rates.query("order == 'interleaved' and pairs == 256 and block == 16")
    print("\n256 pairs x 16 tokens, of copy bandwidth")
    distance.print_rates(many)
    return float(many["of_copy"].min())

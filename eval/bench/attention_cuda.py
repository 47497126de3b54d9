# SPDX-License-Identifier: Apache-2.0
"""Times decode attention on a GPU with the KV pool of one layer: ours, and FlashInfer's if it is installed.
FlashInfer reads pages of one token; the time that it takes to plan is not counted.

    python -m eval.bench.attention_cuda

prints a line of JSON for every kind (heads and dtype of the pool) and every setting of ``SHARES``. Results
are also compared with fp32 attention. The program needs only PyTorch and Triton, and takes three minutes."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from eval.bench.attention_batch import RUN, SHARES, Batch, Shape
from eval.bench.turns import Call, Yardstick, spread
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.kernels.row_plan import RowPlan

#: A plan serves all layers of a step, so the time to make it is compared with a step of this many layers.
_LAYERS = 32
#: Each kind by its name: 32/8x128 means 32 query heads and 8 KV heads of 128 dims.
KINDS = {
    "bf16 32/8x128": (Shape(64, 16_000), torch.bfloat16),
    "bf16 64/8x128": (Shape(64, 16_000, 64), torch.bfloat16),
    "bf16 28/4x128": (Shape(64, 16_000, 28, 4), torch.bfloat16),
    "bf16 14/2x64": (Shape(64, 16_000, 14, 2, 64), torch.bfloat16),
    "e4m3 32/8x128": (Shape(64, 16_000), torch.float8_e4m3fn),
}


class CudaBatch(Batch):
    """Decode attention of one layer. If ``device`` is a CPU, Triton has to run interpreted."""

    # A bf16 number has 8 significant bits, and a kernel may round both attention weights and result.
    tolerance = 2 * 2.0**-8

    def __init__(
        self, shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        size = (2, shape.slots, shape.kv_heads, shape.head_dim)
        pool = torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(-1, 1)
        keys, values = pool.to(dtype)
        super().__init__(shape, (keys, values))
        self._kv = PagedKv(keys, values, self.rotation, backend="triton")
        entries = shape.requests, shape.slots - 1
        self._buffers = PlanBuffers.of(*entries, self.device, merge=True)

    def share(self, percent: int, run: int = RUN) -> None:
        super().share(percent, run)
        self._plan = self.plan()
        self.check("decode_attention", self.decode(), self.rows)

    def plan(self) -> RowPlan:
        """Make the plan of a step as a server does, into the same buffers each time."""
        args = (self._buffers, self.rows, self.requests, self.lengths, self.cached_at)
        return plan_into(*args, num_slots=self.shape.slots)

    def decode(self) -> torch.Tensor:
        """Run our decode attention with the plan."""
        return decode_attention(self.query, self._kv, self._plan, scale=self.scale)

    def planning(self) -> Call:
        """A call that makes the plan: on a CUDA device in a CUDA graph, as a server does, else directly."""
        if self.device.type != "cuda":
            return self.plan
        self.plan()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.plan()
        return graph.replay

    def calls(self) -> dict[str, Call]:
        """The calls to time, with FlashInfer's if FlashInfer is installed and the pool is 16-bit on a GPU."""
        calls: dict[str, Call] = {"ours": self.decode, "plan": self.planning()}
        if self.device.type == "cuda" and self.pool[0].itemsize == 2 and find_spec("flashinfer"):
            calls["flashinfer"] = self.flashinfer()
        return calls

    def flashinfer(self) -> Callable[[], torch.Tensor]:
        """A call of FlashInfer's decode over each request's own slots. The plan is made beforehand."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shape = self.shape
        rows = self.own_rows
        ones = torch.ones(shape.requests, dtype=torch.int32, device=self.device)
        indptr = torch.arange(shape.requests + 1, dtype=torch.int32, device=self.device)
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=self.device)
        # SGLang uses the same rule for 16-bit pools.
        tensor_cores = shape.heads // shape.kv_heads >= 4
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        page_size = 1
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        pages = (indptr * shape.tokens, rows.flatten(), ones)
        wrapper.plan(*pages, *heads, page_size, sm_scale=self.scale, **kinds)
        pool = (self.pool[0][:, None], self.pool[1][:, None])
        run = functools.partial(wrapper.run, self.query, pool, out=torch.empty_like(self.query))
        self.check("FlashInfer", run(), rows)
        return run


def _bench(call: Call) -> list[float]:
    from triton.testing import do_bench

    # do_bench empties the L2 cache before each call. Meanwhile the call is launched, so launch time is hidden.
    return list(do_bench(call, rep=100.0, return_mode="all"))


def measured(
    batch: CudaBatch,
    copy_gb_per_s: float,
    rounds: int,
    bench: Callable[[Call], list[float]] = _bench,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each setting of :data:`SHARES`. ``ms``: times of the calls, which take turns; FlashInfer
    reads each request's own slots. ``of_copy``: the rate at which our kernel reads K and V of all positions,
    divided by the copy rate. ``plan_of_step``: the fraction of a step's time that goes into the plan, for
    ``_LAYERS`` layers. Raises RuntimeError if a result is wrong."""
    size = batch.shape.layer_bytes * batch.pool[0].element_size() / 2 / 1e6
    for percent, run in SHARES:
        batch.share(percent, run)
        calls = batch.calls()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name] += bench(call)
        ms = {name: spread(samples) for name, samples in times.items()}
        ours, plan = (ms[name]["median"] for name in ("ours", "plan"))
        of_copy = size / ours / copy_gb_per_s
        of_step = plan / (plan + _LAYERS * ours)
        row = {"shared_percent": percent, "run": run, "ms": ms}
        yield {**row, "of_copy": of_copy, "plan_of_step": of_step}


def main() -> int:
    """Returns exit status 1 if one of :data:`KINDS` failed, else 0. The line printed for that kind says why."""
    if not torch.cuda.is_available():
        sys.exit("eval.bench.attention_cuda: needs an NVIDIA GPU, PyTorch sees none")
    torch.manual_seed(5)
    rates = Yardstick(torch.device("cuda")).rates()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    about = {"device": torch.cuda.get_device_name(), **versions, "gb_per_s": rates}
    print(json.dumps(about), flush=True)
    status = 0
    for name, (shape, dtype) in KINDS.items():
        torch.cuda.empty_cache()
        try:
            for figures in measured(CudaBatch(shape, dtype=dtype), rates["copy"], 1):
                print(json.dumps({"kind": name, **figures}), flush=True)
        except Exception as error:  # the next kind may still work
            status = 1
            message = f"{type(error).__name__}: {error}"
            print(json.dumps({"kind": name, "failed": message[-2000:]}), flush=True)
    return status


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

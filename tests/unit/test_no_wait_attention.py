# SPDX-License-Identifier: Apache-2.0
"""Attention hooks and plans do not wait for the device: on a stand-in, under Triton's interpreter."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_reasoncache.attention.paged_cuda import SHIFTED
from tests.property.world import in_host
from tests.strict_device import no_wait, on_device, strict_device
from tests.triton_runs import small_launches as small_launches
from tests.triton_runs import under_interpreter
from tests.unit.attention_rig import SHORT, TOLERANCE, Rig, announced
from tests.unit.test_attention import REQUESTED_BY, Backend

NEW = {"decode": [1, 1, 1], "with-prefix": [1, 7, 30], "few": [1, 3, 4]}
ON_DEVICE = ["input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"]
ON_DEVICE += ["extend_seq_lens", "extend_prefix_lens"]

pytestmark = [
    pytest.mark.usefixtures("published_config", "out_of_tree_platform", "device"),
    under_interpreter,
]


@pytest.fixture
def device() -> Iterator[None]:
    with strict_device():
        yield


class Replayed:
    """Stands in for a decode graph: makes the calls that SGLang makes before a graph and in its capture."""

    def __init__(self, backend: Any) -> None:
        backend.init_cuda_graph_state(3)
        self._backend, self.forward_decode = backend, backend.forward_decode

    def init_forward_metadata(self, batch: Any) -> None:
        assert self._backend.choose_graph(batch) == SHIFTED
        self._backend.init_forward_metadata_out_graph(batch)
        self._backend.init_forward_metadata_in_graph(batch)


def moved(part: Any) -> Any:
    """A copy of an object of SGLang whose tensors are device tensors of the same memory, except
    ``req_generation``, which SGLang keeps on the host."""
    found = copy.copy(part)
    for name, value in vars(part).items():
        if name != "req_generation":
            setattr(found, name, on_device(value))
    found.device = "cuda"
    return found


def backend_of(rig: Rig, corrected: bool = True) -> Any:
    runner = copy.copy(rig.runner)
    runner.device = "cuda"
    runner.req_to_token_pool = moved(rig.rows)
    runner.token_to_kv_pool = moved(rig.pool)
    rig.placed = on_device
    cached = moved(rig.cached_at) if corrected else None
    backend = Backend(runner, cached, requested_by=REQUESTED_BY)
    assert backend.paged.backend == "triton"
    return backend


def batch_of(rig: Rig, backend: Any, new: list[int], evicted: list[int] | None = None) -> Any:
    """A batch on the device, announced to the backend; announcing must not wait."""
    batch = rig.batch(new)
    there = {name: on_device(getattr(batch, name)) for name in ON_DEVICE}
    batch = dataclasses.replace(batch, **there)
    gone = [0] * len(new) if evicted is None else evicted
    with no_wait():
        return announced(backend, batch, True, gone)


def check(
    rig: Rig, backend: Any, new: list[int], evicted: list[int] | None = None, runner: Any = None
) -> None:
    batch = batch_of(rig, backend, new, evicted)
    with no_wait():
        found = rig.forward(runner or backend, batch)
    rig.query = in_host(rig.query)
    expected = rig.expected(rig.batch(new))
    torch.testing.assert_close(in_host(found).double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as-cached"])
@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_plans_and_layers(new: list[int], corrected: bool) -> None:
    """First with shifted slots, then with evicted positions too. Queries are kept in some cases, so that
    over all cases each batch and each mode runs with and without kept queries."""
    keeps = corrected != (new == NEW["with-prefix"])
    rig = Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1)
    backend = backend_of(rig, corrected)
    if keeps:
        backend.paged.keep_queries(3)
    if not corrected:
        rig.settle()
    if corrected:
        check(rig, backend, new)
    rig.evict(new)
    rows = rig.rows.req_to_token[rig.row_of]
    gone = [int((row[:end] < 0).sum()) for row, end in zip(rows, SHORT, strict=True)]
    check(rig, backend, new, gone)
    if new == NEW["decode"]:
        check(rig, backend, new, gone, Replayed(backend))


def test_latent_rows() -> None:
    rig = Rig(shifted=0.4, lengths=SHORT, heads=2, kv_heads=1, interleaved=True, latent=True)
    backend = backend_of(rig)
    for runner in (None, Replayed(backend)):
        check(rig, backend, NEW["decode"], runner=runner)

# SPDX-License-Identifier: Apache-2.0
"""Tests for the C++ kernels only. Each test runs with a build for this CPU and with builds for older CPUs."""

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sglang_reasoncache.kernels import decode as decode_module
from sglang_reasoncache.kernels.distance import DistanceKernel
from sglang_reasoncache.kernels.extend import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.native import pool as pool_module
from tests.kernels.attention_cases import Case, Rig, make, make_rotation
from tests.kernels.engines import cpu as cpu
from tests.kernels.test_attention import decode
from tests.kernels.test_distance import Case as DistanceCase
from tests.kernels.test_distance import make_entries, make_layers

pytestmark = pytest.mark.usefixtures("poisoned_memory", "cpu")


@pytest.fixture
def decode_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A function that decodes with ``count`` threads."""

    def decoded(count: int, rig: Rig, **options: Any) -> torch.Tensor:
        monkeypatch.setattr(decode_module, "cpu_threads", lambda: count)
        return decode(rig, "native", options.pop("plan", rig.plan()), **options)

    return decoded


@pytest.mark.parametrize("lengths", [(3000,), (700, 30, 5, 2000), (40,) * 30, (700, 1, 2600, 0)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (32, 8), (1, 1), (8, 1)])
def test_bits_do_not_depend_on_threads(
    decode_by: Any, lengths: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    """Any number of threads gives the same bits, for plans with and without rotations. So do concurrent calls,
    although only one call at a time gets helper threads."""
    rig = make(Case(lengths=lengths, heads=heads, kv_heads=kv_heads, k_dim=128, v_dim=128))
    repeats = make(dataclasses.replace(rig.case, repeated=2.0))
    for each, plan in ((rig, rig.plan()), (repeats, repeats.plan(merge=True))):
        alone = decode_by(1, each, plan=plan)
        found = [decode_by(count, each, plan=plan) for count in (2, 2, 3, 8)]
        with ThreadPoolExecutor(4) as pool:
            one = functools.partial(decode_by, rig=each, plan=plan)
            found += pool.map(one, [1, 2, 3] * 4)
        assert all(torch.equal(out, alone) for out in found)


@pytest.mark.parametrize("count", [1, 2])
def test_bits_do_not_depend_on_the_rest_of_the_batch(decode_by: Any, count: int) -> None:
    """Each request of a batch with very different lengths gets the same output bits as in a call of its own."""
    lengths = (1100, 0, 15, 16, 17, 512, 513, 0, 1024, 1, 1500, 640)
    rig = make(Case(lengths=lengths, heads=8, kv_heads=2, k_dim=64, v_dim=64))
    plan = rig.plan()
    together = decode_by(count, rig, plan=plan)
    begin = plan.kv_indptr[:-1]
    end = plan.kv_indptr[1:]
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode_by(1, rig, plan=plan, query=rig.query[one], spans=(begin[one], end[one]))
        assert torch.equal(alone, together[one])


def test_a_forked_child_has_threads_of_its_own(decode_by: Any) -> None:
    rig = make(Case(lengths=(2000, 2000), k_dim=128, v_dim=128))
    expected = decode_by(2, rig)
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = torch.equal(decode_by(2, rig), expected)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_every_half_rounds_as_pytorch_does() -> None:
    """Gathering fp32 values as bf16 or fp16 rounds them as PyTorch does, for all exponents and for ties."""
    bits = torch.arange(2**16, dtype=torch.int64)
    values = torch.cat([(bits << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = values.to(torch.uint32).view(torch.float32)
    pool = values.view(-1, 1, 8)
    kv = PagedKv(pool, pool, backend="native")
    slots = torch.arange(len(pool), dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        out, _ = gather_kv(kv, slots, None, dtype)
        expected = values.to(dtype)
        assert torch.equal(out.flatten().isnan(), expected.isnan())
        assert torch.equal(out.flatten().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("is_neox", [True, False])
def test_distances_do_not_depend_on_threads(is_neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number of threads nor concurrent calls change any bit of the result."""
    sizes: dict[str, Any] = dict(layers=5, heads=4, k_dim=64, v_dim=64, rotary_dim=64)
    case = DistanceCase(pairs=37, block=16, is_neox=is_neox, **sizes)
    entries = make_entries(case, slots=300)
    # Several threads run if a call reads at least 1 MiB. This call reads more than 4 MiB.
    assert entries[0].numel() * case.layers * 2 * 2 * 4 * 64 * 2 > 4 << 20
    layers = make_layers(case, slots=300)
    rotation = make_rotation(64, is_neox)
    kernel = DistanceKernel(layers, rotation, backend="native")
    found = []
    for threads in (1, 7, 64, 2):
        monkeypatch.setattr(pool_module, "cpu_threads", lambda count=threads: count)
        found.append(kernel.squares(*entries))
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: kernel.squares(*entries), range(40)))
    assert all(torch.equal(squares, found[0]) for squares in (*found, *together))

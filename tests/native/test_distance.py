# SPDX-License-Identifier: Apache-2.0
"""What the C++ distance kernel alone does, built for this machine and for older ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_reasoncache.kernels import distance as distance_module
from sglang_reasoncache.kernels.distance import DistanceKernel
from sglang_reasoncache.native.pool import DTYPES
from tests.kernels.distance_cases import Case, make_entries, make_layers, rotation_of
from tests.kernels.engines import cpu as cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory", "cpu")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_reads_every_code_exactly(dtype: torch.dtype) -> None:
    """Each bit pattern at each place of a vector, subnormals and NaN included."""
    bits = torch.int8 if dtype.itemsize == 1 else torch.int16
    count, dim = 1 << (8 * dtype.itemsize), 67
    codes = torch.arange(count).to(bits)
    keys = torch.zeros(count + 1, 1, dim).to(dtype)
    keys.view(bits)[torch.arange(count), 0, torch.arange(count) % dim] = codes
    keys[count] = torch.ones(1, dim).to(dtype)
    dst = torch.arange(count)[:, None]
    kernel = DistanceKernel([(keys, keys)], backend="native")
    found = kernel.moments(dst, torch.full_like(dst, count))[:, 0, 0, 2]
    expected = codes.view(dtype).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_neox", [True, False])
def test_threads_change_nothing(is_neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum is made by one thread in one order, whoever makes it."""
    case = Case(
        pairs=37, block=16, layers=5, heads=4, k_dim=64, v_dim=64, rotary_dim=64, is_neox=is_neox
    )
    entries = make_entries(case, slots=300)
    # Well above the size that is worth a thread.
    assert entries[0].numel() * case.layers * 2 * 2 * 4 * 64 * 2 > 4 << 20
    kernel = DistanceKernel(make_layers(case, slots=300), rotation_of(case), backend="native")
    found = []
    for threads in (1, 2, 7, 64):
        monkeypatch.setattr(distance_module, "cpu_threads", lambda count=threads: count)
        found.append((kernel.squares(*entries), kernel.moments(*entries)))
    for several in found[1:]:
        assert all(map(torch.equal, several, found[0]))


def test_concurrent_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance_module, "cpu_threads", lambda: 2)
    case = Case(pairs=9, block=16, heads=4, k_dim=64, v_dim=64, rotary_dim=64)
    kernel = DistanceKernel(make_layers(case), rotation_of(case), backend="native")
    entries = make_entries(case)
    expected = kernel.squares(*entries)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kernel.squares(*entries), range(40)))
    assert all(torch.equal(squares, expected) for squares in found)

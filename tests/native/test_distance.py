# SPDX-License-Identifier: Apache-2.0
"""The C++ distance kernel, built for this machine and for older ones."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_reasoncache.kernels.distance import DistanceKernel
from sglang_reasoncache.native.distance import DTYPES, NativeDistance
from tests.kernels.cases import (
    CASES,
    Case,
    assert_sums,
    expected_moments,
    make_entries,
    make_layers,
    rotation_of,
    spoil,
    tolerance,
)
from tests.kernels.rotary import TABLE
from tests.native.builds import CSRC, OLDER, build_as_older

SOURCE = CSRC / "distance" / "distance.cpp"

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module", params=["native", *OLDER])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library of this machine, or the kernel alone as an older CPU would run it."""
    if request.param == "native":
        return request.getfixturevalue("library")
    return build_as_older(request.param, [SOURCE], tmp_path_factory.mktemp("build"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_gathered_blocks(build: ctypes.CDLL, case: Case) -> None:
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    kernel = NativeDistance(build, layers, rotation, threads=1)
    for by in {id(s): s for s in (None, shift)}.values():
        squares, moments = kernel.squares(dst, src, by), kernel.moments(dst, src, by)
        assert squares.shape == (case.pairs, case.layers, 2)
        assert moments.shape == (case.pairs, case.layers, 2, 3)
        expected = expected_moments(layers, rotation, dst, src, by)
        assert_sums(squares, moments, expected, tolerance(by))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_reads_every_code_exactly(build: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Each bit pattern at each place of a vector, subnormals and NaN included."""
    bits = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    codes = torch.arange(1 << (8 * dtype.itemsize)).to(bits).view(dtype)
    count, dim = codes.shape[0], 67
    places = torch.arange(count) % dim
    keys = torch.zeros(count + 1, 1, dim).to(dtype)
    raw = keys.view(bits)
    raw.view(torch.int8 if dtype.itemsize == 1 else torch.int16)[torch.arange(count), 0, places] = (
        codes.view(torch.int8 if dtype.itemsize == 1 else torch.int16)
    )
    keys[count] = torch.ones(1, dim).to(dtype)
    dst = torch.arange(count)[:, None]
    kernel = NativeDistance(build, [(keys, keys)], None, threads=1)
    found = kernel.moments(dst, torch.full_like(dst, count), None)[:, 0, 0, 2]
    torch.testing.assert_close(found, codes.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_what_is_not_finite_shows(build: ctypes.CDLL, dtype: torch.dtype, is_neox: bool) -> None:
    case = Case(
        pairs=48, block=2, dtype=dtype, is_neox=is_neox, heads=3, k_dim=20, rotary_dim=12, v_dim=20
    )
    layers, rotation = make_layers(case), rotation_of(case)
    spoiled = spoil(layers)
    dst = torch.arange(48)[:, None].expand(-1, 2).contiguous()
    src = dst.flip(0)
    shift = make_entries(case)[2]
    kernel = NativeDistance(build, layers, rotation, threads=1)
    broken = torch.zeros(48, 2, 2, dtype=torch.bool)
    for layer, side, slot in spoiled:
        broken[:, layer, side] |= ((dst == slot) | (src == slot)).any(-1)
    for by in (None, shift):
        squares, moments = kernel.squares(dst, src, by), kernel.moments(dst, src, by)
        assert torch.equal(~squares.isfinite(), broken)
        assert torch.equal((~moments.isfinite()).any(-1), broken)


def test_no_shift_is_as_cached_bit_for_bit(build: ctypes.CDLL) -> None:
    case = Case(heads=3, k_dim=96, rotary_dim=96, v_dim=96)
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    assert shift is not None
    kernel = NativeDistance(build, layers, rotation, threads=1)
    still = kernel.squares(dst, src, torch.zeros_like(shift))
    assert torch.equal(still, kernel.squares(dst, src, None))
    assert torch.equal(still[..., 1], kernel.squares(dst, src, shift)[..., 1])


@pytest.mark.parametrize("is_neox", [True, False])
def test_threads_change_nothing(build: ctypes.CDLL, is_neox: bool) -> None:
    """Every sum is made by one thread in one order, whoever makes it."""
    case = Case(
        pairs=37, block=16, layers=5, heads=4, k_dim=64, v_dim=64, rotary_dim=64, is_neox=is_neox
    )
    layers, rotation = make_layers(case, slots=300), rotation_of(case)
    dst, src, shift = make_entries(case, slots=300)
    # Well above the size that is worth a thread.
    assert dst.numel() * case.layers * 2 * 2 * 4 * 64 * 2 > 4 << 20
    alone = NativeDistance(build, layers, rotation, threads=1)
    for threads in (2, 7, 64):
        many = NativeDistance(build, layers, rotation, threads=threads)
        assert torch.equal(many.squares(dst, src, shift), alone.squares(dst, src, shift))
        assert torch.equal(many.moments(dst, src, shift), alone.moments(dst, src, shift))


def test_concurrent_calls(build: ctypes.CDLL) -> None:
    case = Case(pairs=9, block=16, heads=4, k_dim=64, v_dim=64, rotary_dim=64)
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    kernel = NativeDistance(build, layers, rotation, threads=2)
    expected = kernel.squares(dst, src, shift)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kernel.squares(dst, src, shift), range(40)))
    assert all(torch.equal(squares, expected) for squares in found)


def test_slots_may_be_views(build: ctypes.CDLL) -> None:
    case = Case()
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    assert shift is not None
    kernel = NativeDistance(build, layers, rotation, threads=1)
    wide = torch.stack((dst, src), dim=-1)
    rotated = torch.stack((shift, shift), dim=-1)[..., 0]
    assert torch.equal(
        kernel.squares(wide[..., 0], wide[..., 1], rotated), kernel.squares(dst, src, shift)
    )


@pytest.mark.parametrize("slot", [-1, 48, 1 << 40, -(1 << 63)])
def test_slot_outside_the_pool(build: ctypes.CDLL, slot: int) -> None:
    case = Case()
    kernel = NativeDistance(build, make_layers(case), rotation_of(case), threads=1)
    dst, src, shift = make_entries(case)
    bad = dst.clone()
    bad[1, 3] = slot
    for call in (kernel.squares, kernel.moments):
        with pytest.raises(ValueError, match="dst_slots has a slot outside the pool of 48 slots"):
            call(bad, src, shift)
        with pytest.raises(ValueError, match="src_slots has a slot outside the pool of 48 slots"):
            call(dst, bad, None)


@pytest.mark.parametrize("shift", [TABLE, -TABLE, (1 << 31) - 1, -(1 << 31)])
def test_shift_outside_the_table(build: ctypes.CDLL, shift: int) -> None:
    case = Case()
    kernel = NativeDistance(build, make_layers(case), rotation_of(case), threads=1)
    dst, src, by = make_entries(case)
    assert by is not None
    by[1, 3] = shift
    with pytest.raises(ValueError, match=f"beyond the rotary table of {TABLE} positions"):
        kernel.squares(dst, src, by)


def test_kernel_takes_it_for_host_memory(library: ctypes.CDLL) -> None:
    case = Case(dtype=torch.float8_e4m3fn)
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    chosen = DistanceKernel(layers, rotation)
    assert chosen.backend == "native"
    reference = DistanceKernel(layers, rotation, backend="torch")
    torch.testing.assert_close(
        chosen.squares(dst, src, shift), reference.squares(dst, src, shift), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        chosen.moments(dst, src, shift), reference.moments(dst, src, shift), rtol=1e-4, atol=1e-4
    )

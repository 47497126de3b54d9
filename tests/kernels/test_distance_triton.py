# SPDX-License-Identifier: Apache-2.0
"""The Triton distance kernel: on a GPU if there is one, interpreted, compiled for three GPUs."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from sglang_reasoncache.kernels.distance import DistanceKernel
from tests.kernels.cases import (
    CASES,
    Case,
    Layers,
    assert_sums,
    expected_moments,
    make_entries,
    make_layers,
    rotation_of,
    spoil,
    tolerance,
)
from tests.kernels.rotary import TABLE
from tests.triton_runs import (
    DEVICE,
    INTERPRETED,
    on_device,
    run_interpreted,
    starts_interpreter,
    there,
)

pytest.importorskip("triton")

import triton
import triton.language as tl

from sglang_reasoncache.kernels import distance_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def placed(layers: Layers) -> Layers:
    """The same buffers on the device."""
    return [(there(keys), there(values)) for keys, values in layers]


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


def device_cases() -> list[Case]:
    """All on a GPU; smaller and fewer for the interpreter, which takes 0.1 s a program."""
    if not INTERPRETED:
        return CASES
    small = [
        dataclasses.replace(case, pairs=min(case.pairs, 1), layers=1)
        for case in CASES
        if case.heads * case.k_dim <= 288 and case.block < 19
    ]
    return [*dict.fromkeys(small), Case(pairs=3, layers=2, block=3)]


@on_device
@pytest.mark.parametrize("case", device_cases(), ids=str)
def test_agrees_with_gathered_blocks(case: Case) -> None:
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    kernel = DistanceKernel(placed(layers), rotation, backend="triton")
    for by in {id(s): s for s in (None, shift)}.values():
        there = (dst.to(DEVICE), src.to(DEVICE), None if by is None else by.to(DEVICE))
        expected = expected_moments(layers, rotation, dst, src, by)
        assert_sums(kernel.squares(*there), kernel.moments(*there), expected, tolerance(by))


@triton.jit
def decode_kernel(codes, out, ELEMENT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, distance_triton._load(codes + at, at < 256, ELEMENT))


@on_device
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_reads_every_byte_exactly(dtype: torch.dtype) -> None:
    """fp8 is decoded by arithmetic; subnormals and NaN included."""
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](codes.to(DEVICE), out, ELEMENT=distance_triton._ELEMENT[dtype])
    expected = codes.view(dtype).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_what_is_not_finite_shows(dtype: torch.dtype, is_neox: bool) -> None:
    case = Case(
        pairs=5, block=2, dtype=dtype, is_neox=is_neox, heads=3, k_dim=20, rotary_dim=12, v_dim=20
    )
    layers, rotation = make_layers(case), rotation_of(case)
    spoiled = spoil(layers)
    dst = torch.tensor([[3, 0], [4, 1], [0, 1], [9, 9], [5, 6]])
    src = torch.tensor([[1, 0], [0, 0], [7, 6], [8, 1], [2, 2]])
    shift = make_entries(case)[2]
    assert shift is not None
    kernel = DistanceKernel(placed(layers), rotation, backend="triton")
    broken = torch.zeros(5, 2, 2, dtype=torch.bool)
    for layer, side, slot in spoiled:
        broken[:, layer, side] |= ((dst == slot) | (src == slot)).any(-1)
    for by in (None, shift.to(DEVICE)):
        squares = kernel.squares(dst.to(DEVICE), src.to(DEVICE), by).cpu()
        assert torch.equal(~squares.isfinite(), broken)


@on_device
def test_no_shift_is_as_cached() -> None:
    case = Case(heads=3, k_dim=96, rotary_dim=96, v_dim=96)
    layers, rotation = make_layers(case), rotation_of(case)
    layers[0][0][5, 0, 0] = float("inf")
    dst, src, shift = (None if t is None else t.to(DEVICE) for t in make_entries(case))
    assert dst is not None and src is not None and shift is not None
    src[0, 0] = 5
    kernel = DistanceKernel(placed(layers), rotation, backend="triton")
    torch.testing.assert_close(
        kernel.squares(dst, src, torch.zeros_like(shift)),
        kernel.squares(dst, src),
        rtol=1e-6,
        atol=0,
    )


@on_device
def test_entry_out_of_range_is_nan() -> None:
    """No look at values before the launch, so a bad one costs its pair and nothing else."""
    case = Case(pairs=7)
    layers, rotation = make_layers(case), rotation_of(case)
    dst, src, shift = make_entries(case)
    assert shift is not None
    kernel = DistanceKernel(placed(layers), rotation, backend="triton")
    good = kernel.squares(dst.to(DEVICE), src.to(DEVICE), shift.to(DEVICE)).cpu()
    assert good.isfinite().all()
    dst[1, 3], dst[2, 0], src[3, 7], shift[5, 2], shift[6, 0] = -1, 48, 1 << 40, TABLE, -(1 << 31)
    found = kernel.squares(dst.to(DEVICE), src.to(DEVICE), shift.to(DEVICE)).cpu()
    for pair, sides in {0: [], 1: [0, 1], 2: [0, 1], 3: [0, 1], 4: [], 5: [0], 6: [0]}.items():
        for side in (0, 1):
            if side in sides:
                assert found[pair, :, side].isnan().all()
            else:
                assert torch.equal(found[pair, :, side], good[pair, :, side])


def compile_for(
    arch: int, dtype: torch.dtype, *, rotated: bool, is_neox: bool = True, dim: int = 128
) -> dict[str, str]:
    """Assembly of the kernel as it is launched for a pool of 8 heads."""
    from types import SimpleNamespace

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    buffer = torch.empty(1, 8, dim, dtype=dtype)
    rotation = SimpleNamespace(rotary_dim=dim, is_neox=is_neox) if rotated else None
    constants = distance_triton.constants(
        (buffer, buffer),
        rotation,  # type: ignore[arg-type]
        aligned=True,
        moments=False,
    )
    pointers = dict(bases="i64", dst="i64", src="i64", shift="i32", cosines="fp32", sines="fp32")
    pointers["out"] = "fp64"
    strides = ("k_slot_stride", "k_head_stride", "v_slot_stride", "v_head_stride")
    signature = {name: f"*{kind}" for name, kind in pointers.items()}
    signature |= dict.fromkeys(("table_rows", "block", "num_slots", *strides), "i32")
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(signature)
        if name in pointers or name in strides
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(distance_triton.distance_kernel, signature, constants, divisible)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options=dict(num_warps=distance_triton.NUM_WARPS),
    )
    assert len(compiled.asm["cubin"]) > 0
    return compiled.asm


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "rotated", "is_neox"),
    [
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
        (torch.float8_e4m3fn, True, True),
    ],
    ids=str,
)
def test_compiles_ahead_of_time(
    arch: int, dtype: torch.dtype, rotated: bool, is_neox: bool
) -> None:
    """Code for a GPU that is not here reads 16 bytes at a time and spills nothing."""
    asm = compile_for(arch, dtype, rotated=rotated, is_neox=is_neox)
    ptx = asm["ptx"]
    assert f".target sm_{arch}" in ptx
    wide = re.findall(r"ld\.global\.v4\.b32", ptx)
    # Both blocks of V and of K, the latter twice when halves are rotated.
    assert len(wide) >= 4
    assert not re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", ptx)
    assert ".local" not in ptx

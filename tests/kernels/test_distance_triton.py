# SPDX-License-Identifier: Apache-2.0
"""The Triton distance kernel: exact reading, and compiled for three GPUs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.ahead_of_time import STRIDES, compile_for
from tests.triton_runs import DEVICE, INTERPRETED, on_device, run_interpreted, starts_interpreter

pytest.importorskip("triton")

import triton
import triton.language as tl

from sglang_reasoncache.kernels import distance_triton


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


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
    buffer = torch.empty(1, 8, 128, dtype=dtype)
    rotation: Any = SimpleNamespace(rotary_dim=128, is_neox=is_neox) if rotated else None
    constants = distance_triton.constants((buffer, buffer), rotation, aligned=True, moments=False)
    pointers = dict(bases="i64", dst="i64", src="i64", shift="i32", cosines="fp32", sines="fp32")
    pointers["out"] = "fp64"
    ptx = compile_for(
        distance_triton.distance_kernel,
        arch,
        pointers,
        {*pointers, *STRIDES},
        constants,
        num_warps=distance_triton.NUM_WARPS,
    )
    wide = re.findall(r"ld\.global\.v4\.b32", ptx)
    # Both blocks of V and of K, the latter twice when halves are rotated.
    assert len(wide) >= 4
    assert not re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", ptx)
    assert ".local" not in ptx

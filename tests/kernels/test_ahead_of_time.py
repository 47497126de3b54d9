# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not here: what they take, and how wide they read."""

import re

import pytest

from tests.triton_runs import INTERPRETED

pytest.importorskip("triton")

from eval.bench import resources
from sglang_reasoncache.kernels import decode_triton

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")

KERNELS = resources.kernels()
NARROW = r"ld\.global\.(?:b8|b16|u8|u16)\b"


def test_every_kernel_has_limits() -> None:
    assert KERNELS.keys() == resources.LIMITS.keys()


#: Every kernel for every GPU; by default each for one of them, the next one for another.
COMPILED = [
    pytest.param(name, gpu, marks=[] if (i - j) % len(resources.GPUS) == 0 else pytest.mark.long)
    for i, name in enumerate(KERNELS)
    for j, gpu in enumerate(resources.GPUS)
]


@pytest.mark.parametrize(("name", "gpu"), COMPILED)
def test_resources(name: str, gpu: int) -> None:
    compiled = resources.compiled_for(gpu, *KERNELS[name])
    found, limits = resources.resources_of(compiled), resources.limits_of(gpu, name)
    over = {
        field: (value, limit)
        for field, value, limit in zip(found._fields, found, limits, strict=True)
        if value > limit
    }
    assert not over, f"found, limit: {over}"
    ptx: str = compiled.asm["ptx"]
    assert f".target sm_{gpu}" in ptx
    if name.startswith("decode"):
        # By tensor cores; 16 bytes at a time, the next tile copied meanwhile.
        assert "mma" in ptx
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10", ptx)
        # Neighbours change places one by one, where a tile has rotations; values over bounds are one.
        assert re.search("interleaved|bounds", name) or not re.findall(NARROW, ptx)
    elif name.startswith("distance"):
        # Both blocks of V and of K.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
        assert not re.findall(NARROW, ptx)
    elif name == "weights":
        # A thread's loads of several heads are under way before the first is used.
        assert len(re.findall(r"ld\.global", ptx[: ptx.index("ex2.")])) >= decode_triton.HEADS
    elif name == "gather":
        assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)


def test_instructions_are_counted_by_ways_through_loops() -> None:
    """A loop of 2 and 1 with another of 3 inside that one way avoids, and what never runs behind."""
    lines = """
        MOV R0, R1 ;
    .L_x_0:
        IADD R0, R0, 1 ;
        @P0 BRA `(.L_x_2) ;
    .L_x_1:
        HMMA R4, R5, R6 ;
        HMMA R4, R5, R6 ;
        @!P1 BRA `(.L_x_1) ;
    .L_x_2:
        @P2 BRA `(.L_x_0) ;
        EXIT ;
    .L_x_3:
        BRA `(.L_x_3) ;
    """
    code = re.sub(r"(?m)^ +(?=[A-Z@])", "        /*0000*/ ", lines)
    assert resources.ways(code) == (3, 3, 3)

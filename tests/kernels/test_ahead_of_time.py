# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not here: their resources, and the width of their loads."""

import re

import pytest

from tests.triton_runs import INTERPRETED

pytest.importorskip("triton")

from tests.kernels import resources

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")

NARROW = r"ld\.global\.(?:b8|b16|u8|u16)\b"


#: Every kernel for every GPU; without ``long`` tests each kernel for one GPU, in turns.
COMPILED = [
    pytest.param(name, gpu, marks=[] if (i - j) % len(resources.GPUS) == 0 else pytest.mark.long)
    for i, name in enumerate(resources.KERNELS)
    for j, gpu in enumerate(resources.GPUS)
]


@pytest.mark.parametrize(("name", "gpu"), COMPILED)
def test_resources(name: str, gpu: int) -> None:
    compiled = resources.compiled_for(gpu, *resources.KERNELS[name])
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
        # Decoding uses tensor cores and copies the next tile asynchronously, 16 bytes at a time. Latents
        # in fp8 are loaded instead, as they are converted for both products.
        copied = r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10"
        assert "mma" in ptx
        assert re.search(r"ld\.global\.v4\.b32" if "e4m3 128x512" in name else copied, ptx)
        # Interleaved rotations read single neighbours.
        assert "interleaved" in name or not re.findall(NARROW, ptx)
    elif name.startswith("distance"):
        # At least one wide load for each of two blocks of K and of V.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
        assert not re.findall(NARROW, ptx)
    elif name == "gather":
        assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)

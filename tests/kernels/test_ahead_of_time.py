# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for three GPUs that are not here: wide reads, and nothing spilled."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.triton_runs import INTERPRETED

pytest.importorskip("triton")

import triton

from sglang_reasoncache.kernels import (
    decode_triton,
    distance_triton,
    gather_triton,
    note_triton,
    plan_triton,
    select_triton,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")

ARCHS = pytest.mark.parametrize("arch", [80, 90, 100])
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NAMES = {BF16: "bf16", E4M3: "u8"}
#: Arguments that are pointers, by what they point at, unless a case says otherwise.
_POINTERS = {
    "i32": "begin end kv_indices kv_indptr shift rows cached_at counts positions added sizes "
    "to_indptr to_indices to_shift to_entries entries merges runs run_indptr indptr tile_ptr turns by",
    "i64": "requests lengths first bases slots totals dst src bits",
    "fp32": "parts part_lse sinks lse cosines sines logits weights whole",
    "bf16": "query keys values out out_k out_v ends",
    "u8": "asked state keep",
}
POINTERS = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
#: ``end`` is a slice of ``kv_indptr`` from 1.
ALIGNED = {*POINTERS} - {"end"}
ALIGNED_STRIDES = ("slot_stride", "head_stride", "q_row_stride")


def compile_for(kernel: Any, arch: int, constants: dict[str, Any], **changed: Any) -> str:
    """PTX of a kernel for a GPU that is not here, and its machine code, which does not spill.

    ``changed`` has other types of pointers, and options of the compiler.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(("scale", "logit_cap"), "fp32")
    kinds |= {name: f"*{changed.pop(name, kind)}" for name, kind in POINTERS.items()}
    names = [name for name in kernel.arg_names if name not in constants]
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in ALIGNED or name.endswith(ALIGNED_STRIDES)
    }
    signature = {name: kinds.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=changed)
    ptx: str = compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0 and f".target sm_{arch}" in ptx
    assert ".local" not in ptx
    return ptx


def compile_decode(arch: int, constants: dict[str, Any], dim: int, **changed: str) -> str:
    options = dict(num_warps=decode_triton.warps(dim), num_stages=decode_triton.NUM_STAGES)
    ptx = compile_for(decode_triton.chunk_kernel, arch, constants, **options, **changed)
    assert "mma" in ptx
    return ptx


def rotation(dim: int, is_neox: bool) -> Any:
    return SimpleNamespace(rotary_dim=dim, is_neox=is_neox) if dim else None


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "group", "rotary_dim", "is_neox", "observed"),
    [
        (80, BF16, 128, 4, 128, True, False),
        (90, BF16, 128, 4, 128, True, False),
        (90, BF16, 128, 4, 128, True, True),
        (90, BF16, 128, 4, 0, True, False),
        (90, BF16, 256, 8, 256, False, False),
        (90, E4M3, 128, 4, 128, True, True),
        (100, BF16, 128, 4, 128, True, False),
    ],
    ids=str,
)
def test_decode(
    arch: int, dtype: torch.dtype, dim: int, group: int, rotary_dim: int, is_neox: bool,
    observed: bool,
) -> None:  # fmt: skip
    """By tensor cores, 16 bytes at a time, the next tile copied meanwhile; weights are asked for
    where nothing is merged."""
    pool = torch.empty(1, 8, dim, dtype=dtype)
    query = torch.empty(1, 8 * group, dim, dtype=BF16)
    rotary = rotation(rotary_dim, is_neox)
    asked = dict(logits=observed, rotates=not observed)
    constants = decode_triton.constants(query, pool, pool, rotary, **asked)
    ptx = compile_decode(arch, constants, dim, keys=NAMES[dtype], values=NAMES[dtype])
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10", ptx)
    # Neighbours change places one by one, and only where a tile has many shifts.
    assert not is_neox or not re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", ptx)


@ARCHS
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_over_bounds(arch: int, dim: int) -> None:
    """Pages in place of slots: keys twice as wide, values of one element."""
    ends, query = (torch.empty(1, n, 2 * dim, dtype=BF16) for n in (8, 32))
    constants = decode_triton.constants(query, ends, ends[..., :1], None, logits=True)
    compile_decode(arch, constants, 2 * dim)


@ARCHS
@pytest.mark.parametrize(
    ("dtype", "rotary_dim", "is_neox"),
    [(BF16, 0, True), (BF16, 128, True), (BF16, 128, False), (E4M3, 128, True)],
    ids=str,
)
def test_distance(arch: int, dtype: torch.dtype, rotary_dim: int, is_neox: bool) -> None:
    """Both blocks of V and of K, the latter twice when halves are rotated, 16 bytes at a time."""
    buffer = torch.empty(1, 8, 128, dtype=dtype)
    rotary = rotation(rotary_dim, is_neox)
    constants = distance_triton.constants(buffer, buffer, rotary, ALIGNED=True, MOMENTS=False)
    kernel = distance_triton.distance_kernel
    ptx = compile_for(kernel, arch, constants, out="fp64", keys=NAMES[dtype])
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
    assert not re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", ptx)


MERGE = dict(SINKS=True, LSE=True, V_DIM=128, V_COLS=128, SPLITS=32, CHUNK=256)
PLAN = dict(SHIFTS=True, POSITIONS=True, PIECES=plan_triton.PIECES, TILE=plan_triton.TILE)
SCAN = dict(PIECES=16, REQUESTS=plan_triton.REQUESTS)
ROTATIONS = dict(ENTRIES=64, RUNS=plan_triton.RUNS, PIECES=16)
NOTE = dict(LATEST=8, AHEAD=8, TOTAL=True, PIECES=16, TILE=note_triton.TILE)
SELECT = dict(PIECES=plan_triton.PIECES, TILE=select_triton.TILE)
BOUNDS = dict(DIM=128, COLS=128, PAGE=16, TILE=16)
WEIGHTS = dict(heads=32, HEADS=decode_triton.HEADS, PIECES=64, TILE=decode_triton.TILE)
GATHER: dict[str, Any] = dict.fromkeys(("K_DIM", "V_DIM", "K_COLS", "V_COLS"), 128)
GATHER |= dict(ELEMENT="bf16", HALF=64, NEOX=True, ROWS=32)


@ARCHS
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (gather_triton.gather_kernel, GATHER),
        (decode_triton.weights_kernel, WEIGHTS),
        (decode_triton.merge_kernel, MERGE),
        (plan_triton.plan_kernel, PLAN | dict(MERGE=False, WRITE=True)),
        (plan_triton.plan_kernel, PLAN | dict(MERGE=True, WRITE=False)),
        (plan_triton.plan_kernel, PLAN | dict(MERGE=True, WRITE=True)),
        (plan_triton.scan_kernel, SCAN | dict(MERGE=False)),
        (plan_triton.scan_kernel, SCAN | dict(MERGE=True)),
        (plan_triton.rotation_kernel, ROTATIONS | dict(WRITE=False)),
        (plan_triton.rotation_kernel, ROTATIONS | dict(WRITE=True)),
        (note_triton.note_kernel, NOTE | dict(DECODE=True)),
        (note_triton.note_kernel, NOTE | dict(DECODE=False)),
        (select_triton.settle_kernel, dict(PAGE=16, TILE=select_triton.PAGES)),
        (select_triton.select_kernel, SELECT | dict(PAGE=16, WRITE=False)),
        (select_triton.select_kernel, SELECT | dict(PAGE=16, WRITE=True)),
        (select_triton.add_kernel, SELECT),
        (select_triton.bounds_kernel, BOUNDS | dict(ELEMENT="bf16")),
        (select_triton.bounds_kernel, BOUNDS | dict(ELEMENT="e4m3")),
    ],
)
def test_the_others(arch: int, kernel: Any, constants: dict[str, Any]) -> None:
    keys = "u8" if constants.get("ELEMENT") == "e4m3" else "bf16"
    ptx = compile_for(kernel, arch, constants, keys=keys)
    if constants is WEIGHTS:
        # A thread's loads of several heads are under way before the first is used.
        assert len(re.findall(r"ld\.global", ptx[: ptx.index("ex2.")])) >= decode_triton.HEADS
    if constants is GATHER:
        assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)

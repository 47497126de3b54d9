# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels for several compute capabilities, without a GPU. Checks that the machine code stays
within limits of registers, spilled bytes and shared memory, and that loads in the PTX are wide."""

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.triton_runs import INTERPRETED

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_reasoncache.kernels import (
    common_triton,
    decode_triton,
    distance_triton,
    gather_triton,
    page_logits_triton,
    plan_triton,
    rotations_triton,
    row_plan,
    turn_triton,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")

GPUS = 80, 90, 100
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
#: Element type -> names of kernel arguments that point to such elements, unless a ``_Kernel`` overrides it.
_POINTERS = {
    "i32": "begin end kv_indices kv_indptr shift rows cached_at counts positions runs run_indptr "
    "tile_ptr by following",
    "i64": "requests lengths bases dst src bits sees pages",
    "fp32": "parts part_lse sinks cosines sines",
    "fp64": "out",
    "bf16": "query keys values out_k out_v bounds",
}
POINTERS = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
#: Pointers and strides that are multiples of 16. ``end`` is not, because it is ``kv_indptr[1:]``.
ALIGNED = {*POINTERS} - {"end"}
ALIGNED_STRIDES = ("slot_stride", "page_stride", "head_stride", "q_row_stride", "q_head_stride")


class Resources(NamedTuple):
    """The resources that a compiled kernel uses, or limits on these resources."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes of a program


#: A kernel, its compile-time constants for the active GPU, and the element types of pointers that override
#: ``POINTERS``.
_Kernel = tuple[Any, Callable[[], dict[str, Any]], dict[str, str]]


@contextlib.contextmanager
def standing_in(gpu: int) -> Iterator[GPUTarget]:
    """Makes ``gpu`` Triton's active GPU. Some kernel code depends on that GPU, not on the compile target."""
    target = GPUTarget("cuda", gpu, 32)
    driver: Any = triton.runtime.driver
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield target
    finally:
        driver.set_active(None)  # this machine's GPU again, if there is one


def compiled_for(
    gpu: int, kernel: Any, constants_of: Callable[[], dict[str, Any]], pointers: dict[str, str]
) -> Any:
    """The kernel, compiled for a GPU of compute capability ``gpu``. This machine need not have such a GPU."""
    with standing_in(gpu) as target:
        constants = constants_of()
        kinds = dict.fromkeys(("scale", "logit_cap"), "fp32")
        kinds |= {name: f"*{kind}" for name, kind in (POINTERS | pointers).items()}
        names = [name for name in kernel.arg_names if name not in constants]
        divisible = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in ALIGNED or name.endswith(ALIGNED_STRIDES)
        }
        signature = {name: kinds.get(name, "i32") for name in names}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature, constants, divisible)
        decodes = kernel is decode_triton.chunk_kernel
        options = decode_triton.compiler_options(constants) if decodes else {}
        return triton.compile(source, target=target, options=options)


def resources_of(compiled: Any) -> Resources:
    """The resources that the machine code takes. Raises RuntimeError if cuobjdump reports no registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = (triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage has no registers: {usage!r}")
    return Resources(int(found[1]), int(found[2]), compiled.metadata.shared)


def _decode(
    heads: str,
    dtype: torch.dtype,
    kind: str,
    interleaved: bool = False,
    new: int = 1,
    window: bool = False,
) -> _Kernel:
    """``heads``: query/KV x dim. ``kind`` of plan: "merged" (rotations), "shifted" (shifts), "own" (none).
    ``new``: queries a row. ``window``: these see a window each."""
    query_heads, kv_heads, dim = map(int, re.split("[/x]", heads))
    pool = torch.empty(1, kv_heads, dim, dtype=dtype, device="meta")
    query = torch.empty(1, query_heads, dim, dtype=BF16, device="meta")
    rotation: Any = SimpleNamespace(rotary_dim=dim, is_neox=not interleaved)
    return _decode_of(query, pool, pool, rotation, kind, new, window)


def _partial(kind: str) -> _Kernel:
    """A decode kernel for MiMo-V2-Flash, whose keys are wider than its values, and in part rotated."""
    keys, values = (torch.empty(1, 4, dim, dtype=BF16, device="meta") for dim in (192, 128))
    query = torch.empty(1, 64, 192, dtype=BF16, device="meta")
    rotation: Any = SimpleNamespace(rotary_dim=64, is_neox=True)
    return _decode_of(query, keys, values, rotation, kind)


def _decode_of(
    query: Any,
    keys: Any,
    values: Any,
    rotation: Any,
    kind: str,
    new: int = 1,
    window: bool = False,
) -> _Kernel:
    constants = functools.partial(
        decode_triton.constants,
        *(query, keys, values),
        None if kind == "own" else rotation,
        rotates=kind == "merged",
        latent=query.shape[2] != keys.shape[2],
        new=new,
        window=window,
    )
    stored = _stored(keys.dtype)
    return decode_triton.chunk_kernel, constants, dict(keys=stored, values=stored, out="bf16")


def latent(heads: int, dtype: torch.dtype, kind: str, new: int = 1) -> _Kernel:
    """A decode kernel for DeepSeek's latent (MLA) layout."""
    values, keys = (torch.empty(1, 1, dim, dtype=dtype, device="meta") for dim in (512, 64))
    query = torch.empty(1, heads, 576, dtype=BF16, device="meta")
    rotation: Any = SimpleNamespace(rotary_dim=64, is_neox=False)
    return _decode_of(query, keys, values, rotation, kind, new)


def _distance(dtype: torch.dtype, rotary: bool, neox: bool = True) -> _Kernel:
    buffer = torch.empty(1, 8, 128, dtype=dtype, device="meta")
    rotation: Any = SimpleNamespace(rotary_dim=128, is_neox=neox) if rotary else None
    constants = functools.partial(distance_triton.constants, buffer, buffer, rotation, aligned=True)
    pointers = dict(keys=_stored(dtype), out="fp64")
    return distance_triton.distance_kernel, constants, pointers


def _stored(dtype: torch.dtype) -> str:
    return "u8" if dtype.itemsize == 1 else common_triton.ELEMENT[dtype]


def _plan(**asked: bool) -> _Kernel:
    sizes = dict(PIECES=plan_triton.PIECES, TILE=plan_triton.TILE)
    return plan_triton.plan_kernel, lambda: dict(SHIFTS=True, **sizes, **asked), {}


def _rotations(write: bool) -> _Kernel:
    pieces = 1 if write else rotations_triton.PIECES
    sizes = dict(ENTRIES=row_plan.TILE, RUNS=rotations_triton.RUNS, PIECES=pieces)
    return rotations_triton.rotation_kernel, lambda: dict(WRITE=write, **sizes), {}


def _merge(dim: int) -> _Kernel:
    sizes = dict(SPLITS=decode_triton.SPLITS, CHUNK=decode_triton.CHUNK)
    constants = dict(SINKS=True, NEW=1, GROUP=4, V_DIM=dim, V_COLS=dim, **sizes)
    return decode_triton.merge_kernel, lambda: constants, dict(out="bf16")


def _gather() -> _Kernel:
    constants: dict[str, Any] = dict.fromkeys(("K_DIM", "V_DIM", "K_COLS", "V_COLS"), 128)
    constants |= dict(ELEMENT="bf16", HALF=64, NEOX=True, ROWS=32)
    return gather_triton.gather_kernel, lambda: constants, {}


def _turn() -> _Kernel:
    constants: dict[str, Any] = dict(ELEMENT="bf16", HALF=32, NEOX=False, DIM=64, COLS=64, ROWS=64)
    return turn_triton.turn_kernel, lambda: constants, {}


def _logits(dim: int) -> _Kernel:
    """Logits of pages with keys of ``dim`` elements, whose bounds are twice as wide."""
    bounds = torch.empty(1, 8, 2 * dim, dtype=BF16, device="meta")
    query = torch.empty(1, 32, 2 * dim, dtype=BF16, device="meta")
    constants = functools.partial(page_logits_triton.constants, query, bounds)
    return page_logits_triton.logits_kernel, constants, dict(out="fp32")


#: Every kernel, with the constants of a typical server, and its limits: registers, spilled bytes, shared bytes.
#: With 168 registers per thread, three thread blocks of four warps fit on an SM. Where 8 bytes are spilled,
#: ptxas keeps two values in memory to stay within 168 registers, or within 255, a thread's maximum.
_KERNELS: dict[str, tuple[_Kernel, tuple[int, int, int]]] = {
    "decode, merged, bf16 32/8x128": (_decode("32/8x128", BF16, "merged"), (168, 0, 74776)),
    "decode, merged, bf16 64/8x128": (_decode("64/8x128", BF16, "merged"), (176, 0, 74776)),
    "decode, merged, bf16 28/4x128": (_decode("28/4x128", BF16, "merged"), (168, 8, 74776)),
    "decode, merged, bf16 14/2x64": (_decode("14/2x64", BF16, "merged"), (168, 8, 37912)),
    "decode, merged, bf16 32/1x128": (_decode("32/1x128", BF16, "merged"), (176, 0, 83480)),
    "decode, merged, bf16 16/2x256 interleaved": (
        _decode("16/2x256", BF16, "merged", True),
        (192, 0, 74520),
    ),
    "decode, merged, e4m3 32/8x128": (_decode("32/8x128", E4M3, "merged"), (255, 8, 54296)),
    "decode, own, bf16 32/8x128": (_decode("32/8x128", BF16, "own"), (136, 0, 72704)),
    "decode, shifted, bf16 32/8x128": (_decode("32/8x128", BF16, "shifted"), (255, 8, 76800)),
    "decode, shifted, e4m3 32/8x128": (_decode("32/8x128", E4M3, "shifted"), (240, 0, 61440)),
    "decode, merged, bf16 128x512+64": (latent(128, BF16, "merged"), (255, 0, 160404)),
    "decode, own, bf16 128x512+64": (latent(128, BF16, "own"), (255, 0, 152192)),
    "decode, shifted, bf16 128x512+64": (latent(128, BF16, "shifted"), (255, 32, 160256)),
    "decode, merged, bf16 32x512+64": (latent(32, BF16, "merged"), (255, 8, 119316)),
    "decode, own, bf16 32x512+64": (latent(32, BF16, "own"), (224, 0, 114944)),
    "decode, shifted, bf16 32x512+64": (latent(32, BF16, "shifted"), (255, 0, 119552)),
    "decode, merged, bf16 16x512+64": (latent(16, BF16, "merged"), (216, 0, 100628)),
    "decode, own, bf16 16x512+64": (latent(16, BF16, "own"), (168, 0, 94464)),
    "decode, shifted, bf16 16x512+64": (latent(16, BF16, "shifted"), (208, 0, 101120)),
    "decode, merged, bf16 8x512+64": (latent(8, BF16, "merged"), (216, 0, 100628)),
    "decode, merged, e4m3 128x512+64": (latent(128, E4M3, "merged"), (255, 0, 51348)),
    "decode, own, e4m3 128x512+64": (latent(128, E4M3, "own"), (248, 0, 55424)),
    "decode, shifted, e4m3 128x512+64": (latent(128, E4M3, "shifted"), (255, 0, 55680)),
    "decode, merged, bf16 64/4x192 partial, values of 128": (_partial("merged"), (192, 0, 66584)),
    "decode, merged, 4 new, bf16 32/8x128": (
        _decode("32/8x128", BF16, "merged", new=4),
        (176, 0, 83480),
    ),
    "decode, merged, 8 new, bf16 28/4x128": (
        _decode("28/4x128", BF16, "merged", new=8),
        (176, 0, 83480),
    ),
    "decode, own, 4 new, windows, bf16 64/8x64": (
        _decode("64/8x64", BF16, "own", new=4, window=True),
        (104, 0, 41984),
    ),
    "decode, shifted, 4 new, windows, bf16 32/16x128": (
        _decode("32/16x128", BF16, "shifted", new=4, window=True),
        (255, 24, 76800),
    ),
    "decode, shifted, 4 new, windows, bf16 8/4x256": (
        _decode("8/4x256", BF16, "shifted", new=4, window=True),
        (255, 128, 84992),
    ),
    "decode, merged, 2 new, bf16 128x512+64": (latent(128, BF16, "merged", 2), (255, 0, 160404)),
    "decode, merged, 4 new, bf16 8x512+64": (latent(8, BF16, "merged", 4), (255, 8, 119316)),
    "distance, bf16": (_distance(BF16, False), (48, 0, 16)),
    "distance, bf16 rotated": (_distance(BF16, True), (64, 0, 16)),
    "distance, bf16 interleaved": (_distance(BF16, True, neox=False), (64, 0, 16)),
    "distance, e4m3 rotated": (_distance(E4M3, True), (64, 0, 16)),
    "merge of chunks": (_merge(128), (56, 0, 2048)),
    "merge of chunks of latents": (_merge(512), (168, 0, 1024)),
    "gather": (_gather(), (128, 0, 0)),
    "turn": (_turn(), (128, 0, 16)),
    "logits of pages of 64 dims": (_logits(64), (128, 0, 12288)),
    "logits of pages of 128 dims": (_logits(128), (120, 0, 24576)),
    "logits of pages of 256 dims": (_logits(256), (72, 24, 32768)),
    "plan": (_plan(MERGE=False, WRITE=True), (56, 0, 64)),
    "plan, merged, counts": (_plan(MERGE=True, WRITE=False), (56, 0, 16)),
    "plan, merged": (_plan(MERGE=True, WRITE=True), (72, 0, 64)),
    "rotations of tiles, counts": (_rotations(False), (32, 0, 256)),
    "rotations of tiles": (_rotations(True), (120, 0, 256)),
}
KERNELS = {name: kernel for name, (kernel, _) in _KERNELS.items()}
#: Limits of one GPU, if not those of ``_KERNELS``. Before sm_89, decode converts fp8 by arithmetic, in 8 warps.
_LIMITS_OF_GPU = {
    (100, "decode, merged, bf16 32/8x128"): Resources(224, 0, 74776),
    (80, "decode, merged, e4m3 32/8x128"): Resources(255, 0, 54296),
    (80, "decode, merged, 4 new, bf16 32/8x128"): Resources(240, 0, 83480),
    (80, "decode, merged, 8 new, bf16 28/4x128"): Resources(224, 0, 83480),
    (100, "decode, merged, 4 new, bf16 32/8x128"): Resources(184, 0, 83480),
    (100, "decode, shifted, e4m3 32/8x128"): Resources(248, 0, 61440),
    (80, "decode, shifted, e4m3 32/8x128"): Resources(200, 0, 61440),
}


def limits_of(gpu: int, name: str) -> Resources:
    return _LIMITS_OF_GPU.get((gpu, name), Resources(*_KERNELS[name][1]))


#: GPU -> its widest matrix product.
WIDE = {80: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
NARROW = r"ld\.global\.(?:b8|b16|u8|u16)\b"


#: Every kernel for every GPU. Without ``long`` tests, each kernel is compiled for one GPU; the GPUs take turns.
COMPILED = [
    pytest.param(name, gpu, marks=[] if (i - j) % len(GPUS) == 0 else pytest.mark.long)
    for i, name in enumerate(KERNELS)
    for j, gpu in enumerate(GPUS)
]


@pytest.mark.parametrize(("name", "gpu"), COMPILED)
def test_resources(name: str, gpu: int) -> None:
    compiled = compiled_for(gpu, *KERNELS[name])
    found = resources_of(compiled)
    limits = limits_of(gpu, name)
    over = {
        field: (value, limit)
        for field, value, limit in zip(found._fields, found, limits, strict=True)
        if value > limit
    }
    assert not over, f"found, limit: {over}"
    ptx: str = compiled.asm["ptx"]
    assert f".target sm_{gpu}" in ptx
    # Where a kernel needs more tensor memory than there is, Triton compiles it to a trap.
    assert compiled.metadata.tmem_size <= 512 and not re.search(r"\btrap;", ptx)
    if name.startswith("decode"):
        # Decode must use tensor cores and copy the next tile asynchronously, 16 bytes at a time. The fp8 latent
        # layout uses ordinary wide loads instead, because its elements must be converted before both products.
        copied = r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10"
        assert "mma" in ptx
        assert re.search(r"ld\.global\.v4\.b32" if "e4m3 128x512" in name else copied, ptx)
        assert not re.findall(NARROW, ptx)
        # Kernels with more than 32 lines multiply 64 lines at once, on GPUs that can.
        assert ("bf16 128x512" in name) == bool(re.search(WIDE[gpu], ptx)) or gpu == 80
    elif name.startswith("distance"):
        # The kernel must have at least four wide loads: for K and for V of both blocks.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
        assert not re.findall(NARROW, ptx)
    elif name in ("gather", "turn"):
        assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)


@pytest.mark.long
@pytest.mark.parametrize("gpu", [89, 120])
@pytest.mark.parametrize(("heads", "new"), [(128, 1), (128, 2), (8, 2)])
@pytest.mark.parametrize("kind", ["merged", "shifted"])
def test_latents_fit_little_shared_memory(gpu: int, heads: int, new: int, kind: str) -> None:
    """sm_86, sm_89 and sm_120 have 99 KiB for a program. On sm_120 shifts spill 24 bytes."""
    found = resources_of(compiled_for(gpu, *latent(heads, BF16, kind, new)))
    assert found.shared <= 99 * 1024 and found.spilled <= 24

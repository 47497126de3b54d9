# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.kernels.latent_shapes`` compiles merged decode over latent rows (128 query heads, 512 + 64
dims, bf16) without a GPU, for programs of several shapes, and prints a table. A shape is a number of lines
(query heads) and of entries that a program reads at once."""

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton

from tests.kernels.test_ahead_of_time import Resources, compiled_for, resources_of
from tests.kernels.test_ahead_of_time import latent as latent_kernel

#: GPU -> bytes of shared memory of a multiprocessor.
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
SHAPES = [(16, 16), (16, 32), (16, 64), (32, 16), (32, 32), (32, 64), (64, 16), (64, 32), (64, 64)]
HEADS = 128
TOKENS = 4096
#: Bytes of a latent row.
ROW = 2 * (512 + 64)


def columns(gpu: int, lines: int, entries: int) -> list[str]:
    kernel, constants_of, pointers = latent_kernel(HEADS, torch.bfloat16, "merged")

    def changed() -> dict[str, Any]:
        return constants_of() | dict(HEADS=lines, TILE=entries)

    compiled = compiled_for(gpu, kernel, changed, pointers)
    used = resources_of(compiled)
    warps: int = compiled.metadata.num_warps
    names = ("tcgen05.mma", "wgmma", "mma.sync")
    product = next((name for name in names if name in compiled.asm["ptx"]), "none")
    code = machine_code(compiled.asm["cubin"])
    products = len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code))
    blocks = HEADS // lines
    chunks = TOKENS // max(256, TOKENS // 32)
    fitting = resident(gpu, used, warps)
    return [
        f"sm_{gpu}",
        *map(str, (lines, entries)),
        f"{products} {product}",
        str(used.registers),
        str(used.spilled),
        f"{used.shared / 1024:.0f}",
        str(fitting),
        f"{ROW / lines:.0f}",
        f"{loaded(code, warps) / entries / lines:.0f}" if product == "mma.sync" else "-",
        " / ".join(str(batch * chunks * blocks) for batch in (1, 32, 256)),
    ]


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (triton.knobs.nvidia.nvdisasm.path, "-c", file.name)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resident(gpu: int, used: Resources, warps: int) -> int:
    """How many programs a multiprocessor holds at once."""
    registers = -(-used.registers // 8) * 8 * 32 * warps
    return min(65536 // registers, SHARED[gpu] // (used.shared + 1024), 64 // warps)


def loaded(code: str, warps: int) -> int:
    """Bytes that all loads from shared memory in the code read, each executed once by every warp. This is about
    what a tile without rotations reads, and one rotation."""
    matrices = re.findall(r"LDSM\.16\.MT?88(?:\.(\d))?", code)
    words = re.findall(r"\bLDS(?:\.U)?(?:\.(64|128))?[ .]", code)
    of_matrices = sum(128 * int(count or 1) for count in matrices)
    return warps * (of_matrices + sum(4 * int(bits or 32) for bits in words))


def main() -> None:
    heading = (
        "GPU",
        "lines",
        "entries",
        "products",
        "registers",
        "spilled bytes",
        "shared KiB",
        "programs a multiprocessor",
        "KV bytes",
        "shared bytes",
        "programs",
    )
    print("| " + " | ".join(heading) + " |")
    print("| --- " * len(heading) + "|")
    for gpu in SHARED:
        for lines, entries in SHAPES:
            print("| " + " | ".join(columns(gpu, lines, entries)) + " |", flush=True)


if __name__ == "__main__":
    main()

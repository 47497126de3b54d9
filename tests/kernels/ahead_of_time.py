# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import triton


def compile_for(
    kernel: Any, arch: int, pointers: dict[str, str], aligned: set[str], constants: dict[str, Any],
    floats: Collection[str] = (), **options: int,
) -> str:  # fmt: skip
    """PTX of a kernel for a GPU that is not here, and its machine code without spills."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: f"*{pointers[name]}" if name in pointers else "fp32" if name in floats else "i32"
        for name in kernel.arg_names
        if name not in constants
    }
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(signature)
        if name in aligned
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    assert f".target sm_{arch}" in compiled.asm["ptx"]
    return compiled.asm["ptx"]


STRIDES = {
    "q_row_stride", "q_head_stride", "k_slot_stride", "k_head_stride", "v_slot_stride",
    "v_head_stride",
}  # fmt: skip
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

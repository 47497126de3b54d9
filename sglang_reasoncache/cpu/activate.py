# SPDX-License-Identifier: Apache-2.0
"""Entry point of this project's SGLang platform, which runs a server without a GPU. If ``SGLANG_PLATFORM`` is
not set, SGLang calls the entry points of all platforms, and a platform that one of them returns replaces the
machine's own. So our entry point returns None unless ``SGLANG_PLATFORM`` names our platform, and this module
does not import SGLang."""

import os

#: Name to put into ``SGLANG_PLATFORM``. The entry point in pyproject.toml has the same name.
PLATFORM_NAME = "reasoncache_cpu"


def activate() -> str | None:
    """The class path of the CPU platform if ``SGLANG_PLATFORM`` names this platform, else None.

    Raises RuntimeError if torch sees a GPU or SGLang's own CPU engine is on, because parts of SGLang would then
    use the GPU, or the kernels of the CPU engine.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        raise RuntimeError(
            f"SGLANG_PLATFORM={PLATFORM_NAME} excludes SGLANG_USE_CPU_ENGINE=1: unset one of them"
        )
    # This import costs no time: SGLang imports torch before it looks for platforms.
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            f"SGLANG_PLATFORM={PLATFORM_NAME} is for running without a GPU, but torch sees "
            f"{torch.cuda.device_count()}: unset SGLANG_PLATFORM, or hide them with "
            'CUDA_VISIBLE_DEVICES=""'
        )
    # Use large pages: with 4 KB pages almost every slot that is read costs a TLB miss (docs/kernels.md).
    # PyTorch reads this variable when it first allocates. A value set by the operator is kept.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return "sglang_reasoncache.cpu.platform:TorchCpuPlatform"

# SPDX-License-Identifier: Apache-2.0
"""Imports SGLang's FlashAttention backend on a machine without CUDA, where ``sgl_kernel`` cannot be imported.

Nothing else in the process sees the stand-in for ``sgl_kernel``."""

import importlib
import sys
import types
from typing import Any

_BACKEND = "sglang.srt.layers.attention.flashattention_backend"


def _missing(*_args: Any, **_named: Any) -> Any:
    raise NotImplementedError("a kernel of sgl_kernel, which needs CUDA")


def import_backend() -> types.ModuleType:
    """The module of SGLang's ``FlashAttentionBackend``."""
    try:
        return importlib.import_module(_BACKEND)
    except ImportError:
        pass
    names = ("sgl_kernel", "sgl_kernel.flash_attn")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        stand_in: Any = types.ModuleType(name)
        stand_in.__path__ = []
        stand_in.__getattr__ = lambda attribute: _missing
        sys.modules[name] = stand_in
    try:
        return importlib.import_module(_BACKEND)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

# SPDX-License-Identifier: Apache-2.0
"""Offers ``--attention-backend reasoncache_cpu`` on this project's CPU platform, with or without
``--enable-reasoncache``."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_reasoncache import compat, native
from sglang_reasoncache.attention import absorbed
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import ModelRunner
from sglang_reasoncache.cpu.activate import PLATFORM_NAME

logger = logging.getLogger(__name__)
_STOCK = "torch_native"


def install() -> None:
    """Register our backend and wrap ``torch_native``, if ``SGLANG_PLATFORM`` names our platform. Idempotent."""
    name = compat.CPU_BACKEND
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME and name not in compat.ATTENTION_BACKENDS:
        compat.add_attention_backend_choices([name])
        compat.register_attention_backend(name)(make)
        stock = compat.ATTENTION_BACKENDS[_STOCK]
        compat.register_attention_backend(_STOCK)(functools.partial(_absorbing, _STOCK, stock))


def default_backend() -> str:
    """Name of our backend, whose C++ code is compiled now if need be; ``torch_native`` if compiling fails."""
    if compat.CPU_BACKEND in compat.ATTENTION_BACKENDS:
        try:
            native.library()
            return compat.CPU_BACKEND
        except native.NativeUnavailable as error:
            logger.warning("reasoncache: --attention-backend torch_native, the slow one: %s", error)
    return _STOCK


def _absorbing(name: str, stock: Callable[[Any], Any], model_runner: ModelRunner) -> Any:
    """Make SGLang compute latent attention (MLA) in absorbed form, because the CPU backends read cached latent
    vectors. Else SGLang would treat these backends like ``triton`` and write vectors with Triton kernels."""
    if model_runner.use_mla_backend:
        absorbed.always(name)
    return stock(model_runner)


def make(model_runner: ModelRunner, cached: CachedPositions | None = None) -> Any:
    """Make the backend of a scheduler process. ``cached``: records the position that each key is rotated for.
    With None, keys are read as cached. Raises ValueError if the server is not supported or the C++ code cannot
    be compiled, and RuntimeError if SGLang could not apply a hook."""
    from sglang_reasoncache.cpu.backend import PagedCpuBackend

    # Without this hook SGLang launches a Triton kernel for unknown backends at page sizes above 1.
    target = compat.CPU_HOOK_TARGETS["last_loc"]
    compat.apply_hooks({target: (_around_last_loc, compat.HookType.AROUND)})
    try:
        ours = functools.partial(PagedCpuBackend, cached=cached)
        return _absorbing(compat.CPU_BACKEND, ours, model_runner)
    except (ValueError, native.NativeUnavailable) as error:
        # Our backend is the default, so the operator may not know that there is another backend.
        raise ValueError(f"{error}; SGLang's own is --attention-backend torch_native") from error


def _around_last_loc(original: Callable[..., Any], req_to_token: Any, *args: Any, **kw: Any) -> Any:
    on_cpu = req_to_token.device.type == "cpu"
    return (compat.get_last_loc_torch if on_cpu else original)(req_to_token, *args, **kw)

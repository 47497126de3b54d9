# SPDX-License-Identifier: Apache-2.0
"""Finds code that would wait for the device, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_INDEX = torch.ops.aten.index.Tensor
_INDEXING = (
    _INDEX,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


class WouldWait(RuntimeError):
    """The host would have to know what is in a tensor; the message names the operator."""


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Whether the host knows the shape all the same.
        sized = func is _INDEX or kwargs.get("output_size") is not None
        waits = torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not sized
        )
        masks = (torch.bool, torch.uint8)
        if func in _INDEXING:
            waits |= any(index is not None and index.dtype in masks for index in args[1])
        if waits:
            raise WouldWait(f"{func} waits for the device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def refused(device: torch.device) -> Iterator[None]:
    """In here, what would wait for ``device`` raises.

    Operators whose result's shape or value the host needs do so on every device. On CUDA
    copies between host and device do too.

    Raises:
        WouldWait: by an operator of the first kind; PyTorch's own RuntimeError by the others.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(_Refusing())
        yield

# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a CUDA device. Its tensors report ``cuda:0`` but are in host memory.

Operations that CUDA forbids raise RuntimeError or TypeError. Inside :func:`no_wait`, operations that wait for
the device raise WouldWait, even some that ``torch.cuda.set_sync_debug_mode("error")`` misses on a GPU.
PyTorch's own stand-ins do not suffice: fake tensors hold no values, PrivateUse1 does not report ``cuda``."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

CUDA = torch.device("cuda", 0)
#: _READS copy values to the host, which waits. _NUMPY fail for device tensors. _MOVES may change the device.
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_READS |= {"__repr__", "__format__", "__complex__"}
_NUMPY = {"numpy", "__array__", "__array_wrap__", "__dlpack__"}
_MOVES = {"to", "cpu", "cuda", "type_as"}
#: Functions that make a tensor of host values. For a device tensor, they copy pageable memory, which waits.
_FROM_HOST = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy"}
_INDEX = torch.ops.aten.index.Tensor
_INDEXING = (
    _INDEX,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


class WouldWait(RuntimeError):
    """The host would have to wait for the device. The message names the call or operator that waits."""


class Refused(TorchDispatchMode):
    """Raises WouldWait for operators that make the host wait for device data, such as the size of a result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Whether the host knows the shape of the result without waiting.
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


class DeviceTensor(Tensor):
    """A tensor in plain host memory that reports ``cuda:0``."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func.__name__} of a device tensor where no device is there")


def on_device(value: Any) -> Any:
    """Converts tensors, even in nested lists, to device tensors in the same memory. Keeps other values."""
    return tree_map(_on_device, value)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Event:
    """Stands in for a CUDA event. The second query after a record makes the queued copies and returns True."""

    def __init__(self, device: "StrictDevice") -> None:
        self._device = device
        self._asked = False

    def record(self, _stream: Any = None) -> None:
        self._asked = False

    def query(self) -> bool:
        asked = self._asked
        self._asked = True
        if asked:
            self._device.finish()
        return asked

    def synchronize(self) -> None:
        self._device.waits("event.synchronize")


class StrictDevice(TorchFunctionMode):
    """Runs PyTorch's calls. Until :meth:`finish`, targets of non-blocking copies to the host hold garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.strict = 0
        # Keeps pinned storages alive, so that no other storage gets one of their addresses.
        self._pinned: dict[int, Any] = {}
        self._queued: list[Callable[[], object]] = []

    def refuse(self, mode: int | str) -> None:
        self.strict = 2 if mode == "error" else int(mode)

    def waits(self, what: str) -> None:
        if self.strict:
            raise WouldWait(f"{what} waits for the device")
        self.finish()

    def finish(self, *_: Any) -> None:
        queued = self._queued
        self._queued = []
        with torch._C.DisableTorchFunction():
            for done in queued:
                done()

    def _copied(self, host: Tensor, source: Tensor, what: str, non_blocking: bool) -> None:
        """Copies to the host. Non-blocking copies to pinned memory are queued and made in order later."""
        if not (non_blocking and self.is_pinned(host)):
            self.waits(what)
            host.copy_(source)
            return
        now = source.detach().clone()
        host.view(-1).view(torch.uint8).fill_(0x7F)
        self._queued.append(lambda: host.copy_(now))

    def _sent(self, host: Tensor, what: str, non_blocking: bool) -> None:
        if not (non_blocking and self.is_pinned(host)):
            self.waits(what)

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    def _pin(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunction():
            if name in ("__get__", "__set__", "as_subclass"):
                found = func(*args, **kwargs)
                ours = isinstance(args[0], DeviceTensor) and name == "__get__"
                return tree_map(_on_device, found) if ours else found
            return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = any(isinstance(x, DeviceTensor) for x in tensors)
        first: Any = args[0] if args else None
        if name in ("pin_memory", "is_pinned"):
            if name == "is_pinned":
                return not device and self.is_pinned(first)
            if device:
                raise RuntimeError("cannot pin a tensor of a device, only those of the host")
            return self._pin(first.clone())
        if device and name in _NUMPY:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if device and name in _READS:
            self.waits(name)
        if name in _MOVES:
            return self._moved(func, name, args, kwargs)
        if name == "copy_" and len(tensors) > 1:
            return self._copy(*args, **kwargs)
        if name in ("record_stream", "set_"):
            return first if name == "record_stream" else func(*args, **kwargs)
        pins = kwargs.pop("pin_memory", False)
        if pins and name in _FROM_HOST and isinstance(first, np.ndarray | np.generic):
            raise RuntimeError("Can't pin tensor constructed from numpy")
        asked = kwargs.get("device")
        if asked is not None:
            device = _is_cuda(asked)
            kwargs["device"] = "cpu"
        if device and name in _FROM_HOST:
            self.waits(name)
        elif device:
            self._check_indices(name, args, tensors)
        guard = Refused() if device and self.strict else contextlib.nullcontext()
        with guard:
            found = func(*args, **kwargs)
        if pins:
            self._pin(found)
        return tree_map(_on_device, found) if device else found

    def _check_indices(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Refuses to mix device tensors with host tensors, except scalars. Copying host indices waits."""
        indexing = name in ("__getitem__", "__setitem__", "index_put_", "index_put")
        here = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]
        if indexing and not isinstance(args[0], DeviceTensor):
            if name == "__setitem__" and not any(
                isinstance(x, DeviceTensor) for x in tree_leaves(args[1])
            ):
                self.waits("a copy to the host")
                return
            raise RuntimeError("indices should be either on cpu or on the device of the tensor")
        if indexing:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if here or any(isinstance(part, list | np.ndarray) for part in parts):
                self.waits(f"{name} with numbers of the host")
        elif here:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({name})"
            )

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        source, *rest = args
        was = isinstance(source, DeviceTensor)
        there = {"cpu": False, "cuda": True}.get(name, was)
        kept = []
        for at, value in enumerate([*rest, *(kwargs.pop(x, None) for x in ("device", "other"))]):
            if isinstance(value, Tensor):
                there = isinstance(value, DeviceTensor)
                kept.append(value.dtype)
            elif isinstance(value, str | torch.device):
                there = _is_cuda(value)
            elif value is not None and at < len(rest):
                kept.append(value)
        non_blocking = bool(kwargs.get("non_blocking"))
        if there and not was:
            self._sent(source, f"{name} from the host", non_blocking)
        found = source.to(*kept, **{"copy": True, **kwargs} if there != was else kwargs)
        if was and not there:
            # PyTorch pins the target of a non-blocking copy.
            target = torch.empty_like(found)
            target = self._pin(target) if non_blocking else target
            self._copied(target, found.as_subclass(Tensor), f"{name} to the host", non_blocking)
            return target
        return _on_device(found) if there else found

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to = isinstance(into, DeviceTensor)
        of = isinstance(source, DeviceTensor)
        if of and not to:
            self._copied(into, source.as_subclass(Tensor), "copy_ to the host", non_blocking)
            return into
        if to and not of and source.dim():
            self._sent(source, "copy_ from the host", non_blocking)
        return into.copy_(source)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    if type(value) is not Tensor:
        return value
    return value.as_subclass(DeviceTensor)


@contextlib.contextmanager
def strict_device() -> Iterator[StrictDevice]:
    """Inside this context ``cuda`` means the stand-in."""
    device = StrictDevice()
    stream = SimpleNamespace(
        wait_stream=lambda _: None,
        wait_event=lambda _: None,
        synchronize=lambda: device.waits("stream.synchronize"),
    )
    names: dict[str, Any] = {
        "Event": lambda *_, **__: _Event(device), "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream, "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: device.waits("torch.cuda.synchronize"),
        "get_sync_debug_mode": lambda: device.strict, "set_sync_debug_mode": device.refuse,
        "memory_reserved": lambda *_: 0, "memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (1 << 40, 1 << 40),
    }  # fmt: skip
    run = GridExecutor.__call__

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a kernel under Triton's interpreter, on the tensors' own host memory."""
        with torch._C.DisableTorchFunction():
            return run(kernel, *map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})

    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        stack.enter_context(device)
        yield device


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Inside this context, operations that wait for the device (stand-in or GPU) raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def guarded(owner: Any, *names: str) -> None:
    """Wraps the methods ``names`` of ``owner`` in :func:`no_wait`."""
    for name in names:
        setattr(owner, name, no_wait()(getattr(owner, name)))

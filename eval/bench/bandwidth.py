# SPDX-License-Identifier: Apache-2.0
"""Memory bandwidth of host memory or of a CUDA device, measured beside what it judges.

Arrays well above the caches, several routines because none is the fastest
everywhere. Other work on a machine moves these figures within seconds, so a
measurement takes them in between its own runs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Call = Callable[[], object]


def seconds(call: Call, device: torch.device) -> float:
    """Wall time of one call; on a CUDA device the time between two events."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Yardstick:
    """Copies and reads arrays of ``gigabytes`` with all the threads PyTorch uses.

    On the CPU the copy is the better of PyTorch's and of the C library's, which
    writes past the cache and so saves reading what it overwrites.
    """

    def __init__(self, device: torch.device, gigabytes: float = 0.5) -> None:
        self._device = device
        source = torch.ones(int(gigabytes * 1e9) // 8, dtype=torch.int64, device=device)
        target = torch.zeros_like(source)
        self._bytes = source.nbytes
        copies: list[Call] = [lambda: target.copy_(source)]
        reads: list[Call] = [source.sum, source.view(torch.float32).sum]
        if device.type == "cpu":
            copies.append(lambda: _copy_by_threads(target, source, torch.get_num_threads()))
        self._copy, self._read = (self._fastest(calls) for calls in (copies, reads))

    def copy(self) -> float:
        """GB/s of one copy, bytes read and bytes written."""
        return 2 * self._bytes / seconds(self._copy, self._device) / 1e9

    def read(self) -> float:
        """GB/s of reading one array."""
        return self._bytes / seconds(self._read, self._device) / 1e9

    def rates(self) -> dict[str, float]:
        """Both, as ``copy`` and ``read``."""
        return {"copy": self.copy(), "read": self.read()}

    def _fastest(self, calls: list[Call]) -> Call:
        return min(calls, key=lambda call: min(seconds(call, self._device) for _ in range(4)))


def _copy_by_threads(target: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = ctypes.c_void_p
    parts = list(zip(target.chunk(threads), source.chunk(threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p: memcpy(p[0].data_ptr(), p[1].data_ptr(), p[0].nbytes), parts))

# SPDX-License-Identifier: Apache-2.0
"""The C++ kernel of ``csrc/distance`` on tensors in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from sglang_reasoncache.native.pool import (
    NativePool,
    RotaryTable,
    address_of,
    check_status,
    int32,
    int64,
    pointer,
)


class NativeDistance:
    """Reads both blocks once; memory for the result only. Calls may run concurrently.

    Args:
        library: From :func:`sglang_reasoncache.native.library`.
        layers, rotation: See :class:`NativePool`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rotation: RotaryTable | None,
    ) -> None:
        self._call = library.reasoncache_distance
        self._call.argtypes = (*(pointer,) * 4, *(int64,) * 2, *(int32,) * 2, pointer)
        self._pool = NativePool(layers, rotation)
        self._num_layers = len(layers)

    def sums(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None,
        moments: bool,
        threads: int,
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2]``, with ``moments`` ``[pairs, num_layers, 2, 3]``.

        Arguments: see ``DistanceKernel``, contiguous; checked but for their values.

        Raises:
            ValueError: a slot or shift out of range; nothing has been read then.
        """
        pairs, block = dst_slots.shape
        out = torch.empty((pairs, self._num_layers, 2, *[3] * moments), dtype=torch.float64)
        status = self._call(
            self._pool.address,
            dst_slots.data_ptr(),
            src_slots.data_ptr(),
            address_of(shift),
            pairs,
            block,
            moments,
            threads,
            out.data_ptr(),
        )
        check_status(status, "distance")
        return out

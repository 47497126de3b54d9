# SPDX-License-Identifier: Apache-2.0
"""A device's numbers in host memory, without waiting for that device."""

from __future__ import annotations

import torch


class Download:
    """Tensors on their way to the host; those that are there already are taken as they are.

    ``host``: in the same order; from a GPU in pinned memory, no numbers before :meth:`ready`.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            # The copies are queued behind the kernels; an event tells when they are made.
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def is_immediate(self) -> bool:
        """Nothing was ever in flight: the same on every rank, whatever the time."""
        return self._arrived is None

    def ready(self) -> bool:
        """Whether :attr:`host` can be read without waiting."""
        return self._arrived is None or self._arrived.query()

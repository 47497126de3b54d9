# SPDX-License-Identifier: Apache-2.0
"""Copies tensors from a device to host memory without waiting for the device."""

import torch


class Download:
    """Tensors that are being copied to host memory. Tensors already in host memory are not copied.

    ``host``: the copies, in the same order. Copies from a GPU must not be read before :meth:`ready`.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            # The copies are queued behind the kernels. The event tells when the copies are done.
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def is_immediate(self) -> bool:
        """Whether nothing had to be copied from a GPU. The same on all ranks."""
        return self._arrived is None

    def ready(self) -> bool:
        """Whether :attr:`host` can be read without waiting."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[torch.Tensor]:
        """:attr:`host`. Waits until the copies can be read."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        return self.host

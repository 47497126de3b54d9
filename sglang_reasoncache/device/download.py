# SPDX-License-Identifier: Apache-2.0
"""Copies tensors from a device to host memory without waiting for the device."""

import torch


class Download:
    """Tensors that are being copied to host memory. Tensors already in host memory are not copied.

    ``host``: the copies, in the same order. Read them only once :meth:`ready` is True or after :meth:`wait`.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            # The copies run after the kernels queued before them. The event tells when the copies are done.
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def is_immediate(self) -> bool:
        """True if no tensor was on a GPU, so no copy is pending. All ranks get the same answer."""
        return self._arrived is None

    def ready(self) -> bool:
        """Whether :attr:`host` can be read without waiting."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[torch.Tensor]:
        """Wait until the copies can be read. Returns :attr:`host`."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        return self.host

# SPDX-License-Identifier: Apache-2.0
"""The forward in flight may still read slots that sharing or eviction just freed. Another forward may get them
at once, because it runs later on the same stream. A copy into them must wait."""

from __future__ import annotations

from typing import Any

import torch


class ReadsInFlight:
    """Makes copies wait for the forward that may still read what was freed.

    Args:
        stream: The CUDA stream on which the overlap schedule runs forwards. None if no forward is in flight
            while slots are freed: on a CPU.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self._last: Any = None

    def freed(self) -> None:
        """Slots of a request that goes on are about to be freed."""
        if self._stream is not None:
            self._last = torch.cuda.Event()
            self._last.record(self._stream)

    def hold_stream(self) -> None:
        """Let what is queued next on the current stream wait for the forward in flight. It may still read what
        was freed, and write into slots of a request that finished or was retracted."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def hold_host(self) -> None:
        """Wait on the host, before others, whom no stream orders, are told to write into slots."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

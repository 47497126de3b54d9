# SPDX-License-Identifier: Apache-2.0
"""Records each slot's *cached position*: the position that its key was rotated for.

SGLang caches keys after rotary embedding. To read a key at another position, rotate the key by the difference.
"""

from typing import Any

import torch


class CachedPositions:
    """``positions``: int32 ``[num_slots]`` on the pool's device. Set by forwards and by loads from the host or
    from another server."""

    def __init__(self, num_slots: int, device: str | torch.device) -> None:
        self.positions = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def record(self, slots: torch.Tensor, positions: torch.Tensor, stream: Any = None) -> None:
        """Record the positions of tokens whose KV is about to be written, or was written by a copy. ``slots``,
        ``positions``: int ``[num_tokens]`` on the pool's device.

        ``stream``: the CUDA stream on which the overlap schedule runs forwards, if a forward that is in flight
        may still read the old position of a reused slot: positions are then written on this stream, and nothing
        else waits for that. Who reads them on another stream does so after a later forward. None where forwards
        run on the current stream, within a forward, and on a CPU.
        """
        if stream is None:
            self.positions[slots.long()] = positions.to(torch.int32)
            return
        stream.wait_stream(torch.cuda.current_stream(slots.device))
        with torch.cuda.stream(stream):
            self.record(slots, positions)
        for used in (slots, positions):
            used.record_stream(stream)

    def record_path(self, slots: torch.Tensor, stream: Any = None) -> None:
        """Record positions 0, 1, ... for ``slots``, int ``[length]``: the slots of a prefix tree path, from the
        root on. SGLang is loading the KV of some of these slots from the host. ``stream``: see
        :meth:`record`."""
        self.record(slots, torch.arange(len(slots), device=slots.device), stream)

    def shift(self, slots: torch.Tensor, used_at: torch.Tensor) -> torch.Tensor:
        """By how many positions to rotate each slot's key to read the key at position ``used_at``: int32, in
        the shape of ``slots`` and ``used_at``."""
        return used_at.to(torch.int32) - self.positions[slots.long()]

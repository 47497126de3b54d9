# SPDX-License-Identifier: Apache-2.0
"""On the decode server of a PD pair: where the keys of a prompt that another server computes belong, and those
of a retracted request that SGLang copied to the host and loads again.

No forward of this server computes them, and SGLang's copies hold keys as they were cached. So what a forward
would record is recorded when a request gets its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.swap import behind, computed_length, limit_pinned
from sglang_reasoncache.compat.carriers import COPIED
from sglang_reasoncache.compat.types import KVPool, ReqToTokenPool, Request
from sglang_reasoncache.device.upload import upload


class Copied(NamedTuple):
    """What SGLang's copy of a retracted request's KV lacks. SGLang's request carries it.

    Attributes:
        cached_at: The position that each key was rotated for, int32 ``[positions]`` in host memory.
        first_shared: The lowest position that was ever redirected. From there on the KV is approximate. None if
            all is exact.
        drafts: The KV of each draft model, if SGLang's copy does not have it: its copies as tensors do not.
    """

    cached_at: torch.Tensor
    first_shared: int | None
    drafts: Sequence[Any]


class Handover:
    """Records the cached positions of requests that this server does not prefill, and counts the copies that
    take the place of SGLang's where its host pool has no room for them.

    Args:
        rows: SGLang's pool of rows.
        cached_at: The cached positions of all slots.
        stream: See :meth:`CachedPositions.record`.
        draft_pools: The pools of draft models, whose KV is in slots of the same numbers.
        room: Most positions that these copies may have. All ranks have the same.
        slot_bytes: Most bytes of host memory that a position takes.
    """

    def __init__(
        self,
        rows: ReqToTokenPool,
        cached_at: CachedPositions,
        stream: Any,
        draft_pools: Sequence[KVPool] = (),
        room: int = 0,
        slot_bytes: int = 0,
    ) -> None:
        self._rows = rows
        self._cached_at = cached_at
        self._stream = stream
        self._draft_pools = draft_pools
        self._most = room
        self._slot_bytes = slot_bytes
        # Positions of each copy, by the identity of its tensors. Not by weak references, because ranks decide
        # by it, and collect garbage at other times.
        self._copies: dict[int, int] = {}

    @property
    def room(self) -> int:
        """How many positions may be copied now."""
        return max(self._most - sum(self._copies.values()), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the copies take at most."""
        return sum(self._copies.values()) * self._slot_bytes

    def make_room(self, positions: int) -> None:
        """Called before ``positions`` are copied. See :func:`limit_pinned`."""
        if self._rows.req_to_token.is_cuda:
            wanted = self.num_bytes + positions * self._slot_bytes
            limit_pinned(wanted, self._most * self._slot_bytes)

    def copied(self, backup: Any, positions: int) -> None:
        """SGLang copied ``positions`` of a request that is being retracted, as tensors."""
        self._copies[id(backup.cpu_tensors)] = positions

    def dropped(self, backup: Any) -> None:
        """The copy was loaded, or its request ended."""
        self._copies.pop(id(backup.cpu_tensors), None)

    def counts(self, req: Request) -> bool:
        """Whether SGLang's copy of ``req``, which is being retracted, is one of these."""
        backup = req.kv.retraction_backup
        return backup is not None and id(backup.cpu_tensors) in self._copies

    def drafts_of(self, req: Request) -> Sequence[Any]:
        """Copies of the draft models' KV of ``req``, which is being retracted, if SGLang's copy lacks it.
        Called before the row is freed: windows lose their slots at once."""
        backup = req.kv.retraction_backup
        if backup is None or backup.cpu_tensors is None or not self._draft_pools:
            return ()
        slots = self._slots(req, 0, computed_length(req))
        return [pool.get_cpu_copy(slots) for pool in self._draft_pools]

    def retracted(self, req: Request, row: HostRow, drafts: Sequence[Any]) -> None:
        """Note what SGLang's copy of ``req`` lacks. Called when the row is freed, before a forward rewrites it.
        ``row``: our copy of the row. ``drafts``: see :meth:`drafts_of`. SGLang makes no copy if a prefill
        server is to compute the KV again."""
        copied = None
        if req.kv.retraction_backup is not None and (row.first_shared is not None or drafts):
            # SGLang copies all positions whose KV is computed: all but that of the last token.
            slots = self._slots(req, 0, computed_length(req))
            copied = Copied(self._cached_at.positions[slots].cpu(), row.first_shared, drafts)
        setattr(req, COPIED, copied)

    def allocated(self, req: Request) -> int | None:
        """Record the cached positions of the KV that will be written into the slots that ``req`` just got.
        Returns the first position whose KV is approximate; None if all is exact. Can be repeated."""
        # The prefix tree has the positions below ``prefix_len``, exact and recorded.
        start = req.prefix_len
        end = req.kv.kv_committed_len
        copied: Copied | None = getattr(req, COPIED, None)
        slots = self._slots(req, start, end)
        if copied is None:
            positions = torch.arange(start, end, device=slots.device)
        else:
            positions = upload(copied.cached_at[start:end].numpy(), slots.device)
            for pool, tensors in zip(self._draft_pools, copied.drafts, strict=False):
                pool.load_cpu_copy(tensors, behind(start, slots))
        self._cached_at.record(slots, positions, self._stream)
        return None if copied is None else copied.first_shared

    def loaded(self, req: Request) -> None:
        """Drop what :meth:`allocated` has loaded from host memory."""
        setattr(req, COPIED, None)

    def _slots(self, req: Request, start: int, end: int) -> torch.Tensor:
        return self._rows.req_to_token[req.kv.req_pool_idx, start:end].long()

# SPDX-License-Identifier: Apache-2.0
"""What a policy gives up, once its scores are in host memory."""

from __future__ import annotations

import numpy as np
import torch

from sglang_reasoncache.cache.download import Download
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import lowest


class Decision:
    """``count`` slots of one request shall go, of positions that may.

    Args:
        view: The request as it was scored.
        candidates: int64, ascending, at least one.
        scores: float ``[held]``, of this rank, on the device where they were computed.
        count: Above 0.
    """

    def __init__(
        self, view: View, candidates: np.ndarray, scores: torch.Tensor, count: int
    ) -> None:
        at = np.searchsorted(view.held, candidates)
        self._candidates, self._slots = candidates, view.slot_aliases[at]
        self._page, self._count = view.page, count
        self._scores = scores[upload(at, scores.device)].double()
        self._download: Download | None = None

    def ready(self, ranks: Ranks) -> bool:
        """Whether :meth:`positions` would not wait, on all ranks, which call this together."""
        if self._download is None:
            self._download = Download(self._scores)
        return self._download.is_immediate or bool(ranks.least(self._download.ready()))

    def positions(self, ranks: Ranks) -> np.ndarray:
        """int64, ascending: what goes. Ranks call this together, and get the same. On a GPU it
        waits, unless it was :meth:`ready`."""
        ready = self._download is not None and self._download.ready()
        sums = self._download.host[0] if ready and self._download else self._scores.cpu()
        ranks.add(sums)
        chosen = lowest(sums.numpy(), self._slots, self._page, self._count)
        return self._candidates[chosen]

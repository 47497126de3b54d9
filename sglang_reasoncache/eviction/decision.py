# SPDX-License-Identifier: Apache-2.0
"""A policy's choice of positions, made once its scores are in host memory."""

import numpy as np
import torch

from sglang_reasoncache.cache.download import Download
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import lowest


class Decision(Download):
    """Chooses the lowest-scored candidates of one request, so that ``count`` slots become free.

    Args:
        view: The view of the request for which ``scores`` were computed.
        candidates: Positions that may be evicted: int64 ``[n]``, ascending, at least one.
        scores: This rank's scores: float ``[held]`` on the device where they were computed.
        count: Slots, above 0.
    """

    def __init__(
        self, view: View, candidates: np.ndarray, scores: torch.Tensor, count: int
    ) -> None:
        at = np.searchsorted(view.held, candidates)
        super().__init__(scores[upload(at, scores.device)].double())
        self._candidates, self._slots = candidates, view.first_readers[at]
        self._page, self._count = view.page, count

    def positions(self, ranks: Ranks) -> np.ndarray:
        """The chosen positions: int64 ``[n]``, ascending, the same on all ranks, which call this
        together. On a GPU this waits for the scores unless they are :meth:`ready`."""
        [sums] = self.wait()
        ranks.add(sums)
        chosen = lowest(sums.numpy(), self._slots, self._page, self._count)
        return self._candidates[chosen]

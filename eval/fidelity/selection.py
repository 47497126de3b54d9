# SPDX-License-Identifier: Apache-2.0
"""Arms of which each head reads other positions. A server's slot holds a token's KV of all layers and heads, so
no server here can do the same; the arms measure what the papers' own rules cost."""

import numpy as np
import torch

#: Quest reads everything in the first layers, where attention is spread most evenly (its paper, section 4).
DENSE_LAYERS = 2


class ByHead:
    """Positions that each layer and KV head has evicted on its own. ``gone``: bool ``[layers, KV heads,
    capacity]``."""

    def __init__(self, layers: int, heads: int, capacity: int) -> None:
        self.gone = np.zeros((layers, heads, capacity), dtype=bool)

    @property
    def saved(self) -> int:
        """Number of evicted positions, the mean of all layers and heads."""
        return round(float(self.gone.sum(-1).mean()))

    def visible(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """See :data:`eval.fidelity.cache.Visible`."""
        held = torch.from_numpy(~self.gone[layer, :, : key.shape[1]]).to(key.device)
        return visible & held.repeat_interleave(len(query) // len(key), dim=0)[:, None]


class Quest:
    """Quest (arXiv 2406.10774): each query reads the pages that score highest by an upper bound of its logits,
    computed from the least and the greatest element of the page's keys in each dimension. It frees no slot.

    Args:
        page: Positions in a page; 16 in the paper.
        prompt: Queries of the prompt, positions below this, read everything.

    Attributes:
        skip: About how many positions each query of the response leaves out, in the layers where it may.
    """

    def __init__(self, page: int, prompt: int) -> None:
        self._page = page
        self._prompt = prompt
        self.skip = 0
        # Layer -> positions that the newest query left out, the mean of all heads.
        self._skipped: dict[int, float] = {}

    @property
    def saved(self) -> int:
        """Number of positions that the newest query left out, the mean of all layers and heads."""
        return round(sum(self._skipped.values()) / max(1, len(self._skipped)))

    def visible(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """See :data:`eval.fidelity.cache.Visible`."""
        tokens, written = visible.shape
        every = visible.expand(len(query), -1, -1)
        self._skipped[layer] = 0.0
        if layer < DENSE_LAYERS or not self.skip:
            return every
        at = torch.arange(written - tokens, written, device=key.device)
        # Only pages before the query's own are chosen: they are complete, so their bounds are final.
        query_page = at // self._page
        whole = key[:, : written // self._page * self._page].unflatten(1, (-1, self._page)).float()
        least, most = (
            part.repeat_interleave(len(query) // len(key), dim=0).mT
            for part in (whole.amin(2), whole.amax(2))
        )
        q = query.float()
        bounds = q.clamp(max=0) @ least + q.clamp(min=0) @ most
        pages = torch.arange(bounds.shape[-1], device=key.device)
        bounds = bounds.masked_fill(pages >= query_page[:, None], -torch.inf)
        ranks = bounds.argsort(dim=-1, descending=True).argsort(dim=-1)
        # The query's own page is one of those that it may read.
        count = ((at + 1 - self.skip).clamp(min=1) + self._page - 1) // self._page - 1
        chosen = (ranks < count[:, None]) & (pages < query_page[:, None])
        read = chosen.repeat_interleave(self._page, dim=-1)
        read = torch.nn.functional.pad(read, (0, written - read.shape[-1]))
        read |= torch.arange(written, device=key.device) // self._page == query_page[:, None]
        read |= (at < self._prompt)[:, None]
        mask = every & read
        self._skipped[layer] = float((every[:, -1] & ~mask[:, -1]).float().sum(-1).mean())
        return mask

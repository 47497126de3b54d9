# SPDX-License-Identifier: Apache-2.0
"""Computes a server's responses again by the fidelity harness: a Hugging Face model whose cache is edited
where the server shared."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import torch

from eval.fidelity.arms import default_name, parse
from eval.fidelity.cache import Reader
from eval.fidelity.replay import ArmCache
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.sharing.measure import AdaptiveThreshold

_ARM = parse(default_name())
_BLOCK = ReasonCacheConfig().block


class Replayed:
    """A server's response, the ``number``-th of its siblings, read through two rows of a cache: a dense row,
    and a row edited by the harness with the blocks that the response shared."""

    def __init__(
        self, reader: Reader, tokens: list[int], found: dict[str, Any], number: int = 0
    ) -> None:
        self._reader, self._tokens, self._prompt = reader, tokens, found["prompt_tokens"]
        self._cache = reader.cache(2, len(tokens))
        self._arm = ArmCache(_ARM, reader, self._cache, self._prompt, number)
        blocks = [*found["blocks"], *found["blocks_across"]]
        self._blocks = deque(sorted(blocks, key=lambda block: block[0]))
        self._found: list[torch.Tensor] = []

    def log_probs(self, siblings: Mapping[str, Self] = MappingProxyType({})) -> torch.Tensor:
        """fp32 ``[2, tokens of the response]``: log-probabilities of the dense row and of the edited row."""
        self._read(len(self._tokens), siblings)
        return torch.cat(self._found, dim=1)[:, self._prompt - 1 :]

    def _read(self, end: int, siblings: Mapping[str, Self]) -> None:
        while self._blocks and self._blocks[0][0] < end:
            written, dst, src, *source = self._blocks.popleft()
            # The forward in flight still reads the old slots.
            self._forward(written + 1)
            if source:
                lender = siblings[source[0]]
                lender._read(src + _BLOCK, siblings)
                self._arm.read(dst, src, lender._arm)
            else:
                self._arm.share([BlockPair(dst, src)], AdaptiveThreshold(100, 0))
        self._forward(end)

    def _forward(self, end: int) -> None:
        start = self._cache.length
        if start < end:
            logits = self._reader.forward(self._cache, self._tokens[start:end])
            targets = torch.tensor(self._tokens[start + 1 : end + 1])
            log_probs = logits[[0, self._arm.row]].log_softmax(-1)
            self._found.append(log_probs[:, torch.arange(len(targets)), targets])


def assert_computed(served: dict[str, Any], found: torch.Tensor) -> None:
    """Checks that the server's log-probabilities are those of the edited row and not of the dense row."""
    expected = torch.tensor(served["logprobs"])
    dense, ours = (found - expected).abs()
    assert ours.mean() < 1e-4 and ours.max() < 1e-2
    assert dense.mean() > 20 * ours.mean()

# SPDX-License-Identifier: Apache-2.0
"""InfLLM (arXiv 2402.04617) over documents that were prefilled alone, the baseline *Multi-InfLLM* of the SamKV
paper: each layer reads the blocks that fit the newest tokens best, and nothing is recomputed. ``⚠`` marks our
choices where the papers leave a point open."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from eval.fidelity.cache import EditableCache, Reader

if TYPE_CHECKING:
    from eval.fidelity.documents import Prompt

_NAME = re.compile(r"infllm(?::(?P<share>\d*\.?\d+))?")
#: Tokens that stand for a block: those to which the tokens of its document attend most.
_REPRESENTATIVE = 4


class InfLLM(NamedTuple):
    """An arm. ``share``: part of the documents' blocks that each layer reads; the SamKV paper reads 15%.
    ``block``: tokens of a block; ⚠ as many as the arm ``samkv`` has, where InfLLM's paper has 128."""

    share: float = 0.15
    block: int = 16


def parse(name: str) -> InfLLM | None:
    """Parses ``infllm`` or ``infllm:SHARE``; else returns None. Raises ValueError for a bad share."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    share = float(match["share"] or InfLLM().share)
    if not 0 < share <= 1:
        raise ValueError(f"infllm:SHARE must be above 0 and at most 1, got {share}")
    return InfLLM(share)


class Chosen:
    """Which positions each layer reads. Made once for the documents of a prompt.

    ⚠ All heads of a layer read the same blocks, tokens keep their positions, and the newest tokens are those of
    one forward: the question, then each token of the answer."""

    def __init__(self, reader: Reader, cache: EditableCache, prompt: Prompt, arm: InfLLM) -> None:
        bounds = pairwise((prompt.start, *prompt.ends))
        self._blocks = [
            range(at, min(at + arm.block, end))
            for begin, end in bounds
            for at in range(begin, end, arm.block)
        ]
        self._count = max(1, math.ceil(arm.share * len(self._blocks)))
        self._reader = reader
        self._start = prompt.start
        self._end = prompt.ends[-1]
        self._keys = self._representatives(cache, prompt)

    def _representatives(self, cache: EditableCache, prompt: Prompt) -> list[torch.Tensor]:
        """For each layer the sums of representative keys, unrotated: ``[blocks, KV heads, head_dim]``."""
        alone = self._reader.cache(1, prompt.ends[-1])
        self._reader.forward(alone, prompt.tokens[: prompt.start], logits_to_keep=1)
        parts: dict[int, list[torch.Tensor]] = {}

        def watch(layer: int, _: torch.Tensor, weights: torch.Tensor) -> None:
            parts.setdefault(layer, []).append(weights.sum((0, 1, 2))[prompt.start :])

        for begin, end in pairwise((prompt.start, *prompt.ends)):
            # Each document is read behind the tokens before the first one, as it was prefilled.
            self._reader.forward(alone, prompt.tokens[begin:end], watch=watch, logits_to_keep=1)
            alone.length = prompt.start
        received = {layer: torch.cat(scores) for layer, scores in parts.items()}
        representatives = []
        for layer in range(self._reader.layers):
            keys = self._reader.unrotated(cache.keys[layer, 0, :, : self._end], 0)
            sums = []
            for block in self._blocks:
                scores = received[layer][block.start - self._start : block.stop - self._start]
                best = scores.topk(min(_REPRESENTATIVE, len(block))).indices + block.start
                sums.append(keys[:, best].sum(1))
            representatives.append(torch.stack(sums))
        return representatives

    def visible(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """See :data:`eval.fidelity.cache.Visible`."""
        tokens, written = visible.shape
        query_sum = self._reader.unrotated(query, written - tokens).sum(1)
        of_heads = query_sum.unflatten(0, (len(key), -1)).sum(1)
        relevance = (self._keys[layer] * of_heads).sum((1, 2))
        read = torch.ones(written, dtype=torch.bool, device=key.device)
        read[self._start : self._end] = False
        for number in relevance.topk(self._count).indices.tolist():
            block = self._blocks[number]
            read[block.start : block.stop] = True
        return (visible & read).expand(len(query), -1, -1)

    @property
    def share(self) -> float:
        """The part of the documents' blocks that a layer reads."""
        return self._count / len(self._blocks)

# SPDX-License-Identifier: Apache-2.0
"""SamKV (arXiv 2508.11661): of documents that were prefilled alone, a request reads the first block, the last
two, and those in between that fit its question; the ends and some tokens more are computed again.

``⚠`` marks what the paper leaves open, and what is done here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from eval.fidelity.cache import EditableCache, Reader

if TYPE_CHECKING:
    from eval.fidelity.documents import Prompt

#: By arm, whether new KV replaces the old, is mixed with it, or nothing is computed again.
UPDATES = {"samkv": "overwrite", "samkv-fusion": "fusion", "samkv-select": ""}


class SamKV(NamedTuple):
    """An arm. With the paper's blocks of 64 tokens, a document below 193 is read whole; with 16, the ends
    of documents of 300 tokens are the 15% that the paper reads and computes again."""

    update: str
    block: int = 16


class Profile(NamedTuple):
    """What is kept of a document besides its KV. Blocks are positions in the prompt."""

    ends: list[int]  # positions of the first block and the last two
    middle: list[range]  # blocks between them
    query: torch.Tensor  # fp32 [layers, heads, head_dim], mean of the last two blocks
    most: list[int]  # by stable layer, the most important block of the middle (K_max)
    least: list[int]  # and the most unimportant (K_min)
    outliers: set[int]  # positions


def parse(name: str) -> SamKV | None:
    """``samkv``, ``samkv-fusion`` or ``samkv-select``, perhaps with ``:BLOCK``; None: another name."""
    kind, colon, block = name.partition(":")
    if kind not in UPDATES or (colon and not (block.isascii() and block.isdigit() and int(block))):
        return None
    return SamKV(UPDATES[kind], int(block)) if colon else SamKV(UPDATES[kind])


def profiles(reader: Reader, prompt: Prompt, block: int) -> list[Profile]:
    """Offline: prefill each document behind the base; see what it asks and attends to."""
    cache, found = reader.cache(1, prompt.ends[-1]), []
    reader.forward(cache, prompt.tokens[: prompt.start], logits_to_keep=1)
    for begin, end in pairwise((prompt.start, *prompt.ends)):
        blocks = [range(at, min(at + block, end)) for at in range(begin, end, block)]
        local, middle = (blocks[1:] or blocks)[-2:], blocks[1:-2]
        ends = sorted({at for part in (blocks[0], *local) for at in part})
        query, weights = _look(reader, cache, prompt.tokens[begin:end], end - local[0].start)
        one = Profile(ends, middle, query, [], [], set())
        found.append(one)
        for layer in weights[..., prompt.start :] if middle else ():
            alpha, strength = decay(layer)
            # For a block stands its token that later ones attend to most.
            parts = [slice(part.start - begin, part.stop - begin) for part in middle]
            strong = [part.start + int(strength[part].argmax()) for part in parts]
            one.most.append(int(alpha[strong].argmin()))
            one.least.append(int(strength[strong].argmin()))
            # PauTa: beyond three standard deviations. ⚠ On both sides, of the middle's tokens, in any layer.
            inner = alpha[parts[0].start : parts[-1].stop]
            far = (inner - inner.mean()).abs() > 3 * inner.std(correction=0)
            one.outliers.update((far.nonzero()[:, 0] + middle[0].start).tolist())
    return found


def select(
    reader: Reader, cache: EditableCache, prompt: Prompt, found: Sequence[Profile]
) -> list[int]:
    """Online: leave visible in row 0 what the request reads; the positions to be computed again.
    ⚠ Positions stay those of the whole prompt; scores are of queries and keys before rotation, as what is
    kept of a document cannot know its place. All layers read the same blocks, as a server's row does."""
    end, visible = prompt.ends[-1], cache.visible[0]
    visible[prompt.start : end] = False
    visible[[at for one in found for at in one.ends]] = True
    asked = prompt.tokens[end : prompt.answer]
    generic, _ = _look(reader, cache, asked, len(asked))
    # Personalised queries: what the others' last blocks ask is added. ⚠ By layer and head.
    local = torch.stack([one.query for one in found])
    bias = torch.cosine_similarity(generic, local, dim=-1).abs()[..., None] * local
    personal = generic + (bias.sum(0) - bias) / max(len(found) - 1, 1)
    # Scores: products with mean keys. ⚠ Summed over heads; one mean of both ends is the anchor.
    keys = _unrotated(reader, cache.keys[_stable(reader.layers).start :, 0, :, :end], 0)
    asks = personal[:, -len(keys) :].unflatten(2, (keys.shape[1], -1)).sum(3)
    scores, counts = [keys.new_empty(len(keys), 0)], list[int]()
    for ask, one in zip(asks, found, strict=True):
        means = [keys[:, :, list(part)].mean(2) for part in (one.ends, *one.middle)]
        anchor, *middle = torch.stack([(ask * mean).sum((1, 2)) for mean in means]).unbind()
        scores.append(torch.stack([anchor, *middle], dim=1)[:, 1:])
        layers = range(len(one.most))
        extremes = (scores[-1][layers, which] for which in (one.most, one.least))
        counts.append(math.ceil(top_p(anchor, *extremes) * len(middle)) if middle else 0)
    # Cross-context filter: the best blocks of all documents, as many as a document has on average.
    # ⚠ Compared by the mean of layers, each normalised over all documents' middle blocks.
    every = torch.cat(scores, dim=1)
    apart = every - every.mean(1, keepdim=True)
    normal = (apart / apart.norm(dim=1, keepdim=True).clamp(min=1e-6)).mean(0)
    owns = normal.split([len(one.middle) for one in found])
    best = [
        (float(own[at]), one.middle[at])
        for own, one, count in zip(owns, found, counts, strict=True)
        for at in own.topk(count).indices.tolist()
    ]
    best.sort(key=lambda pair: pair[0], reverse=True)
    kept = {at for _, part in best[: math.ceil(len(normal) / len(found))] for at in part}
    visible[sorted(kept)] = True
    # ⚠ In all layers. The first document stands where it was computed.
    again = {at for one in found for at in (*one.ends, *(one.outliers & kept))}
    return sorted(at for at in again if at >= prompt.ends[0])


def top_p(anchor: torch.Tensor, most: torch.Tensor, least: torch.Tensor) -> float:
    """Eq. 2 of scores by layer: the share of a document's middle blocks. ⚠ 0 also where ``least`` beats the
    anchor, and so does every block. Scores that are equal never divide."""
    inside = (least < anchor) & (anchor <= most)
    return float(torch.where(inside, (most - anchor) / (most - least), 0).mean())


def decay(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of attention ``[tokens, tokens]``, by row what a token gives: by token alpha, least squares of
    ``distance ** -alpha`` to what later tokens give it, and the mean of that."""
    at = torch.arange(len(weights), device=weights.device)
    distance = at[:, None] - at
    later = (distance > 0).float()
    count = later.sum(0)
    pair = distance.clamp(min=1).log(), weights.clamp(min=1e-9).log()
    x, y = (later * (log - (later * log).sum(0) / count) for log in pair)
    return -(x * y).sum(0) / x.square().sum(0), (later * weights).sum(0) / count


def fuse(cache: EditableCache, old: EditableCache, positions: Sequence[int]) -> None:
    """Mix new KV with the old by their cosine: theta * new + (1 - theta) * old. ⚠ By token, layer and head,
    K and V apart, after all layers were computed."""
    for new, before in ((cache.keys, old.keys), (cache.values, old.values)):
        ours, theirs = (part[..., positions, :].float() for part in (new, before))
        theta = torch.cosine_similarity(ours, theirs, dim=-1)[..., None]
        new[..., positions, :] = (theta * ours + (1 - theta) * theirs).to(new.dtype)


def _stable(layers: int) -> range:
    """N*. ⚠ Not calibrated: the last eighth, which is what the paper has for its three models."""
    return range(layers - math.ceil(layers / 8), layers)


def _look(
    reader: Reader, cache: EditableCache, tokens: Sequence[int], last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens behind a cache, which does not keep them: mean unrotated query of the ``last`` ones, fp32
    ``[layers, heads, head_dim]``, and mean attention of heads, ``[stable layers, tokens, positions]``."""
    queries, given = list[torch.Tensor](), list[torch.Tensor]()
    length = cache.length
    end = length + len(tokens)

    def watch(layer: int, query: torch.Tensor, weights: torch.Tensor) -> None:
        queries.append(_unrotated(reader, query[:, -last:], end - last).mean(1))
        if layer in _stable(reader.layers):
            given.append(weights.mean((0, 1)))

    reader.forward(cache, tokens, watch=watch, logits_to_keep=1)
    cache.length = length
    return torch.stack(queries), torch.stack(given)


def _unrotated(reader: Reader, rotated: torch.Tensor, first: int) -> torch.Tensor:
    """Queries or keys ``[..., heads, tokens, head_dim]`` that stand at positions from ``first``; fp32."""
    back = -torch.arange(first, first + rotated.shape[-2], device=rotated.device)
    by_token = rotated.transpose(-3, -2)
    return reader.rotation.rotate(by_token, back.expand(by_token.shape[:-2])).transpose(-3, -2)

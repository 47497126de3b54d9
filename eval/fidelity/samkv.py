# SPDX-License-Identifier: Apache-2.0
"""SamKV (arXiv 2508.11661): documents are prefilled alone. A request reads the *ends* of each document (the
first block and the last two) and the middle blocks that fit the question best. The KV of the ends, and of some
other tokens that are read, is recomputed. ``⚠`` marks our choices where the paper leaves a point open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from eval.fidelity.cache import EditableCache, Reader

if TYPE_CHECKING:
    from eval.fidelity.documents import Prompt

#: Arm -> use of recomputed KV: it overwrites old KV, or is mixed with old KV; "": nothing is recomputed.
UPDATES = {
    "samkv": "overwrite",
    "samkv-fusion": "fusion",
    "samkv-select": "",
    "samkv-calibrated": "overwrite",
}
#: Prompts whose documents calibrate the stable layers.
_CALIBRATED_BY = 8


class SamKV(NamedTuple):
    """An arm. With the paper's blocks of 64, documents below 193 tokens have no middle and are read whole. With
    blocks of 16, the ends are about 15% of a 300-token document, the share the paper reads and recomputes."""

    update: str
    block: int = 16
    is_calibrated: bool = False  # whether the stable layers are found by step 5, not assumed


class Profile(NamedTuple):
    """What is stored about a document besides its KV. Blocks are ranges of positions in the prompt."""

    ends: list[int]  # positions of the first block and the last two
    middle: list[range]  # the blocks between the ends
    query: torch.Tensor  # fp32 [layers, heads, head_dim], mean query of the last two blocks
    most: list[int]  # per stable layer: index of the most important middle block (K_max)
    least: list[int]  # per stable layer: index of the least important middle block (K_min)
    outliers: set[int]  # positions of the middle whose :func:`decay` is unusual


def parse(name: str) -> SamKV | None:
    """Parses a name in :data:`UPDATES`, perhaps with ``:BLOCK``; else returns None."""
    kind, colon, block = name.partition(":")
    if kind not in UPDATES or (colon and not (block.isascii() and block.isdigit() and int(block))):
        return None
    arm = SamKV(UPDATES[kind], is_calibrated=kind == "samkv-calibrated")
    return arm._replace(block=int(block)) if colon else arm


def profiles(reader: Reader, prompt: Prompt, block: int, layers: Sequence[int]) -> list[Profile]:
    """The offline step: prefills each document behind the system prompt; sums up its queries and attention in
    the stable ``layers``."""
    cache = reader.cache(1, prompt.ends[-1])
    profiles = []
    reader.forward(cache, prompt.tokens[: prompt.start], logits_to_keep=1)
    for begin, end in pairwise((prompt.start, *prompt.ends)):
        blocks = [range(at, min(at + block, end)) for at in range(begin, end, block)]
        local = (blocks[1:] or blocks)[-2:]
        middle = blocks[1:-2]
        ends = sorted({at for part in (blocks[0], *local) for at in part})
        last = end - local[0].start
        query, weights = _look(reader, cache, prompt.tokens[begin:end], last, layers)
        profile = Profile(ends, middle, query, [], [], set())
        profiles.append(profile)
        for layer in weights[..., prompt.start :] if middle else ():
            alpha, strength = decay(layer)
            strong = _strongest(strength, middle, begin)
            profile.most.append(int(alpha[strong].argmin()))
            profile.least.append(int(strength[strong].argmin()))
            # PauTa rule: alpha is more than 3 sigma from the middle's mean, ⚠ above or below, in any layer.
            inner = alpha[middle[0].start - begin : middle[-1].stop - begin]
            far = (inner - inner.mean()).abs() > 3 * inner.std(correction=0)
            profile.outliers.update((far.nonzero()[:, 0] + middle[0].start).tolist())
    return profiles


def select(
    reader: Reader,
    cache: EditableCache,
    prompt: Prompt,
    profiles: Sequence[Profile],
    layers: Sequence[int],
) -> list[int]:
    """The online step: hides in row 0 the positions that the request does not read; returns what to recompute.
    ⚠ Tokens keep their positions in the whole prompt. Scores use queries and keys before rotation: a profile is
    made before its document has a place in a prompt. As in a server, all layers read the same blocks."""
    end = prompt.ends[-1]
    visible = cache.visible[0]
    visible[prompt.start : end] = False
    visible[[at for profile in profiles for at in profile.ends]] = True
    question = prompt.tokens[end : prompt.answer]
    generic, _ = _look(reader, cache, question, len(question), layers)
    # A document's personalised query adds the other documents' queries to the question's, ⚠ by layer and head.
    local = torch.stack([profile.query for profile in profiles])
    bias = torch.cosine_similarity(generic, local, dim=-1).abs()[..., None] * local
    personal = generic + (bias.sum(0) - bias) / max(len(profiles) - 1, 1)
    # A score is the query times a block's mean key, ⚠ summed over heads. ⚠ The anchor uses the ends' mean key.
    keys = reader.unrotated(cache.keys[list(layers), 0, :, :end], 0)
    asks = personal[:, list(layers)].unflatten(2, (keys.shape[1], -1)).sum(3)
    scores = [keys.new_empty(len(keys), 0)]
    counts = list[int]()
    for ask, profile in zip(asks, profiles, strict=True):
        means = [keys[:, :, list(part)].mean(2) for part in (profile.ends, *profile.middle)]
        anchor, *middle = torch.stack([(ask * mean).sum((1, 2)) for mean in means]).unbind()
        scores.append(torch.stack([anchor, *middle], dim=1)[:, 1:])
        layers = range(len(profile.most))
        extremes = (scores[-1][layers, which] for which in (profile.most, profile.least))
        counts.append(math.ceil(top_p(anchor, *extremes) * len(middle)) if middle else 0)
    # Cross-context filter: the best middle blocks of all documents are read, at most as many as a document
    # has on average. ⚠ Scores are first normalised over all middle blocks, then averaged over layers.
    every = torch.cat(scores, dim=1)
    apart = every - every.mean(1, keepdim=True)
    normal = (apart / apart.norm(dim=1, keepdim=True).clamp(min=1e-6)).mean(0)
    by_document = normal.split([len(profile.middle) for profile in profiles])
    best = [
        (float(score[at]), profile.middle[at])
        for score, profile, count in zip(by_document, profiles, counts, strict=True)
        for at in score.topk(count).indices.tolist()
    ]
    best.sort(key=lambda pair: pair[0], reverse=True)
    kept = {at for _, part in best[: math.ceil(len(normal) / len(profiles))] for at in part}
    visible[sorted(kept)] = True
    # ⚠ KV is recomputed in all layers, but not for the first document, whose KV is that of full prefill.
    again = {at for profile in profiles for at in (*profile.ends, *(profile.outliers & kept))}
    return sorted(at for at in again if at >= prompt.ends[0])


def top_p(anchor: torch.Tensor, most: torch.Tensor, least: torch.Tensor) -> float:
    """Eq. 2: the share of a document's middle blocks to read, averaged over layers. A layer counts as 0 if the
    anchor scores above the most important block, ⚠ and also if it scores no higher than the least important."""
    inside = (least < anchor) & (anchor <= most)
    return float(torch.where(inside, (most - anchor) / (most - least), 0).mean())


def decay(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes attention ``[queries, keys]``. Returns, for each key, alpha and the mean of later tokens'
    attention to the key. This attention falls as ``distance ** -alpha`` (least-squares fit)."""
    at = torch.arange(len(weights), device=weights.device)
    distance = at[:, None] - at
    later = (distance > 0).float()
    count = later.sum(0)
    pair = distance.clamp(min=1).log(), weights.clamp(min=1e-9).log()
    x, y = (later * (log - (later * log).sum(0) / count) for log in pair)
    return -(x * y).sum(0) / x.square().sum(0), (later * weights).sum(0) / count


def fuse(cache: EditableCache, old: EditableCache, positions: Sequence[int]) -> None:
    """Mix new and old KV by their cosine similarity theta: theta * new + (1 - theta) * old. ⚠ KV is mixed after
    all layers were computed. ⚠ Each token, layer and head has its own theta for K and for V."""
    for new, before in ((cache.keys, old.keys), (cache.values, old.values)):
        ours, theirs = (part[..., positions, :].float() for part in (new, before))
        theta = torch.cosine_similarity(ours, theirs, dim=-1)[..., None]
        new[..., positions, :] = (theta * ours + (1 - theta) * theirs).to(new.dtype)


def last_layers(layers: int) -> range:
    """The stable layers (N*) unless they are calibrated: the last eighth of all, as in the paper's models."""
    return range(layers - math.ceil(layers / 8), layers)


def calibrate(reader: Reader, prompts: Sequence[Prompt], block: int) -> list[int]:
    """Step 5: the stable layers, ascending. Each document's most important block is the one with the best mean
    rank over all layers; a layer scores where this block's rank is an outlier. ⚠ The eighth of all layers that
    score least, among the last quarter; of equal ones the last."""
    every = range(reader.layers)
    scores = torch.zeros(reader.layers)
    for prompt in prompts[:_CALIBRATED_BY]:
        cache = reader.cache(1, prompt.ends[-1])
        reader.forward(cache, prompt.tokens[: prompt.start], logits_to_keep=1)
        for begin, end in pairwise((prompt.start, *prompt.ends)):
            middle = [range(at, min(at + block, end)) for at in range(begin, end, block)][1:-2]
            if len(middle) < 2:
                continue
            _, weights = _look(reader, cache, prompt.tokens[begin:end], 1, every)
            scores += outliers(torch.stack([
                _ranks(layer[:, prompt.start :], middle, begin) for layer in weights
            ]))  # fmt: skip
    count = len(last_layers(reader.layers))
    last = sorted(every[-max(count, reader.layers // 4) :], key=lambda at: (float(scores[at]), -at))
    return sorted(last[:count])


def outliers(ranks: torch.Tensor) -> torch.Tensor:
    """Takes ranks of blocks, fp32 ``[layers, blocks]``. Returns fp32 ``[layers]``: 1 where the block with the
    best mean rank has a rank more than 3 sigma from that mean, else 0."""
    of_best = ranks[:, int(ranks.mean(0).argmin())]
    return ((of_best - of_best.mean()).abs() > 3 * of_best.std(correction=0)).float()


def _ranks(weights: torch.Tensor, middle: Sequence[range], begin: int) -> torch.Tensor:
    """The rank of each block of ``middle`` by alpha of its strongest token: 0 for the most important."""
    alpha, strength = decay(weights)
    return alpha[_strongest(strength, middle, begin)].argsort().argsort().float()


def _strongest(strength: torch.Tensor, middle: Sequence[range], begin: int) -> list[int]:
    """For each block of ``middle`` the token to which later tokens attend most, counted from ``begin``. It
    represents the block."""
    parts = [slice(part.start - begin, part.stop - begin) for part in middle]
    return [part.start + int(strength[part].argmax()) for part in parts]


def _look(
    reader: Reader,
    cache: EditableCache,
    tokens: Sequence[int],
    last: int,
    layers: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feeds ``tokens`` behind ``cache``, which does not keep them. Returns the mean unrotated query of the
    last ``last`` tokens, fp32 ``[all layers, heads, head_dim]``, and the attention of ``layers`` averaged
    over heads, ``[layers, tokens, positions]``."""
    queries = list[torch.Tensor]()
    attention = list[torch.Tensor]()
    length = cache.length
    end = length + len(tokens)

    def watch(layer: int, query: torch.Tensor, weights: torch.Tensor) -> None:
        queries.append(reader.unrotated(query[:, -last:], end - last).mean(1))
        if layer in layers:
            attention.append(weights.mean((0, 1)))

    reader.forward(cache, tokens, watch=watch, logits_to_keep=1)
    cache.length = length
    return torch.stack(queries), torch.stack(attention)

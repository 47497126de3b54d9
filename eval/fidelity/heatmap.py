# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.heatmap MODEL RESPONSES`` draws how far the K and V of similar steps are from each
other, for each layer and pair of blocks (figure 3 of the ReasonCache paper), beside blocks of other steps."""

import sys
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch

from eval import command
from eval.command import option
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.responses import OnResponses, Response, pairs_of
from eval.tokenizers import load_tokenizer
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.vocabulary import vocabulary_of
from sglang_reasoncache.kernels.distance import DistanceKernel

#: At most as many pairs of similar blocks are compared with unlike ones.
_OTHERS = 256


@dataclass(frozen=True)
class Options(OnResponses):
    cap: int = option(2600, "most tokens of question and response", least=1)
    block: int = option(8, "tokens of a block", least=1)
    limit: int = option(20, "responses among which the one with most pairs is drawn", least=1)
    as_cached: bool = option(False, "compare keys as cached, as the paper does, not rotated")
    out: Path = option(Path("build/bench/heatmap.png"), "the picture; figures go beside it")


def others(pairs: list[BlockPair], response: Response, block: int) -> list[BlockPair]:
    """Each block with the earlier block that is about as far away as its similar one, and has hardly a token in
    common with it: fewer than a quarter, at any place. A block without such a block is left out."""
    starts = range(response.prompt, len(response.tokens) - block + 1)
    bags = {start: Counter(response.tokens[start : start + block]) for start in starts}
    made = []
    for pair in pairs[:_OTHERS]:
        bag = bags[pair.dst_start]
        unlike = (
            start
            for start in range(response.prompt, pair.dst_start - block + 1)
            if (bag & bags[start]).total() < block / 4
        )
        nearest = min(unlike, key=lambda start: abs(start - pair.src_start), default=None)
        if nearest is not None:
            made.append(BlockPair(pair.dst_start, nearest))
    return made


def distances(
    reader: Reader, cache: EditableCache, pairs: list[BlockPair], block: int, rotates: bool
) -> np.ndarray:
    """Distances of K and of V of each pair in each layer, fp64 ``[layers, 2, pairs]``: the norm of the
    difference divided by the root mean square of the norms of the two blocks."""
    at = torch.tensor(pairs).T[..., None] + torch.arange(block)
    dst, src = at.to(reader.device)
    length = torch.arange(cache.length, device=reader.device)
    layers = [
        (
            keys[0, :, length].transpose(0, 1).contiguous(),
            values[0, :, length].transpose(0, 1).contiguous(),
        )
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]
    rotation = reader.rotation if rotates else None
    shift = (dst - src).int() if rotates else None
    apart = DistanceKernel(layers, rotation, backend="torch").squares(dst, src, shift)
    norms = [
        [
            sum(part[places].float().square().sum((1, 2, 3)) for places in (dst, src)) / 2
            for part in layer
        ]
        for layer in layers
    ]
    sizes = torch.stack([torch.stack(layer) for layer in norms]).double()
    ratios: np.ndarray = (apart.permute(1, 2, 0) / sizes).sqrt().cpu().numpy()
    return ratios


def draw(similar: np.ndarray, unlike: np.ndarray, path: Path, title: str) -> None:
    """Write the heat maps: K above V, similar pairs left, unlike pairs right, a row for each layer."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for row, part in enumerate("KV"):
        for column, (name, shown) in enumerate(
            (("similar steps", similar), ("unlike blocks as far apart", unlike))
        ):
            axis = axes[row][column]
            image = axis.imshow(shown[:, row], aspect="auto", vmin=0, vmax=1.5, cmap="viridis")
            axis.set(title=f"{part}, {name}", xlabel="pair of blocks", ylabel="layer")
    figure.colorbar(image, ax=axes, label="distance / norm")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def work(options: Options) -> list[dict[str, Any]]:
    """Draw the response with most pairs, often a looping one; print and return the median distances of each
    layer. Raises ValueError if no response has similar steps."""
    tokenizer = load_tokenizer(str(options.model), local=True)
    vocabulary = vocabulary_of(tokenizer)
    pairs: list[BlockPair] = []
    drawn: Response | None = None
    for response in islice(options.read(tokenizer), options.limit):
        candidates = pairs_of(response, vocabulary, options.block)
        if len(candidates) > len(pairs):
            pairs = candidates
            drawn = response
    if drawn is None:
        raise ValueError(f"{options.responses}: no response with similar steps of --block tokens")
    unlike = others(pairs, drawn, options.block)
    if not unlike:
        raise ValueError(f"{options.responses}: {drawn.name} has no blocks that differ from others")
    reader = options.reader()
    cache = reader.cache(1, len(drawn.tokens))
    reader.prefill(cache, drawn.tokens)
    similar, other = (
        distances(reader, cache, some, options.block, not options.as_cached)
        for some in (pairs, unlike)
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(similar, other, options.out, f"{drawn.name}: blocks of {options.block} tokens")
    rows = [
        {"layer": layer}
        | {
            f"{part} {name}": round(float(np.median(apart[layer, at])), 3)
            for at, part in enumerate("KV")
            for name, apart in (("similar", similar), ("other", other))
        }
        for layer in range(reader.layers)
    ]
    frame = pd.DataFrame(rows)
    frame.to_csv(options.out.with_suffix(".csv"), index=False)
    # The k-th pair is near if K and V are nearer than the median of other blocks, in every layer.
    bounds = np.median(other, axis=2, keepdims=True)
    near = int((similar < bounds).all((0, 1)).sum())
    print(frame.to_markdown(index=False), file=sys.stdout)
    print(
        f"\n{drawn.name}: {near} of {len(pairs)} pairs of similar blocks are nearer than the median pair of "
        "unlike blocks, K and V, in every layer; of the responses read, this one has most pairs\n"
        f"wrote {options.out}"
    )
    return rows


if __name__ == "__main__":
    command.run(Options, work)

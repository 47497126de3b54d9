# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.bound MODEL RESPONSES`` compares how much shared blocks change attention with what
theorem 1 of the ReasonCache paper allows. Each layer gets the queries that it has without sharing.

Where keys k_j are replaced by keys at distance eps_j and values v_j by values at distance delta_j, the theorem
bounds the change of a query's attention weights (L1) by ``W = sum_j |q| eps_j / sqrt(d)`` and the change of its
output by ``max_j delta_j + W max_j |v_j|``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eval import command
from eval.command import option
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.responses import OnResponses, pairs_of
from eval.tokenizers import load_tokenizer
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.vocabulary import vocabulary_of

FIGURES = ("weights", "weights_bound", "output", "output_bound")


@dataclass(frozen=True)
class Options(OnResponses):
    block: int = option(8, "tokens of a block", least=1)
    queries: int = option(32, "last tokens of a response whose attention is compared", least=1)
    limit: int = option(5, "responses with similar steps that are read", least=1)
    as_cached: bool = option(False, "read keys as cached, as the paper does, not rotated")
    out: Path = option(Path("build/bench/bound.csv"), "CSV file of the figures")


def changes(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    scale: float | None = None,
) -> dict[str, torch.Tensor]:
    """What replacing K and V changes, and the theorem's bounds. All fp32 ``[heads, tokens]``.

    Args:
        query: ``[heads, tokens, head_dim]``.
        keys, values: before and after, ``[KV heads, positions, head_dim]`` each.
        visible: bool ``[tokens, positions]``.
        scale: Logits are multiplied by it; None for ``head_dim ** -0.5``, as in the theorem.
    """
    groups = len(query) // len(keys[0])
    scale = scale or query.shape[-1] ** -0.5
    k, new_k, v, new_v = (
        part.float().repeat_interleave(groups, dim=0) for part in (*keys, *values)
    )
    q = query.float()
    before, after = (
        (q @ part.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1) for part in (k, new_k)
    )
    # Positions that a query does not see count neither as replaced nor as values.
    apart = torch.where(visible, (k - new_k).norm(dim=-1)[:, None], 0.0)
    far = torch.where(visible, (v - new_v).norm(dim=-1)[:, None], 0.0)
    sizes = torch.where(visible, v.norm(dim=-1)[:, None], 0.0)
    weights_bound = q.norm(dim=-1) * apart.sum(-1) * scale
    return {
        "weights": (before - after).abs().sum(-1),
        "weights_bound": weights_bound,
        "output": (before @ v - after @ new_v).norm(dim=-1),
        "output_bound": far.amax(-1) + weights_bound * sizes.amax(-1),
    }


def measure(
    reader: Reader,
    tokens: Sequence[int],
    pairs: Sequence[BlockPair],
    block: int,
    queries: int,
    rotates: bool,
) -> list[dict[str, torch.Tensor]]:
    """For each layer the :func:`changes` of the last ``queries`` tokens, where the first block of each pair
    reads the second. Each pair ends before these tokens."""
    split = len(tokens) - queries
    layers = list[dict[str, torch.Tensor]]()
    cache: EditableCache = reader.cache(2, len(tokens))
    reader.prefill(cache, tokens[:split])
    shared = cache.branch()
    cache.rows = 1
    for pair in pairs:
        reads = [(pair.dst_start + at, pair.src_start + at) for at in range(block)]
        # From the row without sharing: pairs do not build on each other.
        cache.redirect(shared, reads, reader.rotation if rotates else None, (cache, 0))
    at = torch.arange(len(tokens), device=reader.device)
    visible = at <= at[split:, None]

    def watch(layer: int, query: torch.Tensor, _: torch.Tensor) -> None:
        keys = cache.keys[layer]
        values = cache.values[layer]
        for part in (keys, values):
            part[shared, :, split:] = part[0, :, split:]
        layers.append(
            changes(
                query, (keys[0], keys[shared]), (values[0], values[shared]), visible, reader.scaling
            )
        )

    reader.forward(cache, tokens[split:], watch=watch, logits_to_keep=1)
    return layers


def work(options: Options) -> list[dict[str, Any]]:
    """Measure, print a table, write it, and return its rows. Raises ValueError if no step is similar."""
    tokenizer = load_tokenizer(str(options.model), local=True)
    vocabulary = vocabulary_of(tokenizer)
    reader = None
    names = list[str]()
    layers: list[dict[str, list[torch.Tensor]]] = []
    for response in options.read(tokenizer):
        if len(names) == options.limit:
            break
        last = len(response.tokens) - options.queries - options.block
        # No distance is measured, so blocks share that the paper's second stage would refuse.
        pairs = [
            pair for pair in pairs_of(response, vocabulary, options.block) if pair.dst_start <= last
        ]
        if not pairs:
            continue
        reader = reader or options.reader()
        sizes = options.block, options.queries, not options.as_cached
        measured = measure(reader, response.tokens, pairs, *sizes)
        layers = layers or [{name: [] for name in FIGURES} for _ in measured]
        for sums, layer in zip(layers, measured, strict=True):
            for name in FIGURES:
                sums[name].append(layer[name].flatten())
        names.append(response.name)
        print(f"{response.name}: {len(pairs)} pairs", file=sys.stderr, flush=True)
    if not names:
        raise ValueError(f"{options.responses}: no response with similar steps of --block tokens")
    rows = []
    for number, sums in enumerate(layers):
        joined = {name: torch.cat(parts) for name, parts in sums.items()}
        row: dict[str, Any] = {"layer": number}
        for name in ("weights", "output"):
            change = joined[name]
            bound = joined[f"{name}_bound"]
            row[f"{name}, median"] = round(float(change.median()), 5)
            row[f"{name}, most"] = round(float(change.max()), 5)
            row[f"{name}, median bound"] = round(float(bound.median()), 3)
            # Rounding of fp32 alone may exceed a bound of 0.
            row[f"{name}, within"] = round(float((change <= bound + 1e-4).float().mean()), 4)
        rows.append(row)
    frame = pd.DataFrame(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(options.out, index=False)
    print(f"{frame.to_markdown(index=False)}\n\n{len(names)} responses, wrote {options.out}")
    return rows


if __name__ == "__main__":
    command.run(Options, work)

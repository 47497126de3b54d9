# SPDX-License-Identifier: Apache-2.0
"""What plans of recorded responses would hold: runs of equal rotation, and rotations a tile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.bench.filter import tokenized
from eval.jsonl import texts_of
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.config import ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import TILE


def rotations_of(traces: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By the stem of each JSONL file, at the end of its responses, every proposed block shared:
    ``runs``, quartiles of their lengths in tokens, and ``weighted``, likewise, of the run that a shared
    position lies in; ``a_tile``, mean rotations, and ``most``, their 95th percentile; ``shared``, of
    all positions. By the default settings, over a BPE of the file's own. Raises OSError,
    ValueError: a file that cannot be read, or with nothing to share."""
    config = ReasonCacheConfig()
    rule = filter_config(config, config.block, 1)
    found = {}
    for path in traces:
        vocabulary, streams = tokenized(texts_of([path]))
        classes, runs, tiles, shared = TokenClasses(vocabulary), [], [], 0
        for tokens in filter(None, streams):
            request, row = RequestFilter(rule, classes, vocabulary, 0), HostRow()
            row.locate(0, range(1, len(tokens) + 1))
            for proposal in request.push(tokens):
                for dst, src in proposal.pairs:
                    row.read(dst, src, rule.block, row, [])
            slots = row.between(0, len(tokens)) - 1
            by = np.arange(len(tokens)) - slots
            shared += int(np.count_nonzero(by))
            ends = np.append(np.flatnonzero(np.diff(by)), len(by) - 1)
            runs.append(np.diff(ends, prepend=-1)[by[ends] != 0])
            tiles.append(_rotations_a_tile(slots))
        if not shared:
            raise ValueError(f"{path}: nothing is shared")
        lengths, every = np.concatenate(runs), np.concatenate(tiles)
        found[path.stem] = {
            "responses": len(streams),
            "shared": shared / sum(map(len, streams)),
            "runs": np.percentile(lengths, (25, 50, 75)).tolist(),
            "weighted": np.percentile(lengths.repeat(lengths), (25, 50, 75)).tolist(),
            "a_tile": float(every.mean()),
            "most": float(np.percentile(every, 95)),
        }
    return found


def _rotations_a_tile(slots: np.ndarray) -> np.ndarray:
    count = len(slots)
    where = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
    cached_at = torch.arange(count, dtype=torch.int32)
    row = torch.from_numpy(slots).int()[None]
    plan = plan_rows(row, *where, cached_at, num_slots=count, merge=True)
    tiles = -(-len(plan.kv_indices) // TILE)
    if plan.rotations is None:
        return np.zeros(tiles, dtype=np.int64)
    # A list's first is of keys as cached.
    return (plan.rotations.tile_ptr[: tiles + 1].diff() - 1).clamp_(min=0).numpy()

# SPDX-License-Identifier: Apache-2.0
"""Named rules: rows of the papers' tables as values of the operator's settings.

Every value is a field of ``ReasonCacheConfig``. At percentile 100 no distance decides, so there
is nothing to warm up for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# New blocks of 16 tokens read the slots of similar earlier steps at once; a percentile of the
# distances decides.
_PAPER: dict[str, object] = {
    "match": "steps",
    "direction": "oldest",
    "min_age": 0,
    "block": 16,
    "percentile": 80.0,
    "warmup": 128,
}
# Plain cosine over a constant, no structure check, k-th block with k-th block, and
# the same percentile rule on distances.
_MEMSHARE: dict[str, object] = {
    **_PAPER,
    "length_factor": False,
    "use_structure": False,
    "align": "index",
}
_ALL: dict[str, object] = {**_PAPER, "percentile": 100.0, "warmup": 0}

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # The defaults: equal runs, old blocks read the newest copy.
        "newest": {},
        # Cosine with length factor, dynamic threshold, structure, distance at p = 80.
        "reasoncache": _PAPER,
        # The earlier paper, at its two thresholds.
        "memshare": {**_MEMSHARE, "fixed_tau": 0.8},
        "memshare-0.9": {**_MEMSHARE, "fixed_tau": 0.9},
        # Stage by stage: lexical similarity alone; with structure; `reasoncache` is all three.
        "cosine": {**_ALL, "use_structure": False},
        "cosine-structure": _ALL,
        # The percentile of the distance threshold.
        "p20": {**_PAPER, "percentile": 20.0},
        "p50": {**_PAPER, "percentile": 50.0},
        "p80": _PAPER,
        "p100": _ALL,
        # A constant in place of the dynamic lexical threshold, all else ReasonCache.
        "fixed-0.8": {**_PAPER, "fixed_tau": 0.8},
        "fixed-0.9": {**_PAPER, "fixed_tau": 0.9},
        # Other encoders of a step.
        "sentence-bert": {**_PAPER, "encoder": "sentence-bert"},
        "embedding": {**_PAPER, "encoder": "embedding"},
        # Another distance between blocks.
        "cosine-distance": {**_PAPER, "distance": "cosine"},
        # No stage at all: what careless sharing costs.
        "random": {**_ALL, "use_structure": False, "random_ratio": 0.3},
    }
)

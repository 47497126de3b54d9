# SPDX-License-Identifier: Apache-2.0
"""Named rules: rows of the papers' tables as fields of ``ReasonCacheConfig``, where they differ
from its defaults, and always the percentile. At percentile 100 no distance decides, so there is
nothing to warm up for."""

from __future__ import annotations

from collections.abc import Mapping

# Plain cosine over a constant, no structure check, k-th block with k-th block.
_MEMSHARE: dict[str, object] = {
    "percentile": 80.0,
    "length_factor": False,
    "use_structure": False,
    "align": "index",
}
_ALL: dict[str, object] = {"percentile": 100.0, "warmup": 0}

PRESETS: Mapping[str, Mapping[str, object]] = {
    # Cosine with length factor, dynamic threshold, structure, distance at p = 80.
    "reasoncache": {"percentile": 80.0},
    "memshare": {**_MEMSHARE, "fixed_tau": 0.8},
    "memshare-0.9": {**_MEMSHARE, "fixed_tau": 0.9},
    # Stage by stage: lexical similarity alone; with structure; `reasoncache` is all three.
    "cosine": {**_ALL, "use_structure": False},
    "cosine-structure": _ALL,
    "p20": {"percentile": 20.0},
    "p50": {"percentile": 50.0},
    "p80": {"percentile": 80.0},
    "p100": _ALL,
    # A constant in place of the dynamic lexical threshold, all else ReasonCache.
    "fixed-0.8": {"percentile": 80.0, "fixed_tau": 0.8},
    "fixed-0.9": {"percentile": 80.0, "fixed_tau": 0.9},
    "sentence-bert": {"percentile": 80.0, "encoder": "sentence-bert"},
    "embedding": {"percentile": 80.0, "encoder": "embedding"},
    "cosine-distance": {"percentile": 80.0, "distance": "cosine"},
    # No stage at all: what careless sharing costs.
    "random": {**_ALL, "use_structure": False, "random_ratio": 0.3},
}

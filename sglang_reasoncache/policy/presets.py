# SPDX-License-Identifier: Apache-2.0
"""Named rules: rows of the papers' tables as values of the knobs.

Every value is a field of :class:`FilterConfig` but ``percentile``, which is
the adaptive threshold's. A preset names only what differs from the defaults of
``FilterConfig`` and from percentile 80, and always the percentile.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # ReasonCache: cosine with length factor, dynamic threshold, structure, PAT.
        "reasoncache": {"percentile": 80.0},
        # MemShare: plain cosine over a fixed 0.8, no structure check, k-th block
        # with k-th block, the same percentile rule on distances.
        "memshare": {
            "percentile": 80.0,
            "fixed_tau": 0.8,
            "length_factor": False,
            "use_structure": False,
            "align": "index",
        },
        # Ablation of ReasonCache: lexical similarity alone.
        "cosine": {"percentile": 100.0, "use_structure": False},
        # Ablation: lexical similarity and structure, no distance.
        "cosine-structure": {"percentile": 100.0},
        # Ablation: no stage at all.
        "random": {"percentile": 100.0, "use_structure": False, "random_ratio": 0.3},
    }
)

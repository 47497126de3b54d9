# SPDX-License-Identifier: Apache-2.0
"""Settings of the filter that finds blocks to share, and presets (named sets of settings). Most presets are
methods that the ReasonCache paper or the MemShare paper compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sglang_reasoncache.filter.structure import Limits

#: How blocks of similar steps are paired: see ``align_blocks`` and, for ``nearest``, ``alternatives_of``.
AlignMode = Literal["tokens", "index", "nearest"]

# Settings of the ReasonCache paper, except ``align`` and ``positions``. A block shares as soon as its pair is
# found, if the KV distance of the pair is at most the 80th percentile of all distances measured so far.
_PAPER: dict[str, object] = dict(
    match="steps",
    direction="oldest",
    min_age=0,
    block=16,
    percentile=80.0,
    warmup=128,
    when="always",
)
_ALL = {**_PAPER, "percentile": 100.0, "warmup": 0}  # accepts every KV distance from the start
# MemShare compares steps only by the cosine of their token counts. Of the blocks of similar steps it pairs
# those with the least KV distance; no distance is too large, and there is no warm-up.
_MEMSHARE = {**_ALL, "length_factor": False, "use_structure": False, "align": "nearest"}

PRESETS: Mapping[str, Mapping[str, object]] = {
    # The defaults: blocks of repeated tokens share, and older blocks read the slots of the newest equal block.
    "newest": {},
    # All checks of ReasonCache: similarity of token counts, equal mathematics and code, KV distance.
    "reasoncache": _PAPER,
    "memshare": {**_MEMSHARE, "fixed_tau": 0.8},
    "memshare-0.9": {**_MEMSHARE, "fixed_tau": 0.9},
    # The first check of ReasonCache alone, then the first two checks. `reasoncache` adds the distance.
    "cosine": {**_ALL, "use_structure": False},
    "cosine-structure": _ALL,
    "p20": {**_PAPER, "percentile": 20.0},
    "p50": {**_PAPER, "percentile": 50.0},
    "p80": _PAPER,
    "p100": _ALL,
    # ReasonCache with a constant in place of the dynamic lexical threshold.
    "fixed-0.8": {**_PAPER, "fixed_tau": 0.8},
    "fixed-0.9": {**_PAPER, "fixed_tau": 0.9},
    # Random pairs of blocks share without being compared, to show what careless sharing costs.
    "random": {**_ALL, "use_structure": False, "random_ratio": 0.3},
}


#: Where steps are cut by default (``max_step_tokens``): with ``match="runs"``, and otherwise.
LONGEST_OF_RUNS = 128
LONGEST_STEP = 1024


@dataclass(frozen=True)
class FilterConfig:
    """The settings of the filter. Except for ``align``, the defaults follow the ReasonCache paper.

    Most fields are settings of ``ReasonCacheConfig``, which has their bounds and help texts. ``strict`` and
    ``soft`` are named ``tau_strict`` and ``tau_soft`` there. Comments below explain the other fields.
    """

    strict: float = 0.9
    soft: float = 0.7
    fixed_tau: float | None = None
    length_factor: bool = True
    use_structure: bool = True
    structure_tolerance: int = 0
    #: A step's formulas and code are compared with those of at most this many earlier steps, the most similar.
    max_structure_checks: int = 64
    match: Literal["steps", "runs"] = "steps"
    direction: Literal["newest", "oldest"] = "oldest"
    #: Whether blocks of a response may read blocks of its prompt (``match="runs"``).
    reads_prompt: bool = False
    min_age: int = 0
    min_run: int = 1
    block: int = 16
    align: AlignMode = "tokens"
    max_step_tokens: int | None = None
    max_history_steps: int = 2048
    max_candidates: int = 4  # earlier steps with which one step may be paired
    max_blocks_per_step: int = 256  # block pairs proposed for one step, alternatives included
    random_ratio: float | None = None
    limits: Limits = field(default_factory=Limits)  # bounds for comparing formulas and code

    @property
    def longest_step(self) -> int:
        """``max_step_tokens``, or its default. What finds equal runs compares what is new whenever a step ends,
        and needs no whole steps."""
        runs = self.match == "runs" and self.random_ratio is None
        return self.max_step_tokens or max(LONGEST_OF_RUNS if runs else LONGEST_STEP, self.block)

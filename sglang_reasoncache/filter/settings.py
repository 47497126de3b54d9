# SPDX-License-Identifier: Apache-2.0
"""Settings of the filter, and presets: named sets of values, such as the variants that the papers compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sglang_reasoncache.filter.structure import Limits

#: How blocks of two similar steps are paired; see ``align_blocks``.
AlignMode = Literal["tokens", "index"]

# The ReasonCache paper, except ``align``: new blocks of 16 tokens immediately read blocks of similar earlier
# steps, if the KV distance of a pair is at most the given percentile of all distances measured so far.
_PAPER: dict[str, object] = dict(
    match="steps",
    direction="oldest",
    min_age=0,
    block=16,
    percentile=80.0,
    warmup=128,
    when="always",
)
# The MemShare paper compares the cosine with a constant, ignores structure, and pairs blocks by index.
_MEMSHARE = {**_PAPER, "length_factor": False, "use_structure": False, "align": "index"}
# All distances pass, so their percentile needs no warm-up.
_ALL = {**_PAPER, "percentile": 100.0, "warmup": 0}

PRESETS: Mapping[str, Mapping[str, object]] = {
    # The defaults: blocks in equal runs of tokens may share, and older blocks read the newest equal block.
    "newest": {},
    # Cosine with length factor, dynamic threshold, structure, distance at p = 80.
    "reasoncache": _PAPER,
    "memshare": {**_MEMSHARE, "fixed_tau": 0.8},
    "memshare-0.9": {**_MEMSHARE, "fixed_tau": 0.9},
    # ReasonCache by stages: lexical similarity, then structure too. `reasoncache` adds the distance.
    "cosine": {**_ALL, "use_structure": False},
    "cosine-structure": _ALL,
    "p20": {**_PAPER, "percentile": 20.0},
    "p50": {**_PAPER, "percentile": 50.0},
    "p80": _PAPER,
    "p100": _ALL,
    # ReasonCache with a constant in place of the dynamic lexical threshold.
    "fixed-0.8": {**_PAPER, "fixed_tau": 0.8},
    "fixed-0.9": {**_PAPER, "fixed_tau": 0.9},
    # Random pairs pass without any check, to show what careless sharing costs.
    "random": {**_ALL, "use_structure": False, "random_ratio": 0.3},
}


@dataclass(frozen=True)
class FilterConfig:
    """Everything that decides which blocks are proposed. Defaults are the ReasonCache paper's except ``align``.

    Most fields are settings of ``ReasonCacheConfig``, which has their bounds and help texts. ``strict`` and
    ``soft`` are named ``tau_strict`` and ``tau_soft`` there. The other fields are explained here.

    Raises:
        ValueError: ``page_size`` is above 1 and ``block`` differs from it.
    """

    strict: float = 0.9
    soft: float = 0.7
    fixed_tau: float | None = None
    length_factor: bool = True
    use_structure: bool = True
    structure_tolerance: int = 0
    #: At most this many candidates of a step have their structure compared, the most similar ones first.
    max_structure_checks: int = 64
    match: Literal["steps", "runs"] = "steps"
    direction: Literal["newest", "oldest"] = "oldest"
    min_age: int = 0
    min_run: int = 1
    block: int = 16
    page_size: int = 1  # above 1, blocks are whole pages, and ``block`` equals ``page_size``
    align: AlignMode = "tokens"
    max_step_tokens: int = 1024
    max_history_steps: int = 2048
    max_candidates: int = 4  # earlier steps with which one step may be paired
    max_blocks_per_step: int = 256  # block pairs proposed for one step
    random_ratio: float | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.page_size > 1 and self.block != self.page_size:
            raise ValueError(
                f"--reasoncache-block must equal the page size {self.page_size} above 1, "
                f"got {self.block}"
            )

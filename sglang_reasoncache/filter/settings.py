# SPDX-License-Identifier: Apache-2.0
"""Knobs of the step filter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sglang_reasoncache.filter.align import AlignMode
from sglang_reasoncache.filter.structure.tree import Limits, require_zss


@dataclass(frozen=True)
class FilterConfig:
    """Everything that decides which blocks are proposed. Defaults: ReasonCache's.

    Most are settings of ``ReasonCacheConfig``, which bounds and explains them: ``strict`` and
    ``soft`` are its ``tau_strict`` and ``tau_soft``. The others:

    Attributes:
        max_structure_checks: candidates per step whose structure is compared, most similar
            first; the others are left out.
        page_size: above 1, blocks are whole pages and ``block`` equals it.
        max_candidates: earlier steps that one step may take blocks from.
        max_blocks_per_step: block pairs proposed for one step.
        encoder: one of ``filter.encoder.ENCODERS``.
        seed: of the random pairs.
        limits: bounds of reading structure.

    Raises:
        ValueError: a block that is not the page.
        RuntimeError: a structure tolerance without the package ``zss``.
    """

    strict: float = 0.9
    soft: float = 0.7
    fixed_tau: float | None = None
    length_factor: bool = True
    use_structure: bool = True
    structure_tolerance: int = 0
    max_structure_checks: int = 64
    match: Literal["steps", "runs"] = "steps"
    direction: Literal["newest", "oldest"] = "oldest"
    min_age: int = 0
    min_run: int = 1
    block: int = 16
    page_size: int = 1
    align: AlignMode = "tokens"
    max_step_tokens: int = 1024
    max_history_steps: int = 2048
    max_candidates: int = 4
    max_blocks_per_step: int = 256
    encoder: str = "tokens"
    random_ratio: float | None = None
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.page_size > 1 and self.block != self.page_size:
            raise ValueError(
                f"--reasoncache-block must equal the page size {self.page_size} above 1, "
                f"got {self.block}"
            )
        if self.use_structure and self.structure_tolerance > 0:
            require_zss()

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

    ``ReasonCacheConfig`` bounds what an operator sets of it.

    Attributes:
        strict: upper end of the dynamic lexical threshold, 0 to 1.
        soft: lower end, at most ``strict``.
        fixed_tau: a constant lexical threshold instead (MemShare: 0.8).
        length_factor: multiply the cosine with the ratio of lengths.
        use_structure: compare formal content.
        structure_tolerance: largest tree edit distance of formal content.
        max_structure_checks: candidates per step whose structure is compared, most similar
            first; the others are left out.
        match: ``steps``: blocks of similar steps (the papers); ``runs``: equal runs anywhere.
        direction: of two equal blocks the ``newest`` keeps its slots, or the ``oldest`` (the
            papers).
        min_age: tokens that a block must lie behind the end before it reads foreign slots.
        block: tokens per block.
        page_size: above 1, blocks are whole pages and ``block`` equals it.
        align: ``tokens`` or ``index``, see :func:`align_blocks`.
        max_step_tokens: a longer step is cut.
        max_history_steps: earlier steps that can be candidates.
        max_candidates: earlier steps that one step may take blocks from.
        max_blocks_per_step: block pairs proposed for one step.
        encoder: one of ``filter.encoder.ENCODERS``.
        random_ratio: probability with which a block is paired with a random earlier one,
            nothing else being compared; an ablation. None: off.
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

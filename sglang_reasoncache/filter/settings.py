# SPDX-License-Identifier: Apache-2.0
"""Knobs of the step filter."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_reasoncache.filter.align import ALIGN_MODES, AlignMode
from sglang_reasoncache.filter.encoder import ENCODERS
from sglang_reasoncache.filter.structure import Limits
from sglang_reasoncache.filter.structure.tree import require_zss

# Fields whose command-line flag has another name.
_FLAGS = {"strict": "tau-strict", "soft": "tau-soft"}


@dataclass(frozen=True)
class FilterConfig:
    """Everything that decides which blocks are proposed. Defaults: ReasonCache's.

    Attributes:
        strict: upper end of the dynamic lexical threshold, 0 to 1.
        soft: lower end, at most ``strict``.
        fixed_tau: a constant lexical threshold instead (MemShare: 0.8).
        length_factor: multiply the cosine with the ratio of lengths.
        use_structure: compare formal content.
        structure_tolerance: largest tree edit distance of formal content; above
            0 the package ``zss`` is needed.
        max_structure_checks: candidates per step whose structure is compared,
            most similar first; the others are dropped.
        block: tokens per block.
        page_size: above 1, blocks are whole pages and ``block`` equals it.
        align: ``tokens`` or ``index``, see :func:`align_blocks`.
        max_step_tokens: a longer step is cut.
        max_history_steps: earlier steps that can be candidates.
        max_candidates: earlier steps that one step may take blocks from.
        max_blocks_per_step: block pairs proposed for one step.
        encoder: what similarity compares: counts of ``tokens``, or vectors of
            ``embedding`` or ``sentence-bert``, for which :class:`RequestFilter`
            takes a :class:`StepEncoder`; the latter two are ablations.
        random_ratio: probability with which a block is paired with a random
            earlier one, nothing else being looked at; an ablation. None: off.
        seed: of the random pairs.
        limits: bounds of reading structure.

    Raises:
        ValueError: a value out of its bound; names flag, bound and value.
        RuntimeError: a structure tolerance without ``zss``.
    """

    strict: float = 0.9
    soft: float = 0.7
    fixed_tau: float | None = None
    length_factor: bool = True
    use_structure: bool = True
    structure_tolerance: int = 0
    max_structure_checks: int = 64
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
        self._between("strict", 0, 1)
        self._between("soft", 0, self.strict)
        if self.fixed_tau is not None:
            self._between("fixed_tau", 0, 1)
        if self.random_ratio is not None:
            self._between("random_ratio", 0, 1)
        self._between("structure_tolerance", 0, 1000)
        for name, high in (
            ("max_structure_checks", 1 << 20),
            ("block", 1 << 16),
            ("page_size", 1 << 16),
            ("max_step_tokens", 1 << 16),
            ("max_history_steps", 1 << 20),
            ("max_candidates", 1 << 16),
            ("max_blocks_per_step", 1 << 16),
        ):
            self._between(name, 1, high)
        if self.page_size > 1 and self.block != self.page_size:
            raise ValueError(
                f"--reasoncache-block must equal the page size {self.page_size} above 1, "
                f"got {self.block}"
            )
        if self.align not in ALIGN_MODES:
            raise ValueError(
                f"--reasoncache-align must be one of {', '.join(ALIGN_MODES)}, got {self.align!r}"
            )
        if self.encoder not in ENCODERS:
            raise ValueError(
                f"--reasoncache-encoder must be one of {', '.join(ENCODERS)}, got {self.encoder!r}"
            )
        if self.use_structure and self.structure_tolerance > 0:
            require_zss()

    def _between(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        # A NaN compares false with everything, so it fails here as well.
        if not low <= value <= high:
            flag = _FLAGS.get(name, name.replace("_", "-"))
            raise ValueError(
                f"--reasoncache-{flag} must be between {low} and {high}, got {value!r}"
            )

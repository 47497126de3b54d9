# SPDX-License-Identifier: Apache-2.0
"""One frozen record of everything an operator can set.

The command line, ``sglang.Engine`` keyword arguments and the scheduler all read
this record; defaults live here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_reasoncache import registry
from sglang_reasoncache.filter.encoder import ENCODER_BOUND, EncoderChoice
from sglang_reasoncache.filter.presets import PRESETS
from sglang_reasoncache.registry import PolicyChoice, PolicyError

PRESET_NAMES = tuple(PRESETS)


_POLICY_BOUND = "NAME[:key=value,...][+NAME...]"


def flag_of(field: str) -> str:
    """Command-line spelling of a config field: ``block`` -> ``--reasoncache-block``."""
    return "--reasoncache-" + field.replace("_", "-")


class ConfigError(ValueError):
    """A flag of ours has a bad value; the message names flag, bound and value."""

    def __init__(self, field: str, bound: str, value: object) -> None:
        super().__init__(f"{flag_of(field)} must be {bound}, got {value!r}")
        self.field = field


@dataclass(frozen=True)
class ReasonCacheConfig:
    """Operator's settings. Raises :class:`ConfigError` for a value out of bounds.

    Attributes:
        policy: What is done with rows: ``NAME[:key=value,...][+NAME...]``; see
            docs/policies.md. ``none`` leaves them alone.
        preset: Named set of values for sharing; explicit flags win over it.
        block: Tokens per shared block (d in the ReasonCache paper, section on
            block distance). At page size > 1 the page is the block.
        percentile: p of the percentile-based adaptive threshold, in percent.
            0 shares nothing, 100 everything that stage 1 lets through.
        warmup: Distances observed before the first block may be shared.
        tau_strict: Upper end of the dynamic lexical threshold.
        tau_soft: Lower end of the dynamic lexical threshold.
        length_factor: Multiply the cosine with the ratio of step lengths.
        use_structure: Require equal formal content where both steps have some.
        fixed_tau: Constant lexical threshold instead of the dynamic one.
        structure_tolerance: Largest tree edit distance of formal content.
        positions: ``corrected`` rotates a shared key to the position where it
            is used; ``as-cached`` leaves it as written (the papers' behaviour);
            ``auto`` is ``corrected`` where the attention backend can do it.
        align: ``tokens`` pairs blocks of equal tokens; ``index`` pairs the k-th
            block of a step with the k-th of the other (the papers' behaviour).
        publish: What a finished request leaves in the prefix cache: its
            ``exact`` prefix, or all of it with ``aliased`` nodes.
        apply: ``alias`` shares; ``copy`` writes the shared K and V into the
            request's own slots instead. It saves nothing and exists to verify.
        admission_credit: Largest share of a request's estimated future output
            that admission may count as shared before it is. 0 leaves admission
            as SGLang's: no credit, and no new attempt when sharing frees slots.
        calibration: JSON file that keeps the distance histogram across
            restarts. Without it, a ``reasoncache_calibration.json`` beside the
            model's weights is read when there is one.
        random_ratio: Redirect this share of blocks to random earlier ones and
            look at nothing else; an experiment, set by the ``random`` preset.
        half_life: Distances after which an observed one counts half in the
            percentile; 0 never forgets.
        distance: ``euclidean`` (ReasonCache) or ``cosine`` between the K and V
            of two blocks; the latter is an ablation.
        encoder: What the similarity of two steps compares: counts of ``tokens``
            (ReasonCache), their mean ``embedding`` in the model's own embedding
            layer, or ``sentence-bert[:MODEL]``; the latter two are ablations.
        span: Tokens that may share: the ``reasoning`` part that
            ``--reasoning-parser`` marks, or the whole ``response``. ``auto`` is
            ``reasoning`` where a parser is set.
        max_pending: Finished steps that may wait for comparison; beyond, new ones
            are not looked at (counted as ``steps_shed``).
        max_step_tokens: A step longer than this is cut there.
        max_history_steps: Earlier steps compared with a new one.
        allow_untested_sglang: Start on an SGLang version we did not test.
    """

    policy: str = "reasoncache"
    preset: str = "reasoncache"
    block: int = 16
    percentile: float = 80.0
    warmup: int = 128
    tau_strict: float = 0.9
    tau_soft: float = 0.7
    length_factor: bool = True
    use_structure: bool = True
    fixed_tau: float | None = None
    structure_tolerance: int = 0
    positions: str = "auto"
    align: str = "tokens"
    publish: str = "exact"
    apply: str = "alias"
    admission_credit: float = 0.5
    calibration: str | None = None
    random_ratio: float | None = None
    half_life: int = 0
    distance: str = "euclidean"
    encoder: str = "tokens"
    span: str = "auto"
    max_pending: int = 256
    max_step_tokens: int = 1024
    max_history_steps: int = 2048
    allow_untested_sglang: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            raise ConfigError("policy", _POLICY_BOUND, self.policy)
        try:
            registry.parse(self.policy)
        except PolicyError as error:
            raise ConfigError("policy", f"{_POLICY_BOUND} {error}", self.policy) from error
        self._one_of("preset", PRESET_NAMES)
        self._one_of("positions", ("auto", "corrected", "as-cached"))
        self._one_of("align", ("tokens", "index"))
        self._one_of("publish", ("exact", "aliased"))
        self._one_of("apply", ("alias", "copy"))
        self._one_of("distance", ("euclidean", "cosine"))
        self._one_of("span", ("auto", "reasoning", "response"))
        try:
            EncoderChoice.parse(self.encoder)
        except ValueError as error:
            raise ConfigError("encoder", ENCODER_BOUND, self.encoder) from error
        self._between("block", 1, 1024)
        self._between("percentile", 0, 100)
        self._between("warmup", 0, 1_000_000)
        self._between("tau_strict", 0, 1)
        self._between("tau_soft", 0, 1)
        self._between("structure_tolerance", 0, 1000)
        self._between("admission_credit", 0, 0.9)
        for field in ("random_ratio", "fixed_tau"):
            if getattr(self, field) is not None:
                self._between(field, 0, 1)
        self._between("half_life", 0, 1_000_000_000)
        self._between("max_pending", 1, 1_000_000)
        self._between("max_step_tokens", 16, 65_536)
        self._between("max_history_steps", 1, 1_000_000)
        if self.block > self.max_step_tokens:
            raise ConfigError(
                "block", f"at most max_step_tokens ({self.max_step_tokens})", self.block
            )
        if self.tau_soft > self.tau_strict:
            raise ConfigError("tau_soft", f"at most tau_strict ({self.tau_strict})", self.tau_soft)

    def _one_of(self, field: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, field) not in allowed:
            raise ConfigError(field, "one of " + ", ".join(allowed), getattr(self, field))

    def _between(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        # sglang.Engine takes keywords of any type; a flag is parsed already.
        number = (int,) if isinstance(_DEFAULTS.get(field), int) else (int, float)
        if type(value) not in number:
            kind = "an integer" if number == (int,) else "a number"
            raise ConfigError(field, f"{kind} between {low} and {high}", value)
        # A NaN compares false with everything, so it fails here as well.
        if not low <= value <= high:
            raise ConfigError(field, f"between {low} and {high}", value)

    @property
    def corrected(self) -> bool:
        return self.positions == "corrected"

    @property
    def policies(self) -> PolicyChoice:
        return registry.parse(self.policy)

    @property
    def shares(self) -> bool:
        """False when no block can ever be shared; nothing is compared then."""
        return self.policies.shares and self.percentile > 0

    @property
    def evictions(self) -> bool:
        """Whether any policy may evict positions."""
        return bool(self.policies.evictors)

    @property
    def is_active(self) -> bool:
        """False when rows are never touched; nothing is computed then."""
        return self.shares or self.evictions

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ReasonCacheConfig:
        """Build from explicitly given values; the preset fills in the rest.

        Raises:
            ConfigError: unknown field or value out of bounds.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(name, "a known option", values[name])
        preset = values.get("preset", cls.preset)
        # sglang.Engine takes keywords of any type; the constructor refuses other ones.
        row = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        return cls(**{**row, **values})  # type: ignore[arg-type]


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ReasonCacheConfig)}
#: Fields whose default is None say nothing about their type.
_OPTIONAL_TYPES: dict[str, type] = {"calibration": str, "fixed_tau": float, "random_ratio": float}


def type_of(field: str) -> type:
    """What the text of a flag is read as: bool, int, float or str."""
    return _OPTIONAL_TYPES.get(field, type(_DEFAULTS[field]))

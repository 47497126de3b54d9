# SPDX-License-Identifier: Apache-2.0
"""The operator's settings in one frozen record, with defaults, bounds and help texts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from sglang_reasoncache import policy_options
from sglang_reasoncache.arguments import CALLED, SET, flag_of, kind_of, value_of
from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.custom_params import repair_of
from sglang_reasoncache.eviction.policies.evictor import ALWAYS
from sglang_reasoncache.filter.settings import (
    LONGEST_OF_RUNS,
    LONGEST_STEP,
    PRESETS,
    FilterConfig,
)
from sglang_reasoncache.policy_options import PolicyChoice, PolicyError
from sglang_reasoncache.registry import BUILT_IN

_POLICY_BOUND = "NAME[:key=value,...][+NAME...]"


class ConfigError(ValueError):
    """A setting has a bad value. The message names the flag, the bound and the value."""

    def __init__(self, name: str, bound: str, value: object) -> None:
        super().__init__(f"{flag_of(name)} must be {bound}, got {value!r}")


def _setting(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    bounds: tuple[float, float] | None = None,
    values: str = "",
) -> Any:
    """Make a field. ``values``: what help texts show for the value. The value None is valid only as default."""
    values = values or "|".join(choices) or {int: "N", bool: "true|false"}.get(type(default), "X")
    metadata = dict(help=text, choices=choices, bounds=bounds, values=values)
    return dataclasses.field(default=default, metadata=metadata)


#: Settings that are read only with ``match=steps``.
_OF_STEPS = frozenset((
    "align", "fixed_tau", "length_factor", "structure_tolerance", "tau_soft",
    "tau_strict", "use_structure",
))  # fmt: skip


@dataclass(frozen=True)
class ReasonCacheConfig:
    """The settings of a server. Raises :class:`ConfigError` for a bad value."""

    policy: str = _setting(
        "reasoncache",
        "What to do with the KV of running requests. reasoncache: repeated blocks share slots. "
        f"{', '.join(BUILT_IN)}: evict positions beyond budget=N or share=F; with when=short, only "
        "when SGLang would retract a request. module:Class: an evicting policy of another package. "
        "quest: decode steps read the budget=N positions that may matter most, and nothing is freed "
        "(needs --page-size above 1; see docs/selection.md). "
        "none: nothing. Join several by +. See docs/eviction.md.",
        values=_POLICY_BOUND,
    )
    preset: str = _setting(
        "newest",
        "Named set of values for sharing; explicit settings win over it.",
        choices=tuple(PRESETS),
        values="NAME",
    )
    when: str = _setting(
        "short",
        "When blocks share. short: when SGLang is short of slots, the smallest KV distance first; with "
        "enough slots, answers are those of stock SGLang. always: as soon as they are found. The papers' "
        "presets set always, and a policy that evicts at every poll implies it.",
        choices=("short", "always"),
    )
    scope: str = _setting(
        "response",
        "Whose blocks a response reads. response: its own. prompt: also those of running responses to "
        "the same prompt (rollouts; needs match=runs and no policy that evicts). See docs/rollouts.md.",
        choices=("response", "prompt"),
    )
    reads_prompt: bool = _setting(
        False,
        "Whether blocks of a response read equal blocks of its own prompt, too: files and tool results that an "
        "agent quotes. Needs match=runs and no policy that evicts. Has no effect, and the log says why, with "
        "states, a window pool, or on a decode server of a PD pair. See docs/agents.md.",
    )
    match: str = _setting(
        "runs",
        "Blocks that may share. runs: equal runs of tokens anywhere in the response. steps: blocks "
        "of similar reasoning steps; preset=reasoncache sets the ReasonCache paper's filter, but align stays.",
        choices=("runs", "steps"),
    )
    min_run: int = _setting(
        12,
        "Tokens that must repeat for a block to share (match=runs): always the whole block, and tokens "
        "before it. A lower value saves more slots, but costs much accuracy.",
        bounds=(1, 1_024),
    )
    direction: str = _setting(
        "newest",
        "Which of two equal blocks keeps its slots; the other block then reads them. The papers use "
        "oldest.",
        choices=("newest", "oldest"),
    )
    min_age: int = _setting(
        256,
        "Tokens that the response must have after a block before the block reads other slots.",
        bounds=(0, 1_000_000),
    )
    block: int = _setting(
        8,
        "Tokens per shared block (d in the ReasonCache paper); at --page-size > 1 a page shares once "
        "blocks cover it.",
        bounds=(1, 1024),
    )
    percentile: float = _setting(
        100.0,
        "Share a block if its KV distance is within this percentile of all distances seen; 0 shares "
        "nothing, 100 shares everything that the filter proposes.",
        bounds=(0, 100),
    )
    warmup: int = _setting(
        0, "Number of KV distances to measure before any block shares.", bounds=(0, 1_000_000)
    )
    tau_strict: float = _setting(0.9, "Highest dynamic threshold for similar steps.", bounds=(0, 1))
    tau_soft: float = _setting(0.7, "Lowest dynamic threshold for similar steps.", bounds=(0, 1))
    length_factor: bool = _setting(True, "Multiply similarity by the ratio of step lengths.")
    use_structure: bool = _setting(True, "Require equal formulas and code if both steps have some.")
    fixed_tau: float | None = _setting(
        None, "Constant threshold for similar steps, instead of the dynamic one.", bounds=(0, 1)
    )
    structure_tolerance: int = _setting(
        0, "Largest tree edit distance at which formulas or code count as equal.", bounds=(0, 1000)
    )
    positions: str = _setting(
        "auto",
        "corrected: rotate a shared key to where it is used. as-cached: do not, like the papers. "
        "auto: corrected; if model or flags do not allow that, nothing is shared.",
        choices=("auto", "corrected", "as-cached"),
    )
    align: str = _setting(
        "tokens",
        "tokens: pair blocks of equal tokens. index: pair the k-th blocks of two steps. nearest: pair the "
        "blocks of two steps that have the least KV distance, like MemShare (needs direction=oldest).",
        choices=("tokens", "index", "nearest"),
    )
    admission_credit: float = _setting(
        1.0,
        "Largest fraction of SGLang's reservation of slots for future output that admission may leave out. "
        "It learns how much to reserve from retractions. 0: reserve as SGLang does. It is 0 "
        "with --max-queued-requests, except on the decode server of a PD pair: SGLang ends a retracted request "
        "that finds the queue full.",
        bounds=(0, 1),
    )
    host_swap_gb: float | None = _setting(
        None,
        "Most host memory, in GiB for each rank, that keeps the KV of retracted requests, so that it is not "
        "computed again. 0: none. If unset, a tenth of the host memory that is free at the start, divided by "
        "the machine's GPUs or, if there are more, the server's ranks on it. On a GPU the memory is pinned, "
        "and PyTorch may keep as much again of it for later copies. "
        "Has no effect, and the log says why, with latent attention whose prefills cannot rotate keys "
        "(models not built as DeepSeek V2 is; docs/kernels.md), a window pool of a few windows, a host tier, "
        "or a policy that evicts. On a decode server of a PD pair: the memory for requests that "
        "SGLang's host pool for retractions has no room for.",
        bounds=(0, 1_000_000),
    )
    aliased_nodes: bool = _setting(
        True,
        "Keep what a finished response shared in the prefix cache, for prompts that go on with it. false: only "
        "up to its first shared token. Has no effect, and the log says why, with latent attention whose "
        "prefills cannot rotate keys (see host_swap_gb), a policy that evicts, state layers in "
        "some cases (docs/agents.md), or "
        "on a decode server of a PD pair.",
    )
    documents: str = _setting(
        "marked",
        "Which parts of prompts are read from the cache at new positions. marked: what requests mark. auto: "
        "also, in requests that mark nothing, text that earlier prompts had behind other text, unless the "
        "request asks for exact figures of its prompt. See docs/documents.md.",
        choices=("marked", "auto"),
    )
    documents_least: int = _setting(
        64, "Fewest tokens of a document that documents=auto finds.", bounds=(40, 65_536)
    )
    documents_repair: str = _setting(
        "none",
        "Which tokens of documents at new positions are computed again unless the request chooses: none; "
        "first:TOKENS, the first tokens of each document; ends:TOKENS, the first and twice as many last "
        "tokens of each document; query:SHARE, the share that the query "
        "attends to most. See docs/documents.md.",
        values="REPAIR",
    )
    random_ratio: float | None = _setting(
        None,
        "Redirect this share of blocks to random earlier ones and compare nothing (experiment).",
        bounds=(0, 1),
    )
    span: str = _setting(
        "auto",
        "Tokens that may share. reasoning: the part that --reasoning-parser marks. response: all "
        "output. auto: reasoning if a parser is set, else response.",
        choices=("auto", "reasoning", "response"),
    )
    max_pending: int = _setting(
        256,
        "While this many results of compared steps wait for the scheduler, new steps are not compared "
        "(counted as steps_shed).",
        bounds=(1, 1_000_000),
    )
    max_step_tokens: int | None = _setting(
        None,
        "A reasoning step is cut after this number of tokens. If unset, after "
        f"{LONGEST_OF_RUNS} with match=runs, after {LONGEST_STEP} otherwise, or after block if that is more.",
        bounds=(16, 65_536),
    )
    max_history_steps: int = _setting(
        2048, "A step is compared with at most this many earlier steps.", bounds=(1, 1_000_000)
    )
    keep_responses: int = _setting(
        0,
        "How many of the newest finished responses the page at GET /reasoncache/ui shows as text, up to 16,384 "
        "tokens of each. Readers need the --admin-api-key if the server has one, else the --api-key if any.",
        bounds=(0, 32),
    )
    allow_untested_sglang: bool = _setting(False, "Start on an SGLang version that was not tested.")

    def __post_init__(self) -> None:
        try:
            policy_options.parse(self.policy)
        except (PolicyError, TypeError) as error:
            raise ConfigError("policy", f"{_POLICY_BOUND} {error}", self.policy) from error
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        for name, most in (("block", "max_step_tokens"), ("tau_soft", "tau_strict")):
            value = getattr(self, name)
            bound = getattr(self, most)
            if bound is not None and value > bound:
                raise ConfigError(name, f"at most {most} ({bound})", value)

        try:
            repair_of(self.documents_repair)
        except ValueError as error:
            raise ConfigError("documents_repair", str(error), self.documents_repair) from error
        if self.align == "nearest" and self.direction != "oldest":
            raise ConfigError("align", "tokens or index unless direction=oldest", self.align)
        reads_more = {
            "scope": ("response", self.scope),
            "reads_prompt": (False, self.reads_prompt),
        }
        for name, (least, value) in reads_more.items():
            if value == least:
                continue
            if self.match != "runs" or self.random_ratio is not None:
                raise ConfigError(name, f"{least} unless match=runs".lower(), value)
            if self.policies.evictors:
                raise ConfigError(name, f"{least} beside a policy that evicts".lower(), value)

    @property
    def policies(self) -> PolicyChoice:
        return policy_options.parse(self.policy)

    @property
    def shares(self) -> bool:
        """False if no block can ever share."""
        return self.policies.shares and self.percentile > 0

    @property
    def shares_at_once(self) -> bool:
        """Whether blocks share as soon as they are found: with ``when=always``, or if a policy evicts at every
        poll (every fourth decode step). Such a policy evicts less if blocks have shared before."""
        evicts = any(policy.when == ALWAYS for _, policy in self.policies.evictors)
        return self.when == "always" or evicts

    @property
    def is_active(self) -> bool:
        """Whether sharing or an evicting policy may change rows of ``req_to_token``."""
        return self.shares or bool(self.policies.evictors)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "ReasonCacheConfig":
        """Make a config of ``values``. Other settings come from the preset or are defaults. Raises ConfigError
        for an unknown name, a bad value, and a value that ``match=runs`` would ignore."""
        for name in sorted(values.keys() - SETTINGS.keys()):
            raise ConfigError(name, "a known option", values[name])
        preset = values.get("preset", cls.preset)
        # sglang.Engine passes a preset of any type, even unhashable. The constructor refuses unknown presets.
        row = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        config = cls(**{**row, **values})  # type: ignore[arg-type]
        for name in sorted(_OF_STEPS & values.keys()) if config.match == "runs" else ():
            if values[name] != SETTINGS[name].default:
                raise ConfigError(name, "left out unless match=steps reads it", values[name])
        return config


#: Name of a setting -> its dataclass field.
SETTINGS = {field.name: field for field in dataclasses.fields(ReasonCacheConfig)}


def type_of(name: str) -> type:
    """The type of a setting: bool, int, float or str."""
    return kind_of(get_type_hints(ReasonCacheConfig)[name])


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    choices = field.metadata["choices"]
    bounds = field.metadata["bounds"]
    kind = type_of(field.name)
    if choices and value not in choices:
        raise ConfigError(field.name, "one of " + ", ".join(choices), value)
    if value is None and field.default is None:
        return
    if bounds is not None:
        within = "between {} and {}".format(*bounds)
        # A flag's text was parsed to the right type before, but sglang.Engine takes keywords of any type.
        if type(value) not in ((int,) if kind is int else (int, float)):
            raise ConfigError(field.name, f"{CALLED[kind]} {within}", value)
        # This check also refuses NaN, because a NaN compares false with everything.
        if not bounds[0] <= value <= bounds[1]:
            raise ConfigError(field.name, within, value)
    elif kind in (bool, str) and not isinstance(value, kind):
        raise ConfigError(field.name, CALLED[kind], value)


def parse_setting(name: str, text: str) -> Any:
    """Parse ``text``, an operator's value of the setting ``name``. Raises ConfigError for an unknown name, and
    for a text that does not fit the setting's type."""
    if name not in SETTINGS:
        raise ConfigError(name, "one of " + ", ".join(SETTINGS), text)
    try:
        return value_of(text, type_of(name))
    except ValueError as error:
        raise ConfigError(name, str(error), text) from error


def parse_settings(text: str) -> dict[str, Any]:
    """Parse ``key=value,...``; values have no commas. Raises ValueError for any other text."""
    if not isinstance(text, str):
        # sglang.Engine takes keywords of any type.
        raise ValueError(f"{SET} must be key=value,..., got {text!r}")
    given = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not equals:
            raise ValueError(f"{SET} must be key=value,..., got {part!r}")
        name = name.replace("-", "_")
        given[name] = parse_setting(name, value)
    return given


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings that a scheduler follows, settled once: before the prefix tree is made, when model,
    attention backends and page size are known.

    Attributes:
        config: The operator's settings with three changes: ``positions`` is what this model and its backends
            can do, ``percentile`` is 0 if nothing can be shared, and ``min_age`` is at least what the model's
            sliding windows need.
        page: Page size, in tokens.
        uncorrected: Why nothing is shared although the operator asked for it: most often because keys cannot be
            rotated to the positions that read them.
        learns: Whether the operator's settings share or evict. If so, admission learns how much to reserve,
            even if ``uncorrected``.
    """

    config: ReasonCacheConfig
    page: int
    uncorrected: str | None = None
    learns: bool = True


def filter_config(config: ReasonCacheConfig) -> FilterConfig:
    """The filter's settings."""
    return FilterConfig(
        strict=config.tau_strict,
        soft=config.tau_soft,
        fixed_tau=config.fixed_tau,
        length_factor=config.length_factor,
        use_structure=config.use_structure,
        structure_tolerance=config.structure_tolerance,
        match=config.match,  # type: ignore[arg-type]  # one of the setting's choices
        direction=config.direction,  # type: ignore[arg-type]
        reads_prompt=config.reads_prompt,
        min_age=config.min_age,
        min_run=config.min_run,
        block=config.block,
        align=config.align,  # type: ignore[arg-type]
        max_step_tokens=config.max_step_tokens,
        max_history_steps=config.max_history_steps,
        random_ratio=config.random_ratio,
    )


def config_of(server_args: Any) -> ReasonCacheConfig | None:
    """The config that ``plugin/flags.py`` attached to ``server_args``. None without --enable-reasoncache."""
    return getattr(server_args, CONFIG, None)

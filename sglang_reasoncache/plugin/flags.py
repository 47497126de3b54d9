# SPDX-License-Identifier: Apache-2.0
"""Command-line flags and ``sglang.Engine`` keywords, and the switch they turn."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.config import PRESET_NAMES, ReasonCacheConfig, flag_of, type_of
from sglang_reasoncache.plugin import ENABLED_ENV, engines, refusals
from sglang_reasoncache.registry import BUILT_IN
from sglang_reasoncache.sharing.calibrated import check_calibration, filter_config

ENABLE = "enable_reasoncache"
_PREFIX = "reasoncache_"

#: Field -> (help, argparse extras). Types and defaults come from the config.
_HELP: dict[str, tuple[str, dict[str, Any]]] = {
    "policy": (
        "What is done with the rows of running requests: reasoncache shares similar steps; "
        f"{', '.join(BUILT_IN)} drop positions beyond budget=N or share=F, with when=F only while more "
        "of the pool is in use, or (quest) read fewer in a step; none; several joined by +. See "
        "docs/policies.md.",
        {"metavar": "NAME[:key=value,...][+NAME...]"},
    ),
    "preset": (
        "Named set of values for sharing; explicit flags win over it.",
        {"choices": PRESET_NAMES},
    ),
    "block": ("Tokens per shared block; at --page-size > 1 the page is the block.", {}),
    "percentile": (
        "Share a block when its KV distance is within this percentile of those seen; 0 shares nothing.",
        {},
    ),
    "warmup": ("KV distances observed before the first block may be shared.", {}),
    "tau_strict": ("Upper end of the dynamic lexical threshold.", {}),
    "tau_soft": ("Lower end of the dynamic lexical threshold.", {}),
    "length_factor": ("Multiply the cosine with the ratio of step lengths.", {}),
    "use_structure": ("Require equal formal content where both steps have some.", {}),
    "fixed_tau": ("Constant lexical threshold instead of the dynamic one.", {}),
    "structure_tolerance": (
        "Largest tree edit distance between the formal content of two steps.",
        {},
    ),
    "positions": (
        "corrected: rotate a shared key to where it is used. as-cached: leave it (the papers' behaviour). "
        "auto: corrected on the CPU platform where the model allows it, else as-cached.",
        {"choices": ("auto", "corrected", "as-cached")},
    ),
    "align": (
        "Pair blocks of equal tokens, or block by index (the papers' behaviour).",
        {"choices": ("tokens", "index")},
    ),
    "publish": (
        "What a finished request leaves in the prefix cache.",
        {"choices": ("exact", "aliased")},
    ),
    "apply": (
        "copy: write shared KV into own slots; saves nothing, exists to verify.",
        {"choices": ("alias", "copy")},
    ),
    "admission_credit": (
        "Largest share of future output that admission counts as shared in advance; 0 switches it off.",
        {},
    ),
    "calibration": (
        "JSON file that keeps the distance histogram across restarts.",
        {"metavar": "PATH"},
    ),
    "random_ratio": ("Redirect this share of blocks to random earlier ones (experiment).", {}),
    "half_life": (
        "Distances after which an observed one counts half in the percentile; 0 never forgets.",
        {},
    ),
    "distance": (
        "How the K and V of two blocks are compared; cosine is an ablation.",
        {"choices": ("euclidean", "cosine")},
    ),
    "encoder": (
        "What step similarity compares: counts of tokens, or (ablations) embedding, the mean in the model's "
        "embedding layer, or sentence-bert[:MODEL].",
        {"metavar": "ENCODER"},
    ),
    "span": (
        "Tokens that may share. reasoning: the part that --reasoning-parser marks. response: all output. "
        "auto: reasoning where a parser is set.",
        {"choices": ("auto", "reasoning", "response")},
    ),
    "max_pending": (
        "Finished steps that may wait for comparison; beyond, new ones are not looked at.",
        {},
    ),
    "max_step_tokens": ("A reasoning step longer than this is cut there.", {}),
    "max_history_steps": ("Earlier steps compared with a new one.", {}),
    "allow_untested_sglang": ("Start on an SGLang version that was not tested.", {}),
}


def install() -> None:
    """Hook the two places where SGLang reads its command line, and ``Engine``'s record."""
    registry, kind = compat.HookRegistry, compat.HookType
    registry.register(compat.HOOK_TARGETS["add_cli_args"], add_cli_args, kind.AFTER)
    registry.register(compat.HOOK_TARGETS["from_cli_args"], from_cli_args, kind.AROUND)
    compat.Engine.server_args_class = staticmethod(engine_server_args)


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``: one group with our flags.

    Every default is None so that a value given explicitly can be told from one
    left alone, which is what lets a preset fill in the rest.
    """
    group = parser.add_argument_group("ReasonCache: similar reasoning steps share KV memory")
    group.add_argument(
        "--enable-reasoncache",
        action="store_true",
        help="Let a finished reasoning step share the KV slots of an earlier, similar step of its response.",
    )
    for field in dataclasses.fields(ReasonCacheConfig):
        text, extras = _HELP[field.name]
        if isinstance(field.default, bool):
            # --reasoncache-x and --no-reasoncache-x; None when neither is given.
            group.add_argument(
                flag_of(field.name), action=argparse.BooleanOptionalAction, default=None, help=text
            )
            continue
        shown = f"{text} Default: {field.default}."
        group.add_argument(
            flag_of(field.name),
            type=type_of(field.name),
            default=None,
            help=shown.replace("%", "%%"),
            **extras,
        )


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: attach the config to the record."""
    given = {
        name: getattr(args, _PREFIX + name, None)
        for name in _HELP
        if getattr(args, _PREFIX + name, None) is not None
    }
    server_args = original(cls, args)
    try:
        attach(server_args, bool(getattr(args, ENABLE, False)), given)
    except ValueError as error:
        # One line for the operator instead of SGLang's traceback.
        raise SystemExit(f"sglang-reasoncache: error: {error}") from error
    if config_of(server_args) is not None:
        from sglang_reasoncache.plugin import routes

        routes.install()
    return server_args


def engine_server_args(**kwargs: Any) -> Any:
    """``sglang.Engine(enable_reasoncache=True, reasoncache_block=8, ...)``."""
    enabled = bool(kwargs.pop(ENABLE, False))
    given = {
        name[len(_PREFIX) :]: kwargs.pop(name) for name in list(kwargs) if name.startswith(_PREFIX)
    }
    return attach(compat.ServerArgs(**kwargs), enabled, given)


def attach(server_args: Any, enabled: bool, given: dict[str, Any]) -> Any:
    """Put the config on the raw record and install the hooks, or refuse.

    Raises:
        ValueError: a bad value, a flag of ours without the switch, an
            incompatible flag, or an SGLang version that was not tested.
    """
    if not enabled:
        os.environ.pop(ENABLED_ENV, None)
        if given:
            raise ValueError(
                f"{flag_of(sorted(given)[0])} does nothing without --enable-reasoncache"
            )
        return server_args
    config = ReasonCacheConfig.from_mapping(given)
    # Raise here, in the operator's face, rather than in the scheduler process.
    filter_config(config, config.block, page_size=1)
    check_calibration(config)
    if config.span == "reasoning" and not server_args.reasoning_parser:
        raise ValueError("--reasoncache-span reasoning needs a --reasoning-parser, got none")
    compat.check_version(config.allow_untested_sglang)
    refusals.check(server_args)
    refusals.check_evicting(server_args, config)
    refusals.check_selector(server_args, config)
    # Imports torch, which processes without the flag need not load.
    from sglang_reasoncache.plugin.encoder import check_encoder

    check_encoder(config, server_args.tp_size)
    engines.prepare()
    server_args.radix_cache_backend = compat.TREE_BACKEND
    # The record takes no new fields; an underscore attribute survives the
    # pickling into the scheduler process.
    server_args._reasoncache = config
    os.environ[ENABLED_ENV] = "1"
    from sglang_reasoncache.plugin import hooks

    hooks.install()
    # Children get this from load_plugins(); here it has already run.
    compat.HookRegistry.apply_hooks()
    hooks.check_installed()
    return server_args


def config_of(server_args: Any) -> ReasonCacheConfig | None:
    """The config attached to a server record, None when the flag is off."""
    return getattr(server_args, "_reasoncache", None)

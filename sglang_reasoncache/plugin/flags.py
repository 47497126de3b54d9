# SPDX-License-Identifier: Apache-2.0
"""Command-line flags and ``sglang.Engine`` keywords that switch the plugin on and hold its settings."""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sglang_reasoncache import compat, native
from sglang_reasoncache.arguments import FLAGS, SET, flag_of
from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.config import (
    SETTINGS,
    ReasonCacheConfig,
    config_of,
    parse_settings,
    type_of,
)
from sglang_reasoncache.plugin import refusals

logger = logging.getLogger(__name__)

#: Environment variable that makes child processes of a server install the hooks. These processes load
#: plugins before they see any argument.
ENABLED_ENV = "SGLANG_REASONCACHE_ENABLED"
#: Environment variable with our flags, as on a command line, for launchers that make ``ServerArgs`` themselves.
WORDS_ENV = "SGLANG_REASONCACHE"
#: The HTTP application of SGLang's worker processes, as ``compat.APP_ENV`` names it.
WORKER_APP = "sglang_reasoncache.plugin.worker:app"
ENABLE = "enable_reasoncache"
#: Whether this process has ever made flags of a server with the plugin. From then on the processes of its
#: servers install the hooks, which do nothing in a server without a config.
_is_enabled = False
_PREFIX = "reasoncache_"
_SET = _PREFIX + "set"


def install() -> None:
    """Hook SGLang's command-line functions, and let :func:`engine_server_args` make ``Engine``'s ServerArgs."""
    register = compat.HookRegistry.register
    kind = compat.HookType
    if os.environ.get(WORDS_ENV, "").strip() or os.environ.get(ENABLED_ENV) == "1":
        for target in compat.LAUNCHER_HOOK_TARGETS.values():
            register(target, before_resolving, kind.BEFORE)
    register(compat.HOOK_TARGETS["add_cli_args"], add_cli_args, kind.AFTER)
    register(compat.HOOK_TARGETS["from_cli_args"], from_cli_args, kind.AROUND)
    compat.Engine.server_args_class = staticmethod(engine_server_args)


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: adds our flags. A setting whose flag is not given is None."""
    group = parser.add_argument_group("ReasonCache: repeated reasoning shares KV memory")
    text = (
        "Let blocks that repeat in a response share KV slots: once an earlier block is old enough, "
        "it reads the slots of the newest equal block."
    )
    group.add_argument("--enable-reasoncache", action="store_true", help=text)
    for name in FLAGS:
        field = SETTINGS[name]
        text = f"{field.metadata['help']} Default: {field.default}."
        group.add_argument(
            flag_of(name),
            type=type_of(name),
            choices=field.metadata["choices"] or None,
            metavar=field.metadata["values"],
            help=text.replace("%", "%%"),
        )
    text = "Every other setting, see docs/settings.md. May be given several times."
    group.add_argument(SET, action="append", metavar="key=value,...", help=text)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Hook around ``ServerArgs.from_cli_args``: attaches our config to the ServerArgs."""
    server_args = original(cls, args)
    try:
        attach(server_args, bool(getattr(args, ENABLE, False)), _settings_of(args))
    except ValueError as error:
        # The operator gets this line instead of a traceback.
        raise SystemExit(f"sglang-reasoncache: error: {error}") from error
    if config_of(server_args) is not None:
        from sglang_reasoncache.plugin import routes

        routes.add()
    return server_args


def _settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that a command line gives. Raises ValueError for a wrong ``--reasoncache-set``."""
    lists = getattr(args, _SET, None)
    given = {} if lists is None else parse_settings(",".join(lists))
    values = {name: getattr(args, _PREFIX + name, None) for name in FLAGS}
    return given | {name: value for name, value in values.items() if value is not None}


class _Words(argparse.ArgumentParser):
    """Parses the variable ``WORDS_ENV``, and raises ValueError where a command's parser would end it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def before_resolving(server_args: Any) -> None:
    """Hook before SGLang resolves and before it checks ``server_args``, which it does before it starts a
    scheduler, whoever made them. Attaches what the variable ``WORDS_ENV`` says, unless flags or keywords said
    something. Raises ValueError, which names the variable, for words that a command line would refuse."""
    words = os.environ.get(WORDS_ENV, "")
    if hasattr(server_args, CONFIG):
        _serve_attached(server_args)
        return
    if not words.strip():
        return
    if server_args.disaggregation_mode == "prefill":
        # A variable of a whole job, which has both servers of a PD pair.
        logger.info("reasoncache: %s has no effect on a prefill server", WORDS_ENV)
        return
    is_resolved = getattr(server_args, compat.RESOLVED, False)
    try:
        if is_resolved:
            _resolve_again(server_args)
        parser = _Words(add_help=False, allow_abbrev=False)
        add_cli_args(None, parser)
        args = parser.parse_args(shlex.split(words))
        attach(server_args, bool(getattr(args, ENABLE, False)), _settings_of(args))
    except ValueError as error:
        raise ValueError(f"{WORDS_ENV}: {error}") from error
    if is_resolved:
        server_args.resolve_once()
    _add_routes()


def _serve_attached(server_args: Any) -> None:
    """The process that made ``server_args`` attached the config, and another one, perhaps this, serves HTTP."""
    serves = "sglang.srt.managers.tokenizer_manager" in sys.modules
    if config_of(server_args) is not None and serves:
        from sglang_reasoncache.plugin import hooks

        hooks.install_frontend()
        _add_routes()


def _add_routes() -> None:
    if "sglang.srt.entrypoints.http_server" in sys.modules:
        from sglang_reasoncache.plugin import routes

        routes.add()


def _resolve_again(server_args: Any) -> None:
    """Let SGLang resolve flags again that it resolved before it loaded plugins. It keeps its decisions beside
    the flags as given. Raises ValueError if that would start CUDA in a fork of a process that uses it."""
    import torch

    if torch.cuda._is_in_bad_fork():
        raise ValueError(
            "this process was forked after the flags were resolved: start it with the method 'spawn', or call "
            "sglang.srt.plugins.load_plugins() before"
        )
    setattr(server_args, compat.RESOLVED, False)
    setattr(server_args, compat.DECISIONS, [])


def engine_server_args(**kwargs: Any) -> Any:
    """Make the ServerArgs of ``sglang.Engine(enable_reasoncache=True, reasoncache_block=8, ...)``. Each setting
    is a keyword, or a key of a mapping that is given as ``enable_reasoncache``. ``reasoncache_set`` takes the
    same text as ``--reasoncache-set``."""
    enable = kwargs.pop(ENABLE, None)
    is_mapping = isinstance(enable, Mapping)
    given = dict(enable) if is_mapping else {}
    text = kwargs.pop(_SET, None)
    given |= {} if text is None else parse_settings(text)
    for name in [name for name in kwargs if name.startswith(_PREFIX)]:
        given[name.removeprefix(_PREFIX)] = kwargs.pop(name)
    server_args = attach(compat.ServerArgs(**kwargs), is_mapping or bool(enable), given)
    if enable is False:
        # Not even ``WORDS_ENV`` switches it on.
        setattr(server_args, CONFIG, None)
    else:
        # The variable may have been set after SGLang loaded its plugins.
        before_resolving(server_args)
    return server_args


def attach(server_args: Any, enabled: bool, given: dict[str, Any]) -> Any:
    """Attach the config to ``server_args`` and install the hooks. Raises ValueError for refused settings."""
    global _is_enabled
    if not enabled:
        if not _is_enabled:
            # Inherited. Otherwise a server that this process made before may start its own processes only now.
            os.environ.pop(ENABLED_ENV, None)
        if os.environ.get(compat.APP_ENV) == WORKER_APP:
            del os.environ[compat.APP_ENV]
        if given:
            flag = flag_of(sorted(given)[0])
            raise ValueError(f"{flag} does nothing without --enable-reasoncache")
        return server_args
    config = ReasonCacheConfig.from_mapping(given)
    if config.span == "reasoning" and not server_args.reasoning_parser:
        raise ValueError("--reasoncache-span reasoning needs a --reasoning-parser, got none")
    compat.check_version(config.allow_untested_sglang)
    refusals.check(server_args)
    refusals.check_policies(config, refusals.other_attention(server_args))
    refusals.check_where_policies_act(config, server_args)
    refusals.check_deterministic(config, server_args)
    # Imported only if the plugin is switched on.
    import torch

    from sglang_reasoncache.plugin import hooks

    on_gpu = server_args.device != "cpu" and torch.cuda.is_available()
    if not on_gpu:
        # Compile the native code before the scheduler processes need it.
        try:
            native.library()
        except native.NativeUnavailable as error:
            logger.warning("reasoncache: no native code, kernels run in PyTorch: %s", error)
    server_args.radix_cache_backend = compat.TREE_BACKEND
    # ServerArgs accept attributes that begin with an underscore, and keep them when pickled for the scheduler.
    setattr(server_args, CONFIG, config)
    os.environ[ENABLED_ENV] = "1"
    _is_enabled = True
    if server_args.tokenizer_worker_num > 1:
        app = os.environ.get(compat.APP_ENV, compat.DEFAULT_APP)
        if app in (compat.DEFAULT_APP, WORKER_APP):
            os.environ[compat.APP_ENV] = WORKER_APP
        else:
            logger.warning(
                "reasoncache: no GET /reasoncache and no documents, unless %s, the application that %s names, "
                "imports sglang_reasoncache.plugin.worker",
                app,
                compat.APP_ENV,
            )
    hooks.install()
    hooks.install_frontend()
    # Child processes apply the hooks in SGLang's load_plugins(), which has run already in this process.
    compat.HookRegistry.apply_hooks()
    compat.check_applied(compat.HOOK_TARGETS.values())
    return server_args

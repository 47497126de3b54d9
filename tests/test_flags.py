# SPDX-License-Identifier: Apache-2.0
"""Tests the plugin's flags, and the settings and flags that a server refuses. Some tests start SGLang."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reasoncache import arguments, compat
from sglang_reasoncache.arguments import FLAGS, SET, arguments_of, flag_of
from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.config import SETTINGS, ConfigError, ReasonCacheConfig, type_of
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.plugin import attention, flags, hooks, refusals, routes
from tools import settings_table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    flags.add_cli_args(None, parser)
    return parser


def _server_args(**fields: object) -> Any:
    """SGLang's ``ServerArgs`` with the defaults, except for ``fields``, which SGLang does not check here."""
    record = compat.ServerArgs(model_path="unused")
    for name, value in fields.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def _config(*argv: str) -> ReasonCacheConfig:
    """The configuration that the command line ``argv`` sets."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "attach", lambda _record, _enabled, given: found.update(given))
        args = _parser().parse_args(argv)
        flags.from_cli_args(lambda _cls, _args: SimpleNamespace(), object, args)
    return ReasonCacheConfig.from_mapping(found)


def _examples(name: str) -> tuple[Any, list[Any]]:
    """For a setting, a valid value other than its default, and values that are refused."""
    field = SETTINGS[name]
    kind = type_of(name)
    if field.metadata["choices"]:
        return next(each for each in field.metadata["choices"] if each != field.default), ["other"]
    if field.metadata["bounds"]:
        least, most = field.metadata["bounds"]
        return kind(0.2 * least + 0.8 * most), [least - 1, most + 1, float("nan"), "1", True]
    if kind is bool:
        return not field.default, ["yes"]
    if name == "documents_repair":
        return "query:.15", ["query:2", "first", 5]
    assert name == "policy"
    return "reasoncache+keydiff:share=0.5,recent=8", ["other", 5]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_typed(name: str) -> None:
    """Every setting can be given on a command line, which makes the same config as giving it in a mapping."""
    value, _ = _examples(name)
    values = {
        name: value,
        **({} if name in ("match", "scope", "reads_prompt") else {"match": "steps"}),
    }
    typed = _config(*arguments_of(values))
    assert typed == ReasonCacheConfig.from_mapping(values)
    assert getattr(typed, name) == value != SETTINGS[name].default


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_value_is_refused_with_flag_and_value(name: str) -> None:
    for value in _examples(name)[1]:
        with pytest.raises(ConfigError, match=f"{flag_of(name)} must be .* got {value!r}"):
            ReasonCacheConfig(**{name: value})


def test_few_flags_are_shown() -> None:
    assert len(shown := _parser()._actions) <= 12 and all(action.help for action in shown)


def test_settings_of_several_lists_add_up() -> None:
    """A flag wins over a list (``--reasoncache-set``), and a later list wins over an earlier list."""
    lists = SET, "match=steps,warmup=3, tau-soft=0.1", SET, "warmup=4,block=2"
    config = _config("--reasoncache-block", "8", *lists)
    assert (config.warmup, config.tau_soft, config.block) == (4, 0.1, 8)
    assert arguments_of({"fixed_tau": None, "block": 4}) == ["--reasoncache-block", "4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup", r"must be key=value,\.\.\., got 'warmup'"),
        ("", "must be key=value"),
        ("warmup=3,", "must be key=value"),
        ("warmth=3", "warmth must be one of policy, .*, got '3'"),
        ("warmup=1.5", "warmup must be an integer, got '1.5'"),
        ("tau_soft=low", "tau_soft must be a number, got 'low'"),
        ("length_factor=1", "length_factor must be true or false, got '1'"),
        ("match=steps,tau_strict=0.5,tau_soft=0.6", "tau_soft must be at most"),
        ("tau_soft=0.6", "tau_soft must be left out unless match=steps"),
    ],
)
def test_a_bad_list_of_settings_is_refused_by_key(text: str, message: str) -> None:
    with pytest.raises((SystemExit, ConfigError), match=f"{SET} {message}"):
        _config(SET, text)


def test_messages_name_flags_that_can_be_typed() -> None:
    """Every ``--reasoncache-`` flag in the plugin's code exists. Settings without a flag are keys for SET."""
    known = {flag_of(name) for name in FLAGS} | {SET}
    for file in Path(arguments.__file__).parent.rglob("*.py"):
        named = set(re.findall(r"--reasoncache-[a-z-]*[a-z]", file.read_text()))
        assert named <= known, file


def test_engine_keywords_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "attach", lambda _record, enabled, given: (enabled, given))
    monkeypatch.setattr(compat, "ServerArgs", SimpleNamespace, raising=False)
    keywords: dict[str, Any] = dict(enable_reasoncache=True, reasoncache_warmup=3)
    found = flags.engine_server_args(**keywords, reasoncache_set="block=4,warmup=5")
    assert found == (True, {"block": 4, "warmup": 3})
    for other in (["block=4"], b"block=4", 5):
        with pytest.raises(ValueError, match=r"reasoncache-set must be key=value,..., got"):
            flags.engine_server_args(**keywords, reasoncache_set=other)


def test_settings_document_is_made_from_the_class() -> None:
    """``python -m tools.settings_table > docs/settings.md`` writes the document."""
    document = Path(__file__).parent.parent / "docs" / "settings.md"
    assert document.read_text() == "\n".join(settings_table.lines()) + "\n"


def test_incompatible_flags_are_named() -> None:
    refusals.check(_server_args())
    for field in refusals.CONFLICTS:
        args = _server_args(**{field: 2 if field.endswith("_size") else "on"})
        flag = f"--{field.replace('_', '-')} \\("
        with pytest.raises(ValueError, match=f"--enable-reasoncache cannot be combined .*{flag}"):
            refusals.check(args)


def test_variables_and_settings_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _server_args(enable_deterministic_inference=True)
    refusals.check_deterministic(_config(), args)
    as_cached = _config("--reasoncache-positions", "as-cached")
    refusals.check_deterministic(as_cached, _server_args())
    told = "--reasoncache-positions as-cached cannot be combined with: --enable-deterministic-inf"
    with pytest.raises(ValueError, match=told):
        refusals.check_deterministic(as_cached, args)
    with pytest.raises(ValueError, match="--rl-on-policy-target"):
        refusals.check_deterministic(as_cached, _server_args(rl_on_policy_target="fsdp"))
    if hasattr(args, "enable_return_aux_hidden_states"):  # not with SGLang 0.5.22
        # This flag gives --speculative-algorithm another meaning.
        names = dict(enable_return_aux_hidden_states=True, speculative_algorithm="DFLASH")
        refusals.check(_server_args(**names, enable_lora=True))
        assert not refusals.has_draft_model(_server_args(**names))
    # SGLang switches adapters on later.
    adapters = _server_args(lora_paths=["a=b"], speculative_algorithm="NGRAM")
    with pytest.raises(ValueError, match=r"--lora-paths \(adapters are not tested with"):
        refusals.check(adapters)
    refusals.check(_server_args(lora_paths=["a=b"]))
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ValueError, match="--enable-reasoncache .* SGLANG_RUST_SERVER"):
        refusals.check(_server_args())


def test_what_parses_requests_without_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could not opt out there."""
    with pytest.raises(ValueError, match="--grpc-port"):
        refusals.check(_server_args(grpc_port=50051))
    monkeypatch.setenv("SGLANG_GRPC_PORT", "50051")
    with pytest.raises(ValueError, match="SGLANG_GRPC_PORT"):
        refusals.check(_server_args())


def test_what_speculation_excludes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NGRAM", "standalone", "EAGLE", "EAGLE3", "NEXTN"):
        refusals.check(_server_args(speculative_algorithm=name, speculative_eagle_topk=1))
    # SGLang sets this field to the breadth of trees of n-grams, which are supported.
    refusals.check(_server_args(speculative_algorithm="NGRAM", speculative_eagle_topk=8))
    eagle = {"speculative_algorithm": "EAGLE"}
    ngram = {"speculative_algorithm": "NGRAM"}
    wrong: dict[str, dict[str, Any]] = {
        "NGRAM with --moe-a2a-backend": {**ngram, "moe_a2a_backend": "deepep"},
        "or --moe-dense-tp-size": {**ngram, "moe_dense_tp_size": 1},
        r"--speculative-algorithm DFLASH \(NGRAM": {"speculative_algorithm": "DFLASH"},
        r"--speculative-eagle-topk 2 \(only chains": {"speculative_eagle_topk": 2},
        r"--speculative-num-draft-tokens 64 \(at most 63": {"speculative_num_draft_tokens": 64},
        r"--moe-a2a-backend pplx with speculation": {"moe_a2a_backend": "pplx"},
        r"--speculative-draft-attention-backend fa3 at page size 64": {
            "speculative_draft_attention_backend": "fa3",
            "page_size": 64,
        },
        r"--page-size 64 with trees": {
            "speculative_algorithm": "NGRAM",
            "page_size": 64,
            "speculative_eagle_topk": 4,
        },
        r"--speculative-algorithm NGRAM with --disaggregation-mode decode": {
            "speculative_algorithm": "NGRAM",
            "disaggregation_mode": "decode",
        },
        **{
            f"--{field.replace('_', '-')} \\(": {field: True}
            for field in refusals.SPECULATION_CONFLICTS
        },
    }
    for message, fields in wrong.items():
        with pytest.raises(ValueError, match=f"cannot be combined .*{message}"):
            refusals.check(_server_args(**{**eagle, **fields}))
    served = {
        "disaggregation_mode": "decode",
        "moe_a2a_backend": "deepep",
        "enable_dp_attention": True,
    }
    refusals.check(_server_args(**eagle, **served))
    refusals.check(_server_args(**eagle, enable_hierarchical_cache=True))
    evicts = ReasonCacheConfig(policy="keydiff:share=0.5")
    with pytest.raises(ValueError, match="keydiff.* without --speculative-algorithm"):
        refusals.check_where_policies_act(evicts, _server_args(**eagle))
    # SGLang may settle for another algorithm, or another flag, than the operator named.
    refusals.check_settled_speculation(_server_args(**eagle))
    refusals.check_settled_speculation(_server_args(**eagle, enable_multi_layer_eagle=True))
    for fields in ({"speculative_algorithm": "FROZEN_KV_MTP"}, {"speculative_adaptive": True}):
        with pytest.raises(CannotShare, match="SGLang has chosen"):
            refusals.check_settled_speculation(_server_args(**{**eagle, **fields}))
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    with pytest.raises(ValueError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        refusals.check(_server_args(**eagle))


def test_a_pd_pair_shares_on_its_decode_server_only() -> None:
    decode = {"disaggregation_mode": "decode"}
    refusals.check(_server_args(**decode))
    wrong: dict[str, dict[str, Any]] = {
        "mode prefill .*decode server shares": {"disaggregation_mode": "prefill"},
        "host-receive-threshold below 1": {"disaggregation_decode_host_receive_threshold": 0.5},
        **{field.replace("_", "-"): {field: True} for field in refusals.DECODE_CONFLICTS},
    }
    for message, fields in wrong.items():
        with pytest.raises(ValueError, match=message):
            refusals.check(_server_args(**{**decode, **fields}))
    evicts = ReasonCacheConfig(policy="keydiff:share=0.5")
    refusals.check_where_policies_act(evicts, _server_args())
    with pytest.raises(ValueError, match="keydiff.* without --disaggregation-mode decode"):
        refusals.check_where_policies_act(evicts, _server_args(**decode))


def test_what_a_policy_that_selects_needs_is_named() -> None:
    selects = ReasonCacheConfig(policy="reasoncache+quest:budget=64")
    with pytest.raises(
        ValueError, match="quest:budget=64 leaves out positions, which --attention-"
    ):
        refusals.check_policies(selects, ["--attention-backend torch_native"])
    refusals.check_policies(selects, [])
    for fields, flag in (
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ):
        with pytest.raises(ValueError, match=f"quest:budget=64 selects .* without {flag}"):
            refusals.check_where_policies_act(selects, _server_args(**fields))
    page = SimpleNamespace(page_size=1)
    with pytest.raises(ValueError, match="--page-size must be at least 2 .*, got 1"):
        attention.check_pool_for_policies(selects, page)
    for wrong, message in (
        ("quest:budget=0", "budget of quest between 1 and"),
        ("quest+quest", "with quest once"),
        ("quest:recent=3", "options of quest among budget, whole_layers"),
    ):
        with pytest.raises(ValueError, match=message):
            ReasonCacheConfig(policy=wrong)


def test_memory_debugging_with_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals.check(_server_args(page_size=16))
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    refusals.check(_server_args(page_size=1))
    with pytest.raises(ValueError, match="SGLANG_DEBUG_MEMORY_POOL"):
        refusals.check(_server_args(page_size=16))


def test_other_sglang_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untested version is refused unless the operator allows it."""
    monkeypatch.setattr(compat, "version", lambda _: "0.4.0")
    supported = ", ".join(compat.SUPPORTED_SGLANG)
    message = f"supports sglang {supported}, found 0.4.0; pass --reasoncache-set allow_untested_sglang=true"
    with pytest.raises(ValueError, match=message):
        compat.check_version(allow_untested=False)
    compat.check_version(allow_untested=True)


def _python(
    *argv: str, platform: str = "reasoncache_cpu", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python without a GPU, with SGLANG_PLATFORM=``platform`` and ``variables``, without other values of
    SGLANG_REASONCACHE_ENABLED."""
    env = {k: v for k, v in os.environ.items() if k != flags.ENABLED_ENV}
    env |= {"SGLANG_PLATFORM": platform, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_refusal_is_the_last_line_of_a_real_start() -> None:
    flags = ("--enable-reasoncache", "--enable-lmcache", "--reasoncache-block", "8")
    done = _python("-m", "sglang.launch_server", "--model-path", "none", *flags)
    assert done.returncode != 0
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("sglang-reasoncache: error: --enable-reasoncache cannot be combined")
    assert "--enable-lmcache (" in line


_HOOKS = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_reasoncache import compat
ours = {compat.HOOK_TARGETS[name] for name in ("add_cli_args", "from_cli_args")}
assert HookRegistry._patched == ours, HookRegistry._patched
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
assert compat.TREE_BACKEND not in registered_radix_cache_backends()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
assert ATTENTION_BACKENDS["torch_native"].__module__.startswith("sglang."), "attention wrapped"
print("nothing but flags")
from sglang.srt.arg_groups import model_override_base as base
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
argv = "--model-path {} --device cuda --enable-reasoncache".split()
argv += "--attention-backend fa3 --page-size 64 --tokenizer-worker-num 2".split()
argv += "--speculative-algorithm STANDALONE --speculative-draft-model-path {}".split()
argv += "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3".split()
with override_platform(is_cuda=True, is_hopper_with_cuda_12_3=True, has_flashinfer=True):
    args = prepare_server_args(argv)
    args.resolve_once()
view = base.resolving_view(args)
print("attention:", *base.attention_backends_of(view), view.speculative_draft_attention_backend)
import os
print("application:", os.environ[compat.APP_ENV])
"""
#: A process of ``--tokenizer-worker-num``, before it serves.
_WORKER = """
import sys
from sglang.srt.entrypoints import http_server
assert not any("reasoncache" in getattr(route, "path", "") for route in http_server.app.routes)
assert "sglang_reasoncache.plugin.hooks" not in sys.modules, "SGLang loaded plugins here"
from sglang_reasoncache.plugin.worker import app
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_reasoncache import compat
assert app is http_server.app
print("paths:", *(path for path in (getattr(one, "path", "") for one in app.routes) if "reasoncache" in path))
targets = {*compat.FRONTEND_HOOK_TARGETS.values(), compat.HOOK_TARGETS["verify"]}
print("hooks:", targets <= HookRegistry._patched)
"""


def test_hooks_of_a_real_command_line(model_path: Path) -> None:
    """Without ``--enable-reasoncache``, the plugin hooks only argument parsing. With it, on a Hopper GPU with
    pages, it chooses a draft model's backend, and names the application of the processes that serve HTTP.
    ``test_attention_cuda.py`` tests other flags and GPUs."""
    done = _python("-c", _HOOKS.replace("{}", str(model_path)), platform="")
    assert "nothing but flags" in done.stdout, done.stderr
    assert "attention: fa3 fa3 triton" in done.stdout, done.stderr
    assert f"application: {flags.WORKER_APP}" in done.stdout, done.stderr


def test_a_process_that_serves_http_loads_the_plugin() -> None:
    done = _python("-c", _WORKER, **{flags.ENABLED_ENV: "1"})
    assert "hooks: True" in done.stdout, done.stderr
    assert "paths: /reasoncache /reasoncache/ui /reasoncache/details" in done.stdout, done.stderr


def test_the_application_of_an_operator_stays(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """And ours goes with the plugin."""
    for name in ("install", "install_frontend"):
        monkeypatch.setattr(hooks, name, lambda: None)
    monkeypatch.setattr(compat, "check_applied", lambda _: None)
    monkeypatch.setenv(flags.ENABLED_ENV, "")
    monkeypatch.setenv(compat.APP_ENV, "theirs:app")
    several = {"tokenizer_worker_num": 2, "device": "cpu"}
    flags.attach(_server_args(**several), True, {})
    assert os.environ[compat.APP_ENV] == "theirs:app" and "theirs:app" in caplog.text
    monkeypatch.delenv(compat.APP_ENV)
    flags.attach(_server_args(device="cpu"), True, {})
    assert compat.APP_ENV not in os.environ
    monkeypatch.setenv(compat.APP_ENV, compat.DEFAULT_APP)
    flags.attach(_server_args(**several), True, {})
    assert os.environ[compat.APP_ENV] == flags.WORKER_APP
    flags.attach(_server_args(**several), False, {})
    assert compat.APP_ENV not in os.environ


@pytest.mark.parametrize(
    "field", [f"{phase}attention_backend" for phase in ("", "prefill_", "decode_")]
)
def test_attention_that_reads_evicted_positions_is_refused_by_name(field: str) -> None:
    """SGLang's own backends would take the entry of an evicted position, -1, for the last slot of the pool."""
    config = ReasonCacheConfig(policy="reasoncache+streamingllm:budget=64")
    flag = "--" + field.replace("_", "-")
    message = f"evicts positions, which {flag} torch_native would read; use reasoncache_cpu"
    with pytest.raises(ValueError, match=re.escape(f"{config.policy} {message}")):
        _check_policies(config, **{field: "torch_native"})
    for name in ("reasoncache_cpu", "flashinfer", "triton"):
        _check_policies(config, **{field: name})
    _check_policies(ReasonCacheConfig(), **{field: "torch_native"})


def _check_policies(config: ReasonCacheConfig, **options: Any) -> None:
    refusals.check_policies(config, refusals.other_attention(_server_args(**options)))


def test_a_variable_is_obeyed_unless_something_else_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variable holds a command line. It does not reach a prefill server, nor an engine that says no."""
    attached: list[dict[str, Any]] = []

    def attach(args: Any, _: bool, given: dict[str, Any]) -> Any:
        attached.append(given)
        return args

    monkeypatch.setattr(flags, "attach", attach)
    monkeypatch.setenv(flags.WORDS_ENV, "--enable-reasoncache --reasoncache-set 'min_age=64'")
    flags.before_resolving(_server_args())
    assert attached.pop() == {"min_age": 64}
    flags.before_resolving(_server_args(disaggregation_mode="prefill"))
    flags.before_resolving(flags.engine_server_args(model_path="unused", enable_reasoncache=False))
    assert attached == [{}]
    # Also by an engine, in a process that loaded SGLang's plugins before the variable was set.
    flags.engine_server_args(model_path="unused")
    assert attached == [{}, {}, {"min_age": 64}]
    for words in ("--enable-reasoncache 'x", "--reasoncache-when never", "--other"):
        monkeypatch.setenv(flags.WORDS_ENV, words)
        with pytest.raises(ValueError, match="^SGLANG_REASONCACHE: "):
            flags.before_resolving(_server_args())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_process_that_serves_what_another_attached_has_our_hooks(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process attaches the flags, and starts another one by "spawn" to serve HTTP: that one loads plugins,
    and SGLang resolves flags there that are attached already."""
    installed: list[str] = []
    monkeypatch.setattr(hooks, "install_frontend", lambda: installed.append("hooks"))
    monkeypatch.setattr(routes, "add", lambda: installed.append("routes"))
    registered: list[str] = []
    monkeypatch.setattr(
        flags.compat.HookRegistry, "register", lambda target, *_: registered.append(target)
    )
    monkeypatch.delenv(flags.WORDS_ENV, raising=False)
    monkeypatch.setenv(flags.ENABLED_ENV, "1")
    flags.install()
    assert set(flags.compat.LAUNCHER_HOOK_TARGETS.values()) <= set(registered)
    args = _server_args()
    setattr(args, CONFIG, ReasonCacheConfig() if enabled else None)
    for module in ("managers.tokenizer_manager", "entrypoints.http_server"):
        name = f"sglang.srt.{module}"
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, SimpleNamespace()))
    flags.before_resolving(args)
    assert installed == ["hooks", "routes"] * enabled


def test_an_engine_takes_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(flags, "attach", lambda *seen: attached.append(seen[1:]))
    flags.engine_server_args(model_path="unused", enable_reasoncache={"when": "always"})
    assert attached == [(True, {"when": "always"})]

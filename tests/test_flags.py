# SPDX-License-Identifier: Apache-2.0
"""Flags, refusals and the switch, through SGLang's own argument parser."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reasoncache import arguments, compat, settings_table
from sglang_reasoncache.arguments import FLAGS, SET, arguments_of, flag_of
from sglang_reasoncache.config import ConfigError, ReasonCacheConfig
from sglang_reasoncache.filter.settings import PRESETS
from sglang_reasoncache.plugin import flags, refusals


def _namespace(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_cli_args(None, parser)
    return parser.parse_args(argv)


def _server_args(**fields: object) -> Any:
    """SGLang's record with its own defaults but for ``fields``, none of which it checks."""
    record = compat.ServerArgs(model_path="unused")
    for name, value in fields.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def _config(*argv: str) -> ReasonCacheConfig:
    """What the words on a command line come to, the record of SGLang aside."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "attach", lambda _record, _enabled, given: found.update(given))
        flags.from_cli_args(lambda _cls, _args: SimpleNamespace(), object, _namespace(*argv))
    return ReasonCacheConfig.from_mapping(found)


#: A value of every setting that is not its default.
OTHER_VALUES: dict[str, Any] = dict(
    **dict(
        policy="keydiff:budget=64",
        preset="memshare",
        when="always",
        block=9,
        percentile=55.5,
        warmup=3,
    ),
    **dict(tau_strict=0.8, tau_soft=0.6, length_factor=False, use_structure=False, fixed_tau=0.75),
    **dict(structure_tolerance=2, positions="corrected", align="index", publish="aliased"),
    **dict(apply="copy", admission_credit=0.25, calibration="seen.json", random_ratio=0.5),
    half_life=1000,
    **dict(
        match="steps",
        direction="oldest",
        min_age=7,
        min_run=1,
        span="response",
        max_pending=7,
        max_step_tokens=100,
        max_history_steps=9,
    ),
    allow_untested_sglang=True,
)


def test_every_setting_can_be_typed() -> None:
    """All of them, and each keyword of ``sglang.Engine``; twelve flags at most."""
    defaults = ReasonCacheConfig().to_dict()
    # This one is refused beside some of the others.
    alone = {"scope": "prompt"}
    assert OTHER_VALUES.keys() | alone.keys() == defaults.keys()
    for values in (OTHER_VALUES, alone):
        assert all(value != defaults[name] for name, value in values.items())
        expected = ReasonCacheConfig(**values)
        assert _config(*arguments_of(values)) == expected
        assert ReasonCacheConfig.from_mapping(values) == expected
    parser = argparse.ArgumentParser(add_help=False)
    flags.add_cli_args(None, parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert len(shown) <= 12 and all(action.help for action in shown)


def test_settings_of_several_lists_add_up() -> None:
    """A flag wins over the list, a later list over an earlier one."""
    given = (
        "--reasoncache-set",
        "match=steps,warmup=3, tau-soft=0.1",
        "--reasoncache-set",
        "warmup=4,block=2",
    )
    config = _config("--reasoncache-block", "8", *given)
    assert (config.warmup, config.tau_soft, config.block) == (4, 0.1, 8)
    assert arguments_of({"fixed_tau": None, "block": 4}) == ["--reasoncache-block", "4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup", r"must be key=value,\.\.\., got 'warmup'"),
        ("", "must be key=value"),
        ("warmup=3,", "must be key=value"),
        ("warmth=3", "warmth must be one of policy, .*, got '3'"),
        ("warmup=many", "warmup must be an integer, got 'many'"),
        ("warmup=1.5", "warmup must be an integer, got '1.5'"),
        ("tau_soft=low", "tau_soft must be a number, got 'low'"),
        ("length_factor=1", "length_factor must be true or false, got '1'"),
        ("half_life=-1", "half_life must be between 0 and .*, got -1"),
        ("align=words", "align must be one of tokens, index, got 'words'"),
        ("match=steps,tau_strict=0.5,tau_soft=0.6", "tau_soft must be at most"),
        ("tau_soft=0.6", "tau_soft must be left out unless match=steps"),
    ],
)
def test_a_bad_list_of_settings_is_refused_by_key(text: str, message: str) -> None:
    with pytest.raises((SystemExit, ConfigError), match=f"--reasoncache-set {message}"):
        _config("--reasoncache-set", text)


@pytest.mark.parametrize("flag", ["--reasoncache-tau-soft", "--no-reasoncache-length-factor"])
def test_a_flag_that_moved_says_where(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = flag.partition("reasoncache-")[2].replace("-", "_")
    for given in ([flag], [flag, "0.5"], [f"{flag}=0.5"]):
        with pytest.raises(SystemExit):
            _namespace(*given)
        assert f"is now --reasoncache-set {name}=VALUE" in capsys.readouterr().err


def test_messages_name_flags_that_can_be_typed() -> None:
    """A setting without a flag is named as it is given."""
    known = {flag_of(name) for name in FLAGS} | {SET}
    for file in Path(arguments.__file__).parent.rglob("*.py"):
        named = set(re.findall(r"--reasoncache-[a-z-]*[a-z]", file.read_text()))
        assert named <= known, file


def test_engine_keywords_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "attach", lambda _record, enabled, given: (enabled, given))
    monkeypatch.setattr(compat, "ServerArgs", SimpleNamespace, raising=False)
    found = flags.engine_server_args(
        enable_reasoncache=True,
        reasoncache_warmup=3,
        reasoncache_set="block=4,warmup=5",
        reasoncache_calibration=Path("there"),
    )
    assert found == (True, {"block": 4, "warmup": 3, "calibration": "there"})
    for other in (["block=4"], b"block=4", 5):
        with pytest.raises(ValueError, match=r"reasoncache-set must be key=value,..., got"):
            flags.engine_server_args(enable_reasoncache=True, reasoncache_set=other)


def test_settings_document_is_made_from_the_class() -> None:
    """``python -m sglang_reasoncache.settings_table > docs/settings.md``."""
    document = Path(__file__).parent.parent / "docs" / "settings.md"
    assert document.read_text() == "\n".join(settings_table.lines()) + "\n"


BAD_VALUES: dict[str, tuple[Any, ...]] = dict(
    block=(0, 1025, 16.0, True),
    percentile=(-1, 100.5, float("nan"), "80"),
    warmup=(-1,),
    tau_strict=(1.1,),
    positions=("sideways",),
    publish=("everything",),
    preset=("unknown",),
    align=("words", 5),
    admission_credit=(0.95,),
    max_step_tokens=(1,),
    calibration=(5, b"x"),
)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in BAD_VALUES for value in BAD_VALUES[field]]
)
def test_bad_value_names_flag_bound_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasonCacheConfig(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert flag_of(field) in message
    assert any(bound in message for bound in ("between ", "one of ", "must be text"))
    assert repr(value) in message


def test_every_preset_and_a_policy_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = "reasoncache+keydiff:share=0.5,anchor=mean_norm"
    for key, value in [*(("preset", name) for name in PRESETS), ("policy", text)]:
        given = vars(_namespace("--enable-reasoncache", f"--reasoncache-{key}", value))
        given = {name: value for name, value in given.items() if value is not None}
        assert given == {"enable_reasoncache": True, f"reasoncache_{key}": value}
    assert ReasonCacheConfig.from_mapping({"policy": text}).policies.shares
    with pytest.raises(SystemExit):
        _namespace("--reasoncache-preset", "p30")
    shown = capsys.readouterr().err
    assert all(name in shown for name in PRESETS)


_SWITCHES = """
enable_hierarchical_cache enable_lmcache enable_flexkv enable_hisparse enable_unified_memory
enable_streaming_session enable_session_radix_cache enable_return_routed_experts
enable_return_indexer_topk skip_tokenizer_init enable_dp_attention strip_thinking_cache
"""
IN_THE_WAY: dict[str, object] = dict(
    **dict.fromkeys(_SWITCHES.split(), True),
    **dict.fromkeys(("dcp_size", "pp_size", "attn_dp_size"), 2),
    **dict(speculative_algorithm="EAGLE", disaggregation_mode="decode", kv_canary="log"),
    **dict(radix_cache_backend="flexkv", dllm_algorithm="LowConfidence"),
)


@pytest.mark.parametrize("field", IN_THE_WAY)
def test_incompatible_flag_is_named(field: str) -> None:
    with pytest.raises(ValueError, match="cannot be combined with") as caught:
        refusals.check(_server_args(**{field: IN_THE_WAY[field]}))
    assert f"--{field.replace('_', '-')} (" in str(caught.value)


def test_memory_debugging_with_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals.check(_server_args(page_size=16))
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    refusals.check(_server_args(page_size=1))
    with pytest.raises(ValueError, match="SGLANG_DEBUG_MEMORY_POOL"):
        refusals.check(_server_args(page_size=16))


def test_other_sglang_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the operator insists."""
    monkeypatch.setattr(compat, "installed_version", lambda: "0.4.0")
    message = "found 0.4.0; pass --reasoncache-set allow_untested_sglang=true"
    with pytest.raises(ValueError, match=message):
        compat.check_version(allow_untested=False)
    compat.check_version(allow_untested=True)


def _python(*argv: str, platform: str = "reasoncache_cpu") -> subprocess.CompletedProcess[str]:
    """Run on a platform, ours for the CPU, sharing not switched on by a parent."""
    env = {k: v for k, v in os.environ.items() if k != "SGLANG_REASONCACHE_ENABLED"}
    env |= {"SGLANG_PLATFORM": platform, "CUDA_VISIBLE_DEVICES": ""}
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


_NOTHING_HOOKED = """
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
"""


def test_without_the_flag_only_flags_are_hooked() -> None:
    done = _python("-c", _NOTHING_HOOKED)
    assert done.returncode == 0, done.stderr
    assert "nothing but flags" in done.stdout


_ON_HOPPER = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups import model_override_base as base
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
argv = "--model-path {} --device cuda --enable-reasoncache".split()
with override_platform(is_cuda=True, is_hopper_with_cuda_12_3=True, has_flashinfer=True):
    args = prepare_server_args(argv)
    args.resolve_once()
print("attention:", *base.attention_backends_of(base.resolving_view(args)))
"""


def test_the_flag_alone_takes_attention_that_is_corrected(model_path: Path) -> None:
    """From a real command line to SGLang's resolution; ``test_attention_cuda.py`` has the branches."""
    done = _python("-c", _ON_HOPPER.format(model_path), platform="")
    assert "attention: flashinfer flashinfer" in done.stdout, done.stderr
    assert "reasoncache: takes --attention-backend flashinfer" in done.stderr


@pytest.mark.parametrize(
    "field", [f"{phase}attention_backend" for phase in ("", "prefill_", "decode_")]
)
def test_attention_that_reads_evicted_positions_is_refused_by_name(field: str) -> None:
    """Stock backends would take an evicted position's -1 for the last slot of the pool."""
    config = ReasonCacheConfig(policy="reasoncache+streamingllm:budget=64")
    flag = "--" + field.replace("_", "-")
    message = f"evicts positions, which {flag} torch_native would read; use reasoncache_cpu"
    with pytest.raises(ValueError, match=re.escape(f"{config.policy} {message}")):
        refusals.check_evicting(_server_args(**{field: "torch_native"}), config)
    for name in ("reasoncache_cpu", "flashinfer", "triton"):
        refusals.check_evicting(_server_args(**{field: name}), config)
    refusals.check_evicting(_server_args(**{field: "torch_native"}), ReasonCacheConfig())


def test_copies_that_would_race_are_refused_by_name() -> None:
    """On a GPU, where SGLang launches the next forward before rows are changed."""
    copy, alias = ReasonCacheConfig(apply="copy"), ReasonCacheConfig()
    message = "--reasoncache-set apply=copy writes .*: add --disable-overlap-schedule"
    with pytest.raises(ValueError, match=message):
        refusals.check_copy(_server_args(), copy, on_gpu=True)
    refusals.check_copy(_server_args(), copy, on_gpu=False)
    refusals.check_copy(_server_args(), alias, on_gpu=True)
    refusals.check_copy(_server_args(disable_overlap_schedule=True), copy, on_gpu=True)


FA3 = dict(page_size=16, attention_backend="fa3")
READS = "selects what a step reads, which --attention-backend fa3 does .*flashinfer"


@pytest.mark.parametrize(
    ("options", "apply", "message"),
    [
        ({}, "alias", "quest selects whole pages: --page-size must be at least 2 .*, got 1"),
        (FA3, "alias", READS),
        ({"page_size": 16}, "copy", "quest knows .* --reasoncache-set apply=copy writes"),
    ],
)
def test_what_does_not_go_with_selection_is_refused_by_name(
    options: dict[str, object], apply: str, message: str
) -> None:
    policy = "reasoncache+quest:budget=64"
    config = ReasonCacheConfig(policy=policy, apply=apply)
    with pytest.raises(ValueError, match=message):
        refusals.check_selector(_server_args(**options), config)
    refusals.check_selector(_server_args(**options), ReasonCacheConfig())
    for name in ("flashinfer", "triton"):
        args = _server_args(page_size=16, attention_backend=name)
        refusals.check_selector(args, ReasonCacheConfig(policy=policy))

# SPDX-License-Identifier: Apache-2.0
"""Methods by name, and the flags they stand for."""

from __future__ import annotations

import argparse

import pytest
from sglang_reasoncache.policy.presets import PRESETS

from eval.methods import METHODS, MethodError, find_method, find_methods, with_ratio
from eval.tiny_reasoner import EMBEDDED_FLAGS
from sglang_reasoncache.plugin.flags import add_cli_args


def test_dense_is_stock() -> None:
    method = find_method("dense", EMBEDDED_FLAGS)
    assert (method.name, method.flags, method.shares) == ("dense", (), False)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_method(name: str) -> None:
    method = find_method(name)
    assert method.flags == ("--enable-reasoncache", "--reasoncache-preset", name)
    assert method.title


def test_options_become_flags() -> None:
    method = find_method("reasoncache:block=32,use-structure=false,fixed_tau=0.8")
    assert method.flags[3:] == (
        "--reasoncache-block",
        "32",
        "--no-reasoncache-use-structure",
        "--reasoncache-fixed-tau",
        "0.8",
    )
    assert method.name == "reasoncache:block=32,use-structure=false,fixed_tau=0.8"
    assert "block=32" in method.title


def test_a_name_is_a_folder() -> None:
    assert "/" not in find_method("reasoncache:calibration=a/b.json").name


def test_flags_are_those_of_the_server() -> None:
    """SGLang's parser with our flags reads them back."""
    parser = argparse.ArgumentParser()
    add_cli_args(None, parser)
    method = find_method("reasoncache:use_structure=false,percentile=50", EMBEDDED_FLAGS)
    args = parser.parse_args(list(method.flags))
    assert (args.reasoncache_use_structure, args.reasoncache_percentile) == (False, 50.0)
    assert args.reasoncache_block == 8


def test_embedded_flags_unless_set() -> None:
    assert find_method("memshare", EMBEDDED_FLAGS).flags[-2:] == EMBEDDED_FLAGS
    assert find_method("memshare:block=4", EMBEDDED_FLAGS).flags.count("--reasoncache-block") == 1


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("sparse", "known are dense, reasoncache"),
        ("", "--methods"),
        ("reasoncache:block", "'block' is not key=value"),
        ("reasoncache:blocks=3", "no option 'blocks'"),
        ("reasoncache:preset=random", "no option 'preset'"),
        ("reasoncache:block=x", "block must be int, got 'x'"),
        ("reasoncache:block=0", "--reasoncache-block must be between 1 and 1024, got 0"),
        ("reasoncache:use_structure=maybe", "true or false"),
        ("reasoncache:match=dense", "no option 'match'"),
        ("dense:block=8", "dense takes no options"),
        ("random:match=reasoncache,random_ratio=0.2", "exclude"),
        ("random:random_ratio=0.2,match=reasoncache:block=8", "exclude"),
        ("random:match=", "'match=' is not key=value"),
        ("random:block=8,", "'' is not key=value"),
        ("random:match=memshare,", "'' is not key=value"),
        ("reasoncache:encoder=a b", "is no method"),
    ],
)
def test_refusals_name_the_fault(spec: str, told: str) -> None:
    with pytest.raises(MethodError, match="--methods") as refused:
        find_method(spec)
    assert told in str(refused.value)


def test_random_matches_reasoncache_by_default() -> None:
    methods = find_methods(["random", "dense", "reasoncache"])
    assert methods[0].match == "reasoncache"
    assert with_ratio(methods[0], 0.4321).flags[-2:] == ("--reasoncache-random-ratio", "0.4321")
    assert find_methods(["memshare", "random:match=memshare"])[1].match == "memshare"


def test_what_is_matched_can_have_options() -> None:
    target = "reasoncache:block=32,percentile=50"
    methods = find_methods([target, f"random:block=8,match={target}", f"random:match={target}"])
    assert [method.match for method in methods] == ["", target, target]
    assert methods[1].flags[3:] == ("--reasoncache-block", "8")
    assert methods[2].flags == find_method("random").flags


def test_a_given_ratio_matches_nothing() -> None:
    (method,) = find_methods(["random:random_ratio=0.4"])
    assert method.match == ""
    assert method.flags[-2:] == ("--reasoncache-random-ratio", "0.4")


@pytest.mark.parametrize(
    "specs",
    [
        ["dense", "random"],
        ["random:match=dense", "dense"],
        ["random:match=random"],
        ["reasoncache", "random:match=nothing"],
        ["dense", "dense"],
    ],
)
def test_what_random_cannot_match(specs: list[str]) -> None:
    with pytest.raises(MethodError, match="--methods"):
        find_methods(specs)


def test_every_method_is_a_valid_configuration() -> None:
    assert [find_method(name).title for name in METHODS] == list(METHODS.values())

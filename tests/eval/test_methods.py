# SPDX-License-Identifier: Apache-2.0
"""Methods by name, and the flags they stand for."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from eval.methods import METHODS, MethodError, find_method, find_methods, with_ratio
from eval.tiny_reasoner import EMBEDDED_SETTINGS
from sglang_reasoncache.config import parse_settings
from sglang_reasoncache.filter.presets import PRESETS
from sglang_reasoncache.plugin.flags import add_cli_args


def test_dense_is_stock() -> None:
    method = find_method("dense", EMBEDDED_SETTINGS)
    assert (method.name, method.flags, method.shares) == ("dense", [], False)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_method(name: str) -> None:
    method = find_method(name)
    assert method.flags == ["--enable-reasoncache", "--reasoncache-preset", name]
    assert method.title


def test_options_become_values_and_flags() -> None:
    """SGLang's parser with our flags reads them back."""
    spec = "reasoncache:block=32,use-structure=false,fixed_tau=0.8"
    method = find_method(spec, EMBEDDED_SETTINGS)
    own = {"block": 32, "use_structure": False, "fixed_tau": 0.8}
    assert method.values == {"preset": "reasoncache", **own}
    assert (method.name, method.title.count("block=32")) == (spec, 1)
    parser = argparse.ArgumentParser()
    add_cli_args(None, parser)
    args = parser.parse_args(method.flags)
    assert args.enable_reasoncache and args.reasoncache_preset == "reasoncache"
    (others,) = args.reasoncache_set
    assert {"block": args.reasoncache_block, **parse_settings(others)} == own


def test_a_name_is_a_folder() -> None:
    assert "/" not in find_method("reasoncache:calibration=a/b.json").name


def test_embedded_settings_unless_set() -> None:
    assert find_method("memshare", EMBEDDED_SETTINGS).flags[-2:] == ["--reasoncache-block", "8"]
    assert find_method("memshare:block=4", EMBEDDED_SETTINGS).values["block"] == 4


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("sparse", "known are dense, reasoncache"),
        ("", "--methods"),
        ("reasoncache:block", "'block' is not key=value"),
        ("reasoncache:blocks=3", "no option 'blocks'"),
        ("reasoncache:preset=random", "no option 'preset'"),
        ("reasoncache:block=x", "--reasoncache-block must be an integer, got 'x'"),
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
    assert with_ratio(methods[0], 0.43211).flags[-2:] == [
        "--reasoncache-set",
        "random_ratio=0.4321",
    ]
    assert find_methods(["memshare", "random:match=memshare"])[1].match == "memshare"


def test_what_is_matched_can_have_options() -> None:
    target = "reasoncache:block=32,percentile=50"
    methods = find_methods([target, f"random:block=8,match={target}", f"random:match={target}"])
    assert [method.match for method in methods] == ["", target, target]
    assert methods[1].values == {"preset": "random", "block": 8}
    assert methods[2].flags == find_method("random").flags


def test_a_given_ratio_matches_nothing() -> None:
    (method,) = find_methods(["random:random_ratio=0.4"])
    assert method.match == ""
    assert method.flags[-2:] == ["--reasoncache-set", "random_ratio=0.4"]


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


def test_further_words_come_last() -> None:
    method = dataclasses.replace(find_method("p50"), more=("--page-size", "8"))
    assert method.flags == [*find_method("p50").flags, "--page-size", "8"]

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


def test_every_preset_is_a_method_and_dense_is_stock() -> None:
    dense = find_method("dense", EMBEDDED_SETTINGS)
    assert (dense.name, dense.flags, dense.shares) == ("dense", [], False)
    for name in PRESETS:
        method = find_method(name)
        assert method.flags == ["--enable-reasoncache", "--reasoncache-preset", name]
    assert [find_method(name).title for name in METHODS] == list(METHODS.values())
    assert all(METHODS.values())


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
    # A name is a folder.
    assert "/" not in find_method("reasoncache:calibration=a/b.json").name
    assert find_method("memshare", EMBEDDED_SETTINGS).flags[-2:] == ["--reasoncache-block", "8"]
    assert find_method("memshare:block=4", EMBEDDED_SETTINGS).values["block"] == 4
    # Further words come last.
    method = dataclasses.replace(find_method("p50"), more=("--page-size", "8"))
    assert method.flags == [*find_method("p50").flags, "--page-size", "8"]


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


def test_what_random_matches() -> None:
    methods = find_methods(["random", "dense", "reasoncache"])
    assert methods[0].match == "reasoncache"
    ratio = ["--reasoncache-set", "random_ratio=0.4321"]
    assert with_ratio(methods[0], 0.43211).flags[-2:] == ratio
    assert find_methods(["memshare", "random:match=memshare"])[1].match == "memshare"
    # What is matched can have options, and a given ratio matches nothing.
    target = "reasoncache:block=32,percentile=50"
    methods = find_methods([target, f"random:block=8,match={target}", f"random:match={target}"])
    assert [method.match for method in methods] == ["", target, target]
    assert methods[1].values == {"preset": "random", "block": 8}
    assert methods[2].flags == find_method("random").flags
    (method,) = find_methods(["random:random_ratio=0.4321"])
    assert (method.match, method.flags[-2:]) == ("", ratio)
    refused = "dense random|random:match=dense dense|random:match=random|dense dense"
    for specs in (*refused.split("|"), "reasoncache random:match=nothing"):
        with pytest.raises(MethodError, match="--methods"):
            find_methods(specs.split())

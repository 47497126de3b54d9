# SPDX-License-Identifier: Apache-2.0
"""Tests how ``--reasoncache-policy`` is parsed, on a server's command line and in a method of ``eval.run``."""

import pickle
import shlex
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from eval.methods import MethodError, find_method
from sglang_reasoncache import policy_options, registry
from sglang_reasoncache.config import ConfigError, ReasonCacheConfig
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded
from sglang_reasoncache.eviction.policies.snapkv import SnapKV
from tests.eviction.rows import evict, view


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("reasoncache", []), ("none", []), ("streamingllm:budget=64", ["streamingllm"]),
        ("reasoncache+streamingllm:budget=64", ["streamingllm"]),
        ("l2norm:share=0.5+random:share=0.4", ["l2norm", "random"]),
        ("snapkv:budget=512,recent=64,window=16", ["snapkv"]),
        ("snapkv:budget=512:recent=64:window=16", ["snapkv"]),
    ],
)  # fmt: skip
def test_names_in_sequence(text: str, names: list[str]) -> None:
    """Commas or colons separate options."""
    choice = policy_options.parse(text)
    assert choice.shares is text.startswith("reasoncache")
    assert [name for name, _ in choice.evictors] == names
    if names == ["snapkv"]:
        assert choice.evictors[0].policy == SnapKV(budget=512, recent=64, window=16)


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_evictor_can_be_made(name: str) -> None:
    text = f"{name}:share=0.25,slack=8,when=short"
    [(_, policy)] = policy_options.parse(text).evictors
    assert policy_options.parse(text.replace(",", ":")).evictors == ((name, policy),)
    assert (policy.slack, policy.when, policy.allowed(101)) == (8, "short", 26)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "every NAME one of none, reasoncache, streamingllm, random, l2norm, keydiff, "),
        ("streamingllm", "budget or share of streamingllm given, one of the two"),
        ("streamingllm:budget=0", "budget of streamingllm between 1 and 10000000"),
        ("streamingllm:budget=many", "budget of streamingllm an integer, not 'many'"),
        ("streamingllm:share=1", "share of streamingllm above 0 and below 1"),
        ("streamingllm:budget=64:sinks=-1", "sinks of streamingllm between 0 and 65536"),
        ("random:share=0.5:when=0.9", "when of random one of always, short"),
        ("streamingllm:budget=64:window=3", "options of streamingllm among budget, share"),
        ("streamingllm:budget", "key=value for streamingllm instead of 'budget'"),
        ("streamingllm:budget=1:budget=2", "budget of streamingllm once"),
        ("random:budget=64:seed=-1", "seed of random between 0 and"),
        ("rkv:budget=64:mix=1.5", "mix of rkv between 0 and 1"),
        ("random:budget=64:recent=0", "recent of random between 1 and "),
        ("keydiff:budget=64+keydiff:budget=32", "with keydiff once"),
        ("reasoncache:block=8", "reasoncache without options"),
        ("none+streamingllm:budget=64", "none alone"),
        ("tova:budget=64", "or module:Class, not 'tova'"),
        (
            "tova:Tova:budget=64",
            "tova:Tova an evicting policy (ModuleNotFoundError: No module named 'tova'",
        ),
        ("json:Tova:budget=64", "json:Tova an evicting policy (AttributeError: "),
        (
            "json:JSONDecoder:budget=64",
            "json:JSONDecoder an evicting policy (not a class that extends",
        ),
        (
            "tests.unit.test_registry:Evens:budget=64:step=1",
            "step of tests.unit.test_registry:Evens between",
        ),
        (
            "tests.unit.test_registry:Evens",
            "budget or share of tests.unit.test_registry:Evens given",
        ),
        ("+", "every NAME one of none, reasoncache, "),
        ("streamingllm:budget=1_0", "budget of streamingllm an integer, not '1_0'"),
        ("streamingllm:budget=\u0663", "budget of streamingllm an integer, not"),
        ("streamingllm:share=0.\u0663", "share of streamingllm a number, not"),
        ("keydiff:budget=64:metric=angle", "metric of keydiff one of cosine, dot, euclidean"),
        ("snapkv:budget=64:prompt=false", "prompt of snapkv true, as it gives up positions of"),
        ("x" * 2000, "at most 1000 characters"),
        *((value, "got") for value in (5, None, ["streamingllm"])),
    ],
)
def test_a_bad_text_names_flag_bound_and_value(text: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasonCacheConfig(policy=text)
    shown = str(caught.value)
    assert shown.startswith("--reasoncache-policy must be NAME[:key=value,...][+NAME...]")
    assert message in shown
    assert repr(text) in shown


@dataclass(frozen=True)
class Evens(Evictor):
    """A policy outside the package: evicts every ``step``-th position first."""

    step: int = bounded(2, 2, 9)

    def scores(self, view: View) -> torch.Tensor:
        return torch.from_numpy(view.held % self.step)


@pytest.mark.parametrize("separator", [":", ","])
def test_a_policy_of_another_package(separator: str) -> None:
    """Its settings reach a scheduler pickled; there it evicts what its scores say."""
    words = separator.join(("reasoncache+tests.unit.test_registry:Evens", "budget=6", "step=4"))
    config = pickle.loads(pickle.dumps(ReasonCacheConfig(policy=words + ":recent=1")))
    assert config.shares
    [(name, policy)] = config.policies.evictors
    assert name == "tests.unit.test_registry:Evens"
    assert policy == Evens(budget=6, step=4, recent=1)
    assert evict(policy, view(12, owned=1), 12, 3) == [1, 4, 8]


def test_what_is_on() -> None:
    """Sharing needs the policy ``reasoncache`` and a percentile above 0. ``none`` switches everything off."""
    assert ReasonCacheConfig().shares
    assert not ReasonCacheConfig(policy="none").is_active
    eviction = ReasonCacheConfig(policy="reasoncache+random:share=0.5", percentile=0)
    assert not eviction.shares and eviction.is_active


def test_a_method_carries_a_policy() -> None:
    """Commas separate settings in a method of ``eval.run``, so colons separate the options of its policy."""
    spec = "reasoncache:policy=reasoncache+streamingllm:budget=256:sinks=8,percentile=90"
    method = find_method(spec)
    flags = dict(zip(method.flags[1::2], method.flags[2::2], strict=True))
    assert flags["--reasoncache-policy"] == "reasoncache+streamingllm:budget=256:sinks=8"
    assert flags["--reasoncache-percentile"] == "90.0"
    assert shlex.quote(spec) == spec, "needs no quotes in a shell"
    with pytest.raises(MethodError, match="sinks of streamingllm between"):
        find_method("reasoncache:policy=streamingllm:budget=256:sinks=-8")

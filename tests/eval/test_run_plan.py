# SPDX-License-Identifier: Apache-2.0
"""Order of the cells, flags of their servers, and what is derived from seeds."""

from __future__ import annotations

import pytest

from eval.methods import find_methods
from eval.runs.options import RunOptions
from eval.runs.plan import order, samples, sampling_seed, server_flags


def names(specs: list[str], seeds: list[int], tasks: tuple[str, ...] = ("t",)) -> list[str]:
    steps = order(tasks, find_methods(specs), seeds)
    return [f"{step.task}{step.seed}:{step.method.name}" for step in steps]


def test_methods_turn_round_between_seeds() -> None:
    assert names(["dense", "reasoncache", "p20"], [4, 5, 6]) == [
        "t4:dense", "t4:reasoncache", "t4:p20",
        "t5:p20", "t5:reasoncache", "t5:dense",
        "t6:dense", "t6:reasoncache", "t6:p20",
    ]  # fmt: skip


def test_tasks_come_one_after_the_other() -> None:
    assert names(["dense"], [0, 1], ("a", "b")) == ["a0:dense", "a1:dense", "b0:dense", "b1:dense"]


def test_a_matched_method_comes_after_what_it_matches() -> None:
    assert names(["random", "dense", "reasoncache"], [0, 1]) == [
        "t0:dense", "t0:reasoncache", "t0:random",
        "t1:reasoncache", "t1:dense", "t1:random",
    ]  # fmt: skip


def test_flags_of_a_server() -> None:
    method = find_methods(["reasoncache"])[0]
    options = RunOptions(
        model="m", kv_budget=500, server_flags=("--tp", "2"), decode_log_interval=5
    )
    flags = server_flags(options, ["--of-task"], method, 3, {"temperature": 0.0})
    assert flags == [
        "--decode-log-interval", "5", "--allow-auto-truncate", "--stream-interval", "8",
        "--max-total-tokens", "500", "--of-task", "--tp", "2", *method.flags,
    ]  # fmt: skip


@pytest.mark.parametrize("of", ["task", "run"])
def test_one_stream_interval(of: str) -> None:
    """A replay's own, or the operator's, takes the place of ours."""
    method = find_methods(["dense"])[0]
    own = ["--stream-interval", "16"] if of == "task" else ["--stream-interval=16"]
    options = RunOptions(model="m", server_flags=tuple(own) if of == "run" else ())
    flags = server_flags(options, own if of == "task" else [], method, 0, {})
    assert [flag for flag in flags if flag.startswith("--stream-interval")] == own[:1]
    assert flags[-len(own) :] == own


def test_sampling_draws_other_numbers_with_each_seed() -> None:
    """Greedy servers serve every seed; others begin with numbers of the seed."""
    method = find_methods(["dense"])[0]
    for body, same in (({"temperature": 0.0}, True), ({"temperature": 0.6}, False), ({}, False)):
        flags = [server_flags(RunOptions(), [], method, seed, body) for seed in (0, 1)]
        assert (flags[0] == flags[1]) == same
        assert samples(body) != same


def test_seeds_of_requests() -> None:
    seeds = {sampling_seed(seed, f"p-{i}") for seed in (0, 1) for i in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "p-1") == sampling_seed(0, "p-1")
    assert sampling_seed(0, "\ud800") >= 0

# SPDX-License-Identifier: Apache-2.0
"""Order of the cells, flags of their servers, and what is derived from seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.methods import find_methods
from eval.replay.model import train_tokenizer
from eval.runs.folder import RunError
from eval.runs.options import RunOptions
from eval.runs.plan import Plan, Step, order, samples, sampling_seed
from eval.tasks.harness import Problem


@pytest.mark.parametrize(
    ("tasks", "specs", "seeds", "expected"),
    [
        # Methods turn round between seeds.
        ("t", "dense,reasoncache,p20", (4, 5, 6),
         "t4:dense t4:reasoncache t4:p20 t5:p20 t5:reasoncache t5:dense t6:dense t6:reasoncache t6:p20"),
        ("ab", "dense", (0, 1), "a0:dense a1:dense b0:dense b1:dense"),
        # One that is matched comes before what matches it.
        ("t", "random,dense,reasoncache", (0, 1),
         "t0:dense t0:reasoncache t0:random t1:reasoncache t1:dense t1:random"),
    ],
)  # fmt: skip
def test_order(tasks: str, specs: str, seeds: tuple[int, ...], expected: str) -> None:
    steps = order(tasks, find_methods(specs.split(",")), seeds)
    names = [f"{step.task}{step.seed}:{step.method.name}" for step in steps]
    assert names == expected.split()


class Asked:
    """A task as a plan needs it."""

    def __init__(self, flags: Sequence[str] = (), problems: Sequence[Problem] = ()) -> None:
        self.server_flags, self.problems = tuple(flags), list(problems)


def planned(options: RunOptions, task: Asked, body: Mapping[str, Any]) -> Plan:
    """A plan of a task ``t`` that needs no loading."""
    plan = object.__new__(Plan)
    plan.options, plan.body = options, dict(body)
    plan.tasks = {("t", seed): task for seed in options.seeds}  # type: ignore[misc]
    return plan


def flags_of(
    options: RunOptions, task_flags: Sequence[str], spec: str, seed: int, body: Mapping[str, Any]
) -> list[str]:
    method = find_methods([spec])[0]
    plan = planned(options, Asked(task_flags), body)
    return plan.server_flags(Step("t", seed, method), method)


def test_flags_of_a_server() -> None:
    options = RunOptions(
        model="m",
        tasks=("t",),
        seeds=(3,),
        kv_budget=500,
        server_flags=("--tp", "2"),
        decode_log_interval=5,
    )
    assert flags_of(options, ["--of-task"], "reasoncache", 3, {"temperature": 0.0}) == [
        "--decode-log-interval", "5", "--allow-auto-truncate", "--stream-interval", "8",
        "--max-total-tokens", "500", "--of-task", "--tp", "2",
        *find_methods(["reasoncache"])[0].flags,
    ]  # fmt: skip


@pytest.mark.parametrize("of", ["task", "run"])
def test_one_stream_interval(of: str) -> None:
    """A replay's own, or the operator's, takes the place of ours."""
    own = ["--stream-interval", "16"] if of == "task" else ["--stream-interval=16"]
    options = RunOptions(model="m", tasks=("t",), server_flags=tuple(own) if of == "run" else ())
    flags = flags_of(options, own if of == "task" else [], "dense", 0, {})
    assert [flag for flag in flags if flag.startswith("--stream-interval")] == own[:1]
    assert flags[-len(own) :] == own


def test_sampling_draws_other_numbers_with_each_seed() -> None:
    """Greedy servers serve every seed; others begin with numbers of the seed."""
    for body, same in (({"temperature": 0.0}, True), ({"temperature": 0.6}, False), ({}, False)):
        options = RunOptions(tasks=("t",), seeds=(0, 1))
        flags = [flags_of(options, [], "dense", seed, body) for seed in (0, 1)]
        assert (flags[0] == flags[1]) == same
        assert samples(body) != same


def test_a_replay_needs_room_for_prompt_and_record(tmp_path: Path) -> None:
    train_tokenizer(["zzz"]).save_pretrained(tmp_path)
    free = Problem("free", [{"role": "user", "content": "x" * 999}], {})
    forced = Problem("p", [{"role": "user", "content": "abc"}], {"custom_logit_processor": ""}, 100)
    options = RunOptions(model=str(tmp_path), tasks=("t",))
    plan = planned(options, Asked(problems=[free, forced]), {})
    # <|user|>, a, b, c, <|assistant|>, 100 forced tokens, and two slots that SGLang keeps.
    plan.refuse_what_cannot_fit("t", 107)
    told = r"--kv-budget: t: problem 'p' needs at least 107 .* got 106"
    with pytest.raises(RunError, match=told):
        plan.refuse_what_cannot_fit("t", 106)


def test_seeds_of_requests() -> None:
    seeds = {sampling_seed(seed, f"p-{i}") for seed in (0, 1) for i in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "p-1") == sampling_seed(0, "p-1")
    assert sampling_seed(0, "\ud800") >= 0

# SPDX-License-Identifier: Apache-2.0
"""Helpers for requests of a world, and a fixture that checks that in the end every slot is free."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.policies.contract import NamedPolicy
from tests.property.world import Setup, World

SINGLE = Setup(page=1, block=4, slots=200)
PAGED = Setup(page=4, block=4, slots=200)
SETUPS = pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)


@pytest.fixture(autouse=True)
def everything_comes_back(
    published_config: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[World, Req]]]:
    """When a test has ended, finishes all requests of all worlds and checks that every slot is free."""
    made: list[tuple[World, Req]] = []
    request = World.request

    def noted(world: World, *arguments: Any) -> Req:
        made.append((world, request(world, *arguments)))
        return made[-1][1]

    monkeypatch.setattr(World, "request", noted)
    yield made
    for world, req in made:
        if req.kv.holds_kv:
            world.finish(req)
    for world, _ in made:
        world.assert_empty()


def world_of(setup: Setup, *policies: Any, **options: Any) -> World:
    """A world with ``policies`` as its evicting policies."""
    named = [NamedPolicy(f"policy{i}", policy) for i, policy in enumerate(policies)]
    return World(setup, evictors=named, **options)


def begun(setup: Setup, *policies: Any, **options: Any) -> tuple[World, Req]:
    """A world and a request in it; without ``policies`` a test scripts the evictions."""
    world = world_of(setup, *policies, **options)
    return world, world.start()


def steps(world: World, *reqs: Req, count: int = 1, first: int = 0) -> None:
    """Runs decode steps, each followed by a poll; ``first``: token of the first step."""
    for token in range(first, first + count):
        for req in reqs:
            world.step(req, token)
        world.controller.after_decode([*reqs])


def evicted(world: World, req: Req) -> list[int]:
    return np.flatnonzero(world.row(req) < 0).tolist()

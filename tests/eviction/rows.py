# SPDX-License-Identifier: Apache-2.0
"""What tests of evicting do with the requests of a world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.policies.contract import NamedPolicy
from tests.property.world import Setup, World, decode, start

SINGLE = Setup(page=1, block=4, slots=200, publish="exact")
PAGED = Setup(page=4, block=4, slots=200, publish="exact")
SETUPS = pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)


def world_of(setup: Setup, *policies: Any, **options: Any) -> World:
    """A world whose evicting policies are these."""
    named = [NamedPolicy(f"policy{i}", policy) for i, policy in enumerate(policies)]
    return World(setup, evictors=named, **options)


def begun(setup: Setup, *policies: Any, **options: Any) -> tuple[World, Req]:
    """A world and a request in it; without policies it answers what a test tells it to."""
    world = world_of(setup, *policies, **options)
    return world, start(world)


def steps(world: World, req: Req, count: int, first: int = 0) -> None:
    """Decode steps, each followed by a poll; ``first``: token of the first one."""
    for token in range(first, first + count):
        decode(world, req, token)
        world.controller.after_decode([req])


def refusals(world: World) -> dict[str, int]:
    return dict(world.controller.stats.eviction_refusals)


def evicted(world: World, req: Req) -> list[int]:
    return np.flatnonzero(world.row(req) < 0).tolist()

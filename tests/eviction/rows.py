# SPDX-License-Identifier: Apache-2.0
"""Helpers run requests in a ``World`` (a scheduler without a model), and a fixture checks that every slot is
free in the end. Other helpers make views (what policies see of a request) and list what a policy evicts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.policies.contract import NamedPolicy, View
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.row_state import Decision
from sglang_reasoncache.kernels.rotation import KeyRotation
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
    """A world and a request whose KV is computed. Without ``policies`` the test chooses what is evicted."""
    world = world_of(setup, *policies, **options)
    return world, world.start()


def steps(world: World, *reqs: Req, count: int = 1, first: int = 0) -> None:
    """Runs ``count`` decode steps, a poll after each. The tokens are ``first``, ``first + 1`` and so on."""
    for token in range(first, first + count):
        for req in reqs:
            world.step(req, token)
        world.controller.after_decode([*reqs])


def evicted(world: World, req: Req) -> list[int]:
    return np.flatnonzero(world.row(req) < 0).tolist()


@dataclass
class GivenLayer:
    """A layer of a ``View``. ``keys``: ``[held, heads, dim]``. ``given``: attention weights
    ``[queries, held]``; the last row has the weights of the query at position ``written - 1``. That of the
    forward pass in flight is missing."""

    keys: torch.Tensor
    given: torch.Tensor | None
    written: int
    rotation: KeyRotation | None = None

    def stored(self) -> torch.Tensor:
        return self.keys

    def used(self) -> torch.Tensor:
        return self.keys

    def queries(self, first: int, end: int | None = None) -> Any:
        raise NotImplementedError

    def weights(
        self, first: int, end: int | None = None, newest: int | None = None
    ) -> torch.Tensor:
        assert self.given is not None, "a policy that reads no queries got some"
        oldest = self.written - len(self.given)
        until = len(self.given) if end is None else max(end - oldest, 0)
        some = self.given[max(first - oldest, 0) : until]
        return some[len(some) - (newest or len(some)) :].sum(dim=0)[None]


def view(
    written: int, weights: np.ndarray | None = None, *, prompt: int | None = None, owned: int = 0,
    page: int = 1, gone: Iterable[int] = (), keys: torch.Tensor | None = None, seed: int = 7,
    shared: Iterable[tuple[int, int, int]] = (),
) -> View:  # fmt: skip
    """``gone``: evicted positions. ``shared``: (dst, src, length). ``keys``: ``[layers, held, heads, dim]``."""
    held = np.setdiff1d(np.arange(written), np.fromiter(gone, dtype=np.int64))
    keys = torch.zeros(1, len(held), 1, 2) if keys is None else keys
    row = HostRow()
    row.locate(0, range(page, written + page))
    for dst, src, length in shared:
        row.read(dst, src, length, row, [])
    given = None if weights is None else torch.from_numpy(weights).float()
    assert given is None or given.shape[1] == len(held)
    first, worth = row.first_readers(held, page)
    return View(
        prompt=owned if prompt is None else prompt, written=written, owned=owned, page=page,
        held=held, first_readers=first, worth=worth, seed=seed,
        layers=[GivenLayer(of_layer, given, written) for of_layer in keys],
    )  # fmt: skip


def evict(policy: Evictor, now: View, slots: int, count: int | None = None) -> list[int]:
    """The positions that the policy evicts from a request with ``slots`` slots. ``count``: how many slots must
    become free; None: those beyond the budget."""
    excess = policy.excess(now, slots) if count is None else count
    candidates = policy.candidates(now)
    if excess <= 0 or not len(candidates):
        return []
    found = Decision(now, candidates, policy.scores(now), excess).positions(Ranks())
    return [int(at) for at in found]

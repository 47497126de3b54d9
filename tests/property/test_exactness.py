# SPDX-License-Identifier: Apache-2.0
"""Who may read approximate KV, and where each key is: the random requests of ``test_scheduling.py``, in a world
whose slots say more.

The slots of ``test_groups.py`` hold a token and a salt, so they cannot tell an approximation from the KV that
the same token has behind other KV. Here a slot also says behind which tokens its KV was computed, whether any
of that was an approximation, at which position, and since which flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.cache.tree.base import first_shared
from sglang_reasoncache.custom_params import takes_part
from sglang_reasoncache.filter.process import FilterProcess
from tests.property.test_groups import RandomMeter
from tests.property.test_memory import explore
from tests.property.test_scheduling import SchedulingMachine, counted, machine_of
from tests.property.world import NOTHING, Setup, World
from tests.server.faulty.waiting_reasoncache import wait_for

SETUPS = [
    Setup(page=1, block=3, slots=170, when="short", swap=1 << 14, continues=True),
    Setup(page=4, block=2, slots=200, when="always", swap=1 << 14, continues=True),
    Setup(page=1, block=2, slots=170, continues=True, quotes=True),
]
QUICK_OPERATIONS = 3_000


class Written(NamedTuple):
    """What a slot holds. ``path``: names the token and all before it if the KV is exact, else below 0.
    ``epoch``: number of flushes before it was written."""

    shown: int
    path: int
    position: int
    epoch: int


class ExactWorld(World):
    """A world whose slots hold indices of ``written``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.written = [Written(0, 0, 0, 0)]
        self.epoch = self.made = 0
        self._paths: dict[tuple[int, object], int] = {}
        super().__init__(*args, **named)

    def request(
        self, name: str, prompt: Sequence[int], opted_out: bool = False, salt: str | None = None
    ) -> Req:
        """Some requests ask for log-probabilities of their prompt, some for those of their output, and more opt
        out than in other worlds."""
        self.made += 1
        req = super().request(name, prompt, opted_out or self.made % 6 == 3, salt)
        start = {1: 0, 2: -1}.get(self.made % 5)
        if start is not None:
            req.return_logprob = True
            req.logprob_start_len = start
        return req

    def held(self) -> np.ndarray:
        """For each slot, the index of what it holds."""
        return super().contents()

    def contents(self) -> np.ndarray:
        """What the slots of ``test_groups.py`` would hold."""
        shown = [each.shown for each in self.written]
        # An empty slot is the last of these.
        return np.array([*shown, NOTHING], dtype=np.int64)[self.held()]

    def paths(self, tokens: list[int], salt: str | None) -> list[int]:
        """The path of each token, if its KV is exact."""
        path = 0
        found = []
        for key in ((0, salt), *tokens):
            path = self._paths.setdefault((path, key), len(self._paths) + 1)
            found.append(path)
        return found[1:]

    def follows(self, path: int, token: int, other: int) -> bool:
        """Whether ``other`` is the path of ``token`` behind ``path``."""
        return self._paths.get((path, token)) == other


class ExactMachine(SchedulingMachine):
    """``opted``, ``prompts``: checks of requests that opted out, and of prompts with log-probabilities.
    ``approximate``: checks of requests that read approximations."""

    world: ExactWorld
    opted = prompts = approximate = flushes = 0

    def _make_world(self, setup: Setup, **named: Any) -> World:
        return ExactWorld(setup, RandomMeter, **named)

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        """Write KV that is exact if all that it was computed from is."""
        world = self.world
        end = req.kv.kv_committed_len
        start = end - len(slots)
        paths = self._paths(req, end)
        read = world.held()[world.row(req)[:start]].tolist()
        assert all(index > 0 for index in read), "reads a slot that nobody wrote"
        exact = all(world.written[i].path == p for i, p in zip(read, paths, strict=False))
        shown = self._shown(req, end)
        new = []
        for at in range(start, end):
            new.append(len(world.written))
            path = paths[at] if exact else -len(world.written)
            world.written.append(Written(shown[at], path, at, world.epoch))
        world.write(slots, new)
        where = torch.as_tensor(slots).long()
        world.cached_at.positions[where] = torch.arange(start, end, dtype=torch.int32)

    def _paths(self, req: Req, end: int) -> list[int]:
        return self.world.paths(self._tokens(req, end), req.cache_salt)

    # -- what an operator does while requests run --------------------------------------

    @rule(which=st.integers(0, 15))
    def pause(self, which: int) -> None:
        """A pause retracts all requests. Sometimes weights change meanwhile, and the cache is flushed."""
        if which > 2:
            return
        with self.world.controller.pausing():
            for req in list(self.running):
                self._retract(req)
            if self.chunked is not None:
                self.world.retract(self.chunked)
                self.waiting.append(self.chunked)
                self.chunked = None
        if which > 1:
            return
        self.world.controller.weights_changed()
        self.world.tree.reset()
        self.world.rows.clear()
        self.world.allocator.clear()
        self.world.epoch += 1
        type(self).flushes += 1

    # -- checks ---------------------------------------------------------------------

    @invariant()
    def everybody_reads_what_is_theirs(self) -> None:
        super().everybody_reads_what_is_theirs()
        held = self.world.held()
        for req in self.holding():
            self._exact_request(req, held)
        self._exact_continuations(held)
        if self.world.setup.core == "python":
            self._exact_tree(held)

    def _read(self, held: np.ndarray, slots: Any) -> list[Written]:
        """What ``slots`` hold: written since the last flush, and cached at the position that we recorded."""
        slots = np.asarray(slots)
        found = [self.world.written[index] for index in held[slots].tolist()]
        assert all(each.epoch == self.world.epoch for each in found), "KV from before a flush"
        recorded = self.world.cached_at.positions.numpy()[slots].tolist()
        assert recorded == [each.position for each in found], "keys are elsewhere"
        return found

    def _exact_request(self, req: Req, held: np.ndarray) -> None:
        end = req.kv.kv_committed_len
        found = self._read(held, self.world.row(req)[:end])
        paths = self._paths(req, end)
        exact = [each.path == path for each, path in zip(found, paths, strict=True)]
        positions = [each.position for each in found]
        shared = first_shared(req, self.world.tree._host_row(req.kv))
        shared = end if shared is None else min(shared, end)
        assert all(exact[:shared]), "approximate before the first shared position"
        assert positions[:shared] == list(range(shared)), "shifted before the first shared position"
        assert positions == list(range(end)) or self.world.tree.reads_shifted([req])
        prompt = len(req.origin_input_ids)
        if not takes_part(req):
            assert all(exact), "a request that opted out reads approximate KV"
            type(self).opted += 1
        if req.return_logprob and 0 <= req.logprob_start_len < prompt:
            assert all(exact[:prompt]), "log-probabilities of a prompt that is approximate"
            type(self).prompts += 1
        type(self).approximate += not all(exact)

    def _exact_continuations(self, held: np.ndarray) -> None:
        for part in self.world.allocator.continuations:
            found = self._read(held, part.slots)[: part.exact]
            end = part.start + part.exact
            assert [each.position for each in found] == list(range(part.start, end))
            paths = [each.path for each in found]
            tokens = part.tokens[1 : part.exact].tolist()
            steps = zip(paths, tokens, paths[1:], strict=False)
            assert all(path > 0 for path in paths), "approximate, but said to be exact"
            assert all(self.world.follows(*step) for step in steps)

    def _exact_tree(self, held: np.ndarray) -> None:
        """SGLang's own tree holds exact KV only, each key where it was computed."""
        for node, data in self.world.nodes():
            if data.value is None:
                continue
            keys = []
            above = node
            while above is not self.world.tree.root_node:
                keys.append(above.key)
                above = above.parent
            tokens = [token for key in reversed(keys) for token in key.token_ids[: len(key)]]
            found = self._read(held, data.value)
            start = len(tokens) - len(found)
            paths = self.world.paths(tokens, node.key.cache_salt)[start:]
            assert [each.path for each in found] == paths, "an approximation in SGLang's tree"
            assert [each.position for each in found] == list(range(start, len(tokens)))


@pytest.mark.property
@pytest.mark.usefixtures("published_config")
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_who_reads_approximations(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    with machine_of(ExactMachine, setup) as machine:

        def all_seen() -> bool:
            rare = (machine.opted, machine.prompts, machine.approximate, machine.flushes)
            return all(rare) and bool(machine.continued)

        explore(machine, QUICK_OPERATIONS, len(SETUPS), rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    names = ("opted", "prompts", "approximate", "flushes", "continued", "restored")
    print(setup, counted(machine, *names))
    assert all_seen()

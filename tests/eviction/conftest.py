# SPDX-License-Identifier: Apache-2.0
"""The end of tests that evict on SGLang's pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req

from tests.property.world import World, assert_empty, finish


@pytest.fixture
def everything_comes_back(
    published_config: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """At the end all requests of all worlds finish, and then every slot is free."""
    made: list[tuple[World, Req]] = []
    request = World.request

    def noted(world: World, *arguments: Any) -> Req:
        made.append((world, request(world, *arguments)))
        return made[-1][1]

    monkeypatch.setattr(World, "request", noted)
    yield
    for world, req in made:
        if req.kv.holds_kv:
            finish(world, req)
    for world, _ in made:
        assert_empty(world)

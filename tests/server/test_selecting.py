# SPDX-License-Identifier: Apache-2.0
"""Policies that select what a step reads, in a live server, by the example of Quest."""

from __future__ import annotations

from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server.harness import wait_until_idle
from tests.server.problems import problems, report, series, solve
from tests.server.quest_rule import assert_quest_decides, assert_reads_less
from tests.server.specs import QUEST, SHARING_AND_QUEST

BOTH = pytest.mark.parametrize("server", [QUEST, SHARING_AND_QUEST], indirect=True)


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_selection_equals_masking_in_every_layer(server: ServerProcess, reference: Any) -> None:
    assert_quest_decides(server, reference)


@BOTH
def test_reads_less_and_frees_nothing(server: ServerProcess) -> None:
    assert_reads_less(server)
    wait_until_idle(server)
    seen = report(server)
    assert seen["evictors"] == []
    assert seen["totals"]["positions_evicted"] == 0


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_prometheus_tells_what_was_read(server: ServerProcess) -> None:
    solve(server, problems(6, seed=44))
    selection, found = report(server)["selection"], series(server)
    for field in ("positions_held", "positions_read"):
        published = found[f"sglang:reasoncache_selection_{field}_total"]
        # The last steps may not have been published yet.
        assert 0.5 * selection[field] < published <= selection[field]


@pytest.mark.parametrize("server", [SHARING_AND_QUEST], indirect=True)
def test_shared_pages_are_selected_too(server: ServerProcess) -> None:
    solve(server, problems(16, seed=43))
    assert report(server)["totals"]["blocks_shared"] > 4

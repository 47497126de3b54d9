# SPDX-License-Identifier: Apache-2.0
"""Policies that select what a step reads, in a live server, by the example of Quest."""

from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server.harness import wait_until_idle
from tests.server.problems import problems, report, series, solve
from tests.server.reference import assert_quest_decides, assert_reads_less
from tests.server.specs import QUEST


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_selection_equals_masking_in_every_layer(server: ServerProcess, reference: Any) -> None:
    assert_quest_decides(server, reference)


@pytest.mark.parametrize("server", [QUEST], indirect=True)
def test_reads_less_and_frees_nothing(server: ServerProcess) -> None:
    """Prometheus tells what was read."""
    solve(server, problems(8, seed=43))
    wait_until_idle(server)
    seen, selection = report(server), assert_reads_less(server, 0.8)
    assert seen["evictors"] == []
    assert seen["totals"]["positions_evicted"] == 0
    published = series(server)
    for field in ("positions_held", "positions_read"):
        # The last steps may not have been published yet.
        told = published[f"selection_{field}_total"]
        assert 0.5 * selection[field] < told <= selection[field]

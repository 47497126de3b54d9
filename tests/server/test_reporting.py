# SPDX-License-Identifier: Apache-2.0
"""What an operator can see of sharing: Prometheus, the endpoint, the log line."""

from __future__ import annotations

import pytest

from eval.serving import ServerProcess
from tests.server.harness import wait_until_idle
from tests.server.problems import problems, report, series, solve
from tests.server.specs import EXACT

SERVER = pytest.mark.parametrize("server", [EXACT], indirect=True)


@SERVER
def test_prometheus_counts_what_the_endpoint_counts(server: ServerProcess) -> None:
    """Series stand beside SGLang's own and grow by what happened."""
    before, seen_before = series(server), report(server)["totals"]
    solve(server, problems(6, seed=12))
    wait_until_idle(server)
    after, seen = series(server), report(server)["totals"]
    for field in ("blocks_shared", "blocks_compared", "steps_seen", "steps_with_candidate"):
        name = f"sglang:reasoncache_{field}_total"
        grown = after[name] - before.get(name, 0.0)
        # The last steps without a candidate may not have been published yet.
        assert 0 < grown <= seen[field] - seen_before[field]
    assert after["sglang:reasoncache_poll_seconds_count"] > 0
    assert 0 < after["sglang:reasoncache_memory_saving_ratio"] < 1
    assert "sglang:reasoncache_slots_saved_now" in after


@SERVER
def test_endpoint_and_log_line(server: ServerProcess) -> None:
    """The endpoint describes settings, totals and requests; the decode log line has our words."""
    start = server.log_size()
    solve(server, problems(4, seed=13))
    seen = report(server)
    assert seen["config"]["block"] == seen["block"] == 8
    assert seen["config"]["positions"] == "corrected"
    assert seen["threshold"]["warm"]
    assert seen["totals"]["filter_seconds"] > 0
    assert seen["totals"]["steps_shed"] == 0
    assert (seen["totals"]["filter_restarts"], seen["totals"]["filter_given_up"]) == (0, 0)
    assert 0 < seen["totals"]["affected_ratio"] < 1
    entry = max(seen["recent"], key=lambda request: request["shared_positions"])
    assert entry["shared_positions"] == 8 * len(entry["blocks"])
    assert all(src + 8 <= dst for dst, src in entry["blocks"])
    states = server.get("/server_info").json()["internal_states"]
    assert states[0]["reasoncache"]["totals"]["blocks_shared"] > 0
    assert "#shared token: " in server.log_text(start)

# SPDX-License-Identifier: Apache-2.0
"""A load that swings between one or two requests and many more than fit, samples of one prompt among
them. ``REASONCACHE_SOAK_SECONDS`` sets how long."""

import os
import random
import time

import pytest

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import assert_whole, wait_until_idle
from tests.server.problems import accuracy, problems, report, solve

SECONDS = float(os.environ.get("REASONCACHE_SOAK_SECONDS", "60"))
SAMPLES = 4


@pytest.mark.parametrize("server", [specs.SWINGING], indirect=True)
def test_only_a_server_that_is_short_shares(server: ServerProcess) -> None:
    choose, end, wave = random.Random(1), time.monotonic() + SECONDS, 0
    right = asked = shared = 0
    while time.monotonic() < end or not shared:
        wave += 1
        before = report(server)["totals"]["blocks_shared"]
        few = wave % 2 == 1
        todo = problems(choose.randint(1, 2) if few else choose.randint(24, 48), seed=100 + wave)
        if wave % 4 == 0:
            todo = [problem for problem in todo[::SAMPLES] for _ in range(SAMPLES)]
        right += round(accuracy(todo, solve(server, todo)) * len(todo))
        asked += len(todo)
        wait_until_idle(server)
        seen = report(server)
        now = seen["totals"]["blocks_shared"] - before
        shared += now
        assert seen["disabled"] is None and seen["totals"]["blocks_missed"] == 0
        assert not (few and now), "SGLang had enough slots"
    assert right >= 0.97 * asked
    print(f"{wave} waves, {asked} responses, {right} right, {shared} blocks shared")
    assert_whole(server)

# SPDX-License-Identifier: Apache-2.0
"""Servers on which the responses to one prompt share slots."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import generate, wait_until_idle
from tests.server.problems import OPT_OUT, prompts, report, series

SAMPLED = {"temperature": 0.8}


@pytest.mark.parametrize("server", [specs.ALIASED], indirect=True)
def test_samples_share_with_each_other(server: ServerProcess) -> None:
    before = series(server)
    todo = prompts(3, seed=51)
    with ThreadPoolExecutor(len(todo)) as pool:
        sampling = {**SAMPLED, "n": 4}
        made = list(
            pool.map(lambda text: generate(server, text, 700, sampling_params=sampling), todo)
        )
    assert [len(samples) for samples in made] == [4] * 3
    wait_until_idle(server)
    seen, after = report(server), series(server)
    totals = seen["totals"]
    assert totals["slots_saved_across_total"] > 100 and totals["blocks_shared_across"] > 12
    assert 0 < totals["across_ratio"] < 1 and seen["slots_saved_across_now"] == 0
    name = "slots_saved_across_total"
    assert 0 < after[name] - before.get(name, 0.0) <= totals[name]
    assert after["slots_saved_across_now"] == 0


@pytest.mark.parametrize("server", [specs.ALIASED], indirect=True)
def test_nobody_reads_what_another_salt_or_an_opted_out_request_wrote(
    server: ServerProcess,
) -> None:
    """The same prompt and, greedily, the same response, all at once."""
    [text] = prompts(1, seed=52)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "salted": {"cache_salt": "secret"},
        "keyed": {"extra_key": "another"},
        "out": {"sampling_params": OPT_OUT},
    }
    todo = [(f"{kind}-{i}", options) for i in range(3) for kind, options in kinds.items()]
    with ThreadPoolExecutor(len(todo)) as pool:
        list(pool.map(lambda job: generate(server, text, 700, rid=job[0], **job[1]), todo))
    wait_until_idle(server)
    across = dict.fromkeys(kinds, 0)
    for entry in report(server)["recent"]:
        kind = entry["rid"].partition("-")[0]
        for *_, source in entry["blocks_across"] if kind in kinds else ():
            across[kind] += 1
            assert source.partition("-")[0] == kind
    # Memory decides which of them run together.
    assert across["out"] == 0 and sum(across.values()) > 0

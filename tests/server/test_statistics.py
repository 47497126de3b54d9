# SPDX-License-Identifier: Apache-2.0
"""Policies that read attention statistics, in a live server, by the example of R-KV."""

from __future__ import annotations

from typing import Any

import pytest

from eval.serving import ServerProcess
from tests.server.masking import differences, respond
from tests.server.problems import assert_frees_slots, problems, report, solve
from tests.server.rkv_rule import assert_rkv_decides
from tests.server.specs import RKV, SHARING_AND_RKV, SNAPKV_H2O
from tests.server.test_evicting import MEAN_ROUNDING, MOST_ROUNDING

ALL = pytest.mark.parametrize("server", [RKV, SHARING_AND_RKV, SNAPKV_H2O], indirect=True)


@pytest.mark.parametrize("server", [RKV], indirect=True)
def test_rkv_equals_masking(server: ServerProcess, reference: Any) -> None:
    equals_masking(server, reference)


@pytest.mark.parametrize("server", [SNAPKV_H2O], indirect=True)
def test_snapkv_and_h2o_equal_masking(server: ServerProcess, reference: Any) -> None:
    """One has the prompt, the other the response, and keeps to its budget."""
    for found in equals_masking(server, reference):
        prompt = found["prompt_tokens"]
        assert any(start + length < prompt - 7 for _, start, length in found["evictions"])
        assert any(start >= prompt for _, start, length in found["evictions"])
        length = prompt + found["output_tokens"]
        assert 90 <= length - found["evicted_positions"] <= 90 + 16 + 8


def equals_masking(server: ServerProcess, reference: Any) -> list[dict[str, Any]]:
    """Log-probabilities are those of a loop whose attention is masked where positions went."""
    prompts = [f"<|user|> {p.prompt} <|assistant|>" for p in problems(6, seed=21)]
    compared, right, dense = 0, 0.0, 0.0
    responses = respond(server, prompts)
    for text, found in zip(prompts, responses, strict=True):
        assert found["retractions"] == 0
        assert found["evicted_positions"] > 50
        off = differences(reference, text, found)
        assert off.mean() < MEAN_ROUNDING and off.max() < MOST_ROUNDING
        compared += len(off)
        right += float(off.sum())
        dense += float(differences(reference, text, found, None).sum())
    print(compared, right, dense)
    assert compared > 1000
    assert right < dense / 30
    return responses


@pytest.mark.parametrize("server", [RKV], indirect=True)
def test_what_goes_is_what_the_rule_says(server: ServerProcess, reference: Any) -> None:
    assert_rkv_decides(server, reference)


@ALL
def test_frees_slots_under_load(server: ServerProcess) -> None:
    assert_frees_slots(server, seed=32)


@pytest.mark.parametrize("server", [SHARING_AND_RKV], indirect=True)
def test_shares_and_evicts_on_the_same_rows(server: ServerProcess) -> None:
    solve(server, problems(12, seed=33))
    seen = report(server)
    assert seen["totals"]["blocks_shared"] > 12
    assert seen["totals"]["positions_evicted"] > seen["totals"]["slots_freed_by_eviction"] > 0
    assert any(row["blocks"] and row["evictions"] for row in seen["recent"])
    rows = [row for row in seen["recent"] if row["retractions"]]
    assert any(
        sum(run[2] for run in row["evictions"]) > row["evicted_positions"] > 0 for row in rows
    )

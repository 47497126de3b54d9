# SPDX-License-Identifier: Apache-2.0
"""Rows of a run folder, each field with a default."""

from __future__ import annotations

from typing import Any

from eval.runs.records import Leg, Moment, Response, Result


def response(problem: str, **changes: Any) -> Response:
    row: dict[str, Any] = {"started": 0.5, "first_token": 1.0, "ended": 2.0, "leg": 0, "text": ""}
    row |= {"request_id": "r", "prompt_tokens": 5, "output_tokens": 11, "finish_reason": "stop"}
    return Response(problem_id=problem, **{**row, **changes})


def result(problem: str, right: bool, group: str = "", tokens: int = 5) -> Result:
    return Result(problem, right, float(right), None, "", group, tokens)


def leg(number: int = 0, totals: dict[str, Any] | None = None, **changes: Any) -> Leg:
    row: dict[str, Any] = {"seconds": 10.0, "output_tokens": 100, "responses": 4, "decode_steps": 9}
    row |= {"retractions": 1, "leaked_slots": 0, "command": ["serve"]}
    row |= {"report": {"totals": totals} if totals else {}}
    return Leg(leg=number, **{**row, **changes})


def moment(
    step: int, running: int = 1, used: int = 10, saved: int = 3, rate: float = 100
) -> Moment:
    return Moment(0, step, running, 0, used, saved, rate)

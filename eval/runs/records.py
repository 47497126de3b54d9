# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk, one JSON object per record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Record:
    """A frozen row of plain JSON values."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read a row; fields that a later version added are passed over. Raises ValueError: a field
        is missing."""
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in values.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Response(Record):
    """One answered (or failed) request. Times in seconds since its leg began.

    Attributes:
        leg: server session of the cell; a resumed run adds legs.
        text: all that was streamed; reasoning that a server sends apart comes first,
            between ``<think>`` and ``</think>``.
        prompt_tokens, output_tokens: counted by the server.
        first_token: when the first text arrived, None if none did.
        finish_reason: as the server gave it, "" if it gave none.
        error: what went wrong, None for a complete response.
    """

    problem_id: str
    leg: int
    request_id: str
    text: str
    prompt_tokens: int
    output_tokens: int
    started: float
    first_token: float | None
    ended: float
    finish_reason: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Result(Record):
    """One graded response; ``group`` is the problem's."""

    problem_id: str
    correct: bool
    score: float
    extracted: str | None
    note: str
    group: str
    output_tokens: int


@dataclass(frozen=True)
class Moment(Record):
    """The server during a decode step, as its own log tells.

    Attributes:
        step: number of the logged line within the leg.
        running, queued: requests in the batch, and those that wait.
        used, saved: KV slots in use, and those that sharing made unnecessary.
        tokens_per_s: generation throughput by the server's own clock.
    """

    leg: int
    step: int
    running: int
    queued: int
    used: int
    saved: int
    tokens_per_s: float


@dataclass(frozen=True)
class Leg(Record):
    """One server session of a cell.

    Attributes:
        seconds: from the first request sent to the last response ended.
        output_tokens, responses: of complete ones.
        decode_steps: decode forwards, from the log's lines times their interval.
        retractions: requests that were thrown out of a batch and recomputed.
        report: the scheduler's entry of ``GET /reasoncache``, {} for a stock server.
        leaked_slots: slots in use after the last response and a flush.
        command: the server's command line, [] for one that was only given as URL.
        ended: whether its last request ended with the server alive; one that was stopped has
            requests whose time counts and whose tokens are lost.
        kv_slots: KV slots that the server really has, of one data-parallel scheduler.
        cut_prompts: prompts longer than the model's context or the KV slots, which the server
            cut; None for a given server, whose log is out of reach.
    """

    leg: int
    seconds: float
    output_tokens: int
    responses: int
    decode_steps: int
    retractions: int
    report: dict[str, Any]
    leaked_slots: int | None
    command: list[str]
    ended: bool = True
    kv_slots: int | None = None
    cut_prompts: int | None = None

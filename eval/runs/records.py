# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk, one JSON object per record. Times in seconds since the leg began."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Response:
    """One answered (or failed) request."""

    problem_id: str
    leg: int  # server session of the cell; a resumed run adds legs
    request_id: str
    text: str  # all that was streamed; reasoning that a server sends apart first, in <think> tags
    prompt_tokens: int  # counted by the server, as output_tokens
    output_tokens: int
    started: float
    first_token: float | None  # when the first text arrived
    ended: float
    finish_reason: str = ""  # as the server gave it
    error: str | None = None  # what went wrong, None for a complete response


@dataclass(frozen=True)
class Result:
    """One graded response; ``group`` is the problem's."""

    problem_id: str
    correct: bool
    score: float
    extracted: str | None
    note: str
    group: str
    output_tokens: int


@dataclass(frozen=True)
class Moment:
    """The server during a decode step, as its own log tells."""

    leg: int
    step: int  # number of the logged line within the leg
    running: int  # requests in the batch
    queued: int  # requests that wait
    used: int  # KV slots in use
    saved: int  # KV slots that sharing and eviction made unnecessary
    tokens_per_s: float  # generation throughput by the server's own clock


@dataclass(frozen=True)
class Leg:
    """One server session of a cell."""

    leg: int
    seconds: float  # from the first request sent to the last response ended
    output_tokens: int  # of complete responses
    responses: int  # complete ones
    decode_steps: int  # decode forwards, from the log's lines times their interval
    retractions: int  # requests that were thrown out of a batch and recomputed
    report: dict[str, Any]  # the scheduler's entry of GET /reasoncache, {} for a stock server
    leaked_slots: int | None  # slots in use after the last response and a flush
    command: list[str]  # the server's command line, [] for one that was only given as URL
    # Whether its last request ended with the server alive; one that was stopped has requests whose
    # time counts and whose tokens are lost.
    ended: bool = True
    kv_slots: int | None = None  # those that the server really has, of one data-parallel scheduler
    # Prompts longer than the model's context or the KV slots, which the server cut; None for a
    # given server, whose log is out of reach.
    cut_prompts: int | None = None

# SPDX-License-Identifier: Apache-2.0
"""Measures one cell against one server: requests, and what the server says about them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.runs.client import Ended, Request, send_all
from eval.runs.folder import Cell, RunError
from eval.runs.options import RunOptions
from eval.runs.records import Leg, Response
from eval.runs.servers import Server
from eval.server_log import cut_prompts, moments, retractions
from eval.serving import ServerError

_WHERE = "the model's context or the KV slots"


def next_leg(cell: Cell) -> int:
    """A number that no earlier leg of the cell used, not even one that was killed."""
    used = [row.leg for row in cell.responses()]
    used += [row.leg for row in cell.legs()] + [row.leg for row in cell.timeline()]
    names = [path.stem.removeprefix("server-") for path in cell.folder.glob("server-*.log")]
    used += [int(name) for name in names if name.isdecimal()]
    return max(used, default=-1) + 1


def warm_up(
    server: Server, requests: Sequence[Request], options: RunOptions, advance: Callable[[], None]
) -> None:
    """Send requests whose answers are not kept. Raises ServerError: the server died, or answered
    none."""
    responses: list[Response] = []

    def ended(response: Response) -> None:
        responses.append(response)
        advance()

    _send(server, requests, 0, options, ended, attempts=1)
    if responses and all(response.error for response in responses):
        raise ServerError(f"{server.url}: every warm-up request failed: {responses[0].error}")


def measure(
    cell: Cell,
    requests: Sequence[Request],
    server: Server,
    options: RunOptions,
    advance: Callable[[], None],
) -> Leg:
    """One leg of a cell: every response is on disk the moment it ends, the rest follows. However
    this ends, what the log and a living server tell about the leg is kept. Raises ServerError: the
    server died; RunError: requests still run after the last response, or the flush is refused;
    OSError: something cannot be written."""
    leg = next_leg(cell)
    server.clear()
    slots, offset = server.kv_slots(), server.log_size()
    responses: list[Response] = []

    def ended(response: Response) -> None:
        cell.append(response)
        responses.append(response)
        if response.error is None:
            advance()

    report: dict[str, Any] | None = None
    whole, leaked = False, None

    def keep() -> Leg:
        complete = [row for row in responses if row.error is None]
        log = server.log_text(offset)
        timeline = moments(log, leg)
        first = min((row.started for row in responses), default=0.0)
        record = Leg(
            leg=leg,
            seconds=max((row.ended for row in responses), default=0.0) - first,
            output_tokens=sum(row.output_tokens for row in complete),
            responses=len(complete),
            decode_steps=len(timeline) * options.decode_log_interval,
            retractions=retractions(log),
            report=report or {},
            leaked_slots=leaked,
            command=list(server.command),
            ended=whole,
            kv_slots=slots,
            cut_prompts=cut_prompts(log) if server.command else None,
        )
        cell.append(*timeline, record)
        if record.command:
            cell.log_path(leg).write_text(log, encoding="utf-8")
        return record

    try:
        _send(server, requests, leg, options, ended, options.attempts)
        whole = True
        server.settle()
        report = server.report()
        leaked = server.clear()
    except BaseException:
        # What has ended the leg is what the caller must hear of, not what fails after it.
        with contextlib.suppress(OSError, ServerError, RunError):
            if report is None:
                with contextlib.suppress(ServerError):
                    server.check()
                    report = server.report()
            keep()
        raise
    return keep()


def warnings(slots: int, wanted: int | None, longest: int) -> list[str]:
    """What an operator should know before a cell: it has ``slots``, was to have ``wanted``, and
    the greatest ``max_tokens`` is ``longest``."""
    found = []
    if wanted is not None and slots < wanted:
        found.append(f"the server has {slots} KV slots, not the {wanted} of --kv-budget")
    if longest >= slots:
        found.append(f"max_tokens is {longest}, the server has {slots} KV slots: longer are cut")
    return found


def faults(leg: Leg, responses: Sequence[Response], limits: Mapping[str, int]) -> list[str]:
    """What did not fit into a leg, and what its server did not give back. ``responses`` are the
    cell's, ``limits`` the ``max_tokens`` by problem."""
    found = []
    if leg.leaked_slots:
        found.append(f"{leg.leaked_slots} KV slots leaked")
    if leg.cut_prompts:
        found.append(f"{leg.cut_prompts} prompts were cut: longer than {_WHERE}")
    cut = sum(
        row.finish_reason == "length" and row.output_tokens < limits.get(row.problem_id, 0)
        for row in responses
        if row.error is None and row.leg == leg.leg
    )
    if cut:
        found.append(f"{cut} responses were cut before max_tokens: {_WHERE} were full")
    return found


def _send(
    server: Server,
    requests: Sequence[Request],
    leg: int,
    options: RunOptions,
    ended: Ended,
    attempts: int,
) -> None:
    timeout, at_once = options.request_timeout, options.in_flight
    asyncio.run(
        send_all(server.url, server.model, requests, leg, ended, timeout, at_once, attempts)
    )
    server.check()

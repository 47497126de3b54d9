# SPDX-License-Identifier: Apache-2.0
"""Measures one cell against one server: warm-up, requests, and what the server says about them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from eval.runs.client import Listeners, Request, drive
from eval.runs.folder import Cell, RunError
from eval.runs.options import RunOptions
from eval.runs.progress import Bar
from eval.runs.records import Leg, Response
from eval.runs.servers import Server
from eval.server_log import cut_prompts, moments, retractions
from eval.serving import ServerError

_LOG_NAME = re.compile(r"server-(\d+)\.log")


def next_leg(cell: Cell) -> int:
    """A number that no earlier leg of the cell used, not even one that was killed."""
    used = [row.leg for row in cell.responses()]
    used += [row.leg for row in cell.legs()] + [row.leg for row in cell.timeline()]
    names = (_LOG_NAME.fullmatch(path.name) for path in cell.folder.glob("server-*.log"))
    used += [int(name[1]) for name in names if name]
    return max(used, default=-1) + 1


def warm_up(
    server: Server, requests: Sequence[Request], options: RunOptions, bar: Bar
) -> list[Response]:
    """Send requests whose answers are not kept, and empty the server's caches after.

    Raises:
        ServerError: the server died, or answered none.
    """
    responses: list[Response] = []

    def ended(response: Response) -> None:
        responses.append(response)
        bar.advance()

    _drive(server, requests, 0, options, Listeners(bar.meter.count, ended), attempts=1)
    server.check()
    if responses and all(response.error for response in responses):
        raise ServerError(f"{server.url}: every warm-up request failed: {responses[0].error}")
    return responses


def measure(
    cell: Cell, requests: Sequence[Request], server: Server, options: RunOptions, bar: Bar
) -> Leg:
    """One leg of a cell: every response is on disk the moment it ends, the rest follows.

    However this ends, what the log and a living server tell about the leg is kept.

    Raises:
        ServerError: the server died.
        RunError: requests still run after the last response, or the flush is refused.
        OSError: something cannot be written.
    """
    leg = next_leg(cell)
    server.clear()
    slots, offset = server.kv_slots(), server.log_size()
    responses: list[Response] = []

    def ended(response: Response) -> None:
        cell.append(response)
        responses.append(response)
        if response.error is None:
            bar.advance()

    report: dict[str, Any] | None = None
    whole, leaked = False, None

    def keep() -> Leg:
        complete = [row for row in responses if row.error is None]
        log = server.log_text(offset)
        timeline = moments(log, leg)
        record = Leg(
            leg=leg,
            seconds=max((row.ended for row in responses), default=0.0)
            - min((row.started for row in responses), default=0.0),
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
        cell.folder.mkdir(parents=True, exist_ok=True)
        if record.command:
            cell.log_path(leg).write_text(log, encoding="utf-8")
        for moment in timeline:
            cell.append(moment)
        cell.append(record)
        return record

    try:
        _drive(server, requests, leg, options, Listeners(bar.meter.count, ended), options.attempts)
        server.check()
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


def _drive(
    server: Server,
    requests: Sequence[Request],
    leg: int,
    options: RunOptions,
    heard: Listeners,
    attempts: int,
) -> None:
    timeout, room = options.request_timeout, options.in_flight
    drive(server.url, server.model, requests, leg, heard, timeout, room, attempts)

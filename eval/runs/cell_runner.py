# SPDX-License-Identifier: Apache-2.0
"""Measures one cell against one server: warm-up, requests, and what the server says about them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence

from eval.runs.client import Listeners, Request, connect, send_all
from eval.runs.folder import Cell
from eval.runs.options import RunOptions
from eval.runs.progress import Bar
from eval.runs.records import Leg, Response
from eval.runs.servers import Server
from eval.server_log import moments, retractions
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

    However this ends, what the log tells about the leg is kept.

    Raises:
        ServerError: the server died.
    """
    leg = next_leg(cell)
    server.clear()
    offset = server.log_size()
    responses: list[Response] = []

    def ended(response: Response) -> None:
        cell.append(response)
        responses.append(response)
        if response.error is None:
            bar.advance()

    report, leaked = {}, None
    try:
        _drive(server, requests, leg, options, Listeners(bar.meter.count, ended), options.attempts)
        server.check()
        server.settle()
        report, leaked = server.report(), server.clear()
    finally:
        with contextlib.suppress(OSError):
            log = server.log_text(offset)
            record = _record(leg, responses, log, options.decode_log_interval, server)
            record = Leg(**{**record.to_dict(), "report": report, "leaked_slots": leaked})
            _keep(cell, record, log)
    return record


def _drive(
    server: Server,
    requests: Sequence[Request],
    leg: int,
    options: RunOptions,
    heard: Listeners,
    attempts: int,
) -> None:
    async def drive() -> None:
        async with connect(server.url, options.request_timeout) as client:
            await send_all(
                client,
                server.model,
                requests,
                leg,
                time.monotonic(),
                heard,
                in_flight=options.in_flight,
                attempts=attempts,
            )

    asyncio.run(drive())


def _record(
    leg: int, responses: Sequence[Response], log: str, interval: int, server: Server
) -> Leg:
    complete = [row for row in responses if row.error is None]
    begin = min((row.started for row in responses), default=0.0)
    end = max((row.ended for row in responses), default=0.0)
    return Leg(
        leg=leg,
        seconds=end - begin,
        output_tokens=sum(row.output_tokens for row in complete),
        responses=len(complete),
        decode_steps=len(moments(log, leg)) * interval,
        retractions=retractions(log),
        report={},
        leaked_slots=None,
        command=list(server.command),
    )


def _keep(cell: Cell, record: Leg, log: str) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    if record.command:
        cell.log_path(record.leg).write_text(log, encoding="utf-8")
    for moment in moments(log, record.leg):
        cell.append(moment)
    cell.append(record)

# SPDX-License-Identifier: Apache-2.0
"""Measures one cell against one server: requests, and what the server and its log say of them."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.runs.client import Ended, Request, send_all
from eval.runs.folder import Cell, Leg, Moment, Response, RunError
from eval.runs.options import RunOptions
from eval.runs.servers import Server
from eval.serving import ServerError

_WHERE = "the model's context or the KV slots"
# SGLang's log: one decode line in --decode-log-interval steps. Shared and evicted positions need
# no slot of their own.
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#(?:full )?token: (\d+)")
_SAVED = re.compile(r"#(?:shared|evicted) token: (\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
_RETRACT = re.compile(r"#retracted_reqs: (\d+)")
# Each scheduler says so, of several tensor-parallel ones the first as well as the others.
_CUT = re.compile(r"^(.*)Request length is longer than the KV cache pool size .*Truncated", re.M)
_OTHER_RANK = re.compile(r"\bTP[1-9]\d*\b")


def retractions(log: str) -> int:
    return sum(int(n) for n in _RETRACT.findall(log))


def cut_prompts(log: str) -> int:
    """Prompts that were cut to what the model or the memory holds, in a stretch of log."""
    return sum(not _OTHER_RANK.search(prefix) for prefix in _CUT.findall(log))


def moments(log: str, leg: int) -> list[Moment]:
    """What each decode line of a log says; data-parallel schedulers write lines of their own."""
    found: list[Moment] = []
    for line in log.splitlines():
        decode = _DECODE.search(line)
        if decode is not None:
            speed, queued = (pattern.search(line) for pattern in (_SPEED, _QUEUED))
            saved = sum(map(int, _SAVED.findall(line)))
            waiting, rate = int(queued[1]) if queued else 0, float(speed[1]) if speed else 0.0
            running, used = int(decode[1]), int(decode[2])
            found.append(Moment(leg, len(found), running, waiting, used, saved, rate))
    return found


def warm_up(
    server: Server, requests: Sequence[Request], options: RunOptions, advance: Callable[[], None]
) -> None:
    """Send requests whose answers are not kept; ServerError if the server died or answered none."""
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
    """Measure a leg of a cell. Every response is on disk the moment it ends; whatever goes wrong, the
    log and the report of a living server are kept. Raises ServerError: the server died; RunError:
    requests still run after the last response, or the flush is refused; OSError."""
    leg = _next_leg(cell)
    server.clear()
    told: dict[str, Any] = {"leg": leg, "kv_slots": server.kv_slots(), "report": {}, "ended": False}
    told |= {"leaked_slots": None, "command": list(server.command)}
    offset = server.log_size()
    responses: list[Response] = []

    def ended(response: Response) -> None:
        cell.append(response)
        responses.append(response)
        if response.error is None:
            advance()

    try:
        _send(server, requests, leg, options, ended, options.attempts)
        told["ended"] = True
        server.settle()
        told["report"] = server.report()
        told["leaked_slots"] = server.clear()
    except BaseException:
        # What has ended the leg is what the caller must hear of, not what fails after it.
        with contextlib.suppress(OSError, ServerError, RunError):
            with contextlib.suppress(ServerError):
                server.check()
                told["report"] = told["report"] or server.report()
            _keep(cell, told, responses, server.log_text(offset), options)
        raise
    return _keep(cell, told, responses, server.log_text(offset), options)


def _keep(
    cell: Cell, told: dict[str, Any], responses: Sequence[Response], log: str, options: RunOptions
) -> Leg:
    complete = [row for row in responses if row.error is None]
    timeline = moments(log, told["leg"])
    first = min((row.started for row in responses), default=0.0)
    record = Leg(
        **told,
        seconds=max((row.ended for row in responses), default=0.0) - first,
        output_tokens=sum(row.output_tokens for row in complete),
        responses=len(complete),
        decode_steps=len(timeline) * options.decode_log_interval,
        retractions=retractions(log),
        cut_prompts=cut_prompts(log) if told["command"] else None,
    )
    cell.append(*timeline, record)
    if record.command:
        cell.log_path(record.leg).write_text(log, encoding="utf-8")
    return record


def warnings(slots: int, wanted: int | None, longest: int) -> list[str]:
    """What an operator should know before a cell: it has ``slots`` KV slots and not ``wanted``, or
    its ``longest`` ``max_tokens`` does not fit."""
    found = []
    if wanted is not None and slots < wanted:
        found.append(f"the server has {slots} KV slots, not the {wanted} of --kv-budget")
    if longest >= slots:
        found.append(f"max_tokens is {longest}, the server has {slots} KV slots: longer are cut")
    return found


def faults(leg: Leg, responses: Sequence[Response], limits: Mapping[str, int]) -> list[str]:
    """What did not fit into a leg, or was not given back; ``limits``: ``max_tokens`` by problem."""
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


def _next_leg(cell: Cell) -> int:
    """A number that no earlier leg of the cell used, not even one that was killed."""
    used = [row.leg for rows in (cell.responses(), cell.legs(), cell.timeline()) for row in rows]
    names = [path.stem.removeprefix("server-") for path in cell.folder.glob("server-*.log")]
    used += [int(name) for name in names if name.isdecimal()]
    return max(used, default=-1) + 1


def _send(
    server: Server,
    requests: Sequence[Request],
    leg: int,
    options: RunOptions,
    ended: Ended,
    attempts: int,
) -> None:
    how = (ended, options.request_timeout, options.in_flight, attempts)
    asyncio.run(send_all(server.url, server.model, requests, leg, *how))
    server.check()

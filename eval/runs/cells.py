# SPDX-License-Identifier: Apache-2.0
"""Measures a cell (method, task, seed) on a server: sends its requests, reads the server's figures and log."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence

from eval.runs.client import Request, send_all
from eval.runs.folder import Cell, Moment, Response, Served
from eval.runs.servers import Server
from eval.serving import MODEL_NAME, ServerError

_WHERE = "the model's context or the KV slots"
# The log is read because SGLang's metrics show only current values. SGLang logs a decode line every
# --decode-log-interval steps. _SAVED: counts of shared and evicted positions, which need no slot of their own.
_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#(?:full )?token: (\d+)")
_SAVED = re.compile(r"#(?:shared|evicted) token: (\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
# Every scheduler logs these lines; of tensor-parallel schedulers, only the lines of rank 0 are counted.
_RETRACT = re.compile(r"^(.*)#retracted_reqs: (\d+)", re.M)
_CUT = re.compile(r"^(.*)Request length is longer than the KV cache pool size .*Truncated", re.M)
_OTHER_RANK = re.compile(r"\bTP[1-9]\d*\b")


def retractions(log: str) -> int:
    return sum(int(n) for prefix, n in _RETRACT.findall(log) if not _OTHER_RANK.search(prefix))


def cut_prompts(log: str) -> int:
    """Counts the log lines that report a prompt cut by SGLang to fit the model's context or the KV slots."""
    return sum(not _OTHER_RANK.search(prefix) for prefix in _CUT.findall(log))


def moments(log: str) -> list[Moment]:
    """What each decode line of a log says. Each data-parallel scheduler writes its own lines."""
    timeline: list[Moment] = []
    for line in log.splitlines():
        decode = _DECODE.search(line)
        if decode is not None:
            speed, queued = (pattern.search(line) for pattern in (_SPEED, _QUEUED))
            saved = sum(map(int, _SAVED.findall(line)))
            waiting = int(queued[1]) if queued else 0
            rate = float(speed[1]) if speed else 0.0
            running = int(decode[1])
            used = int(decode[2])
            timeline.append(Moment(len(timeline), running, waiting, used, saved, rate))
    return timeline


def warm_up(server: Server, requests: Sequence[Request], timeout_s: float) -> None:
    """Send requests whose answers are not kept. Raises ServerError if the server died or answered none."""
    responses: list[Response] = []
    asyncio.run(send_all(server.url, MODEL_NAME, requests, responses.append, timeout_s))
    server.process.check_alive()
    if responses and all(response.error for response in responses):
        raise ServerError(f"{server.url}: every warm-up request failed: {responses[0].error}")


def measure(
    cell: Cell, requests: Sequence[Request], server: Server, advance: Callable[[], object], *,
    log_interval: int, timeout_s: float, in_flight: int | None = None, attempts: int = 1,
) -> Served:  # fmt: skip
    """Measure a cell and write its files. Calls ``advance`` after each answer. Raises OSError if a file
    cannot be written, ServerError if the server died, RunError if requests do not end or the flush fails."""
    server.clear()
    offset = server.process.log_size()
    cpu_before = server.cpu_seconds()
    responses: list[Response] = []

    def ended(response: Response) -> None:
        responses.append(response)
        if response.error is None:
            advance()

    how = (ended, timeout_s, in_flight, attempts)
    asyncio.run(send_all(server.url, MODEL_NAME, requests, *how))
    server.process.check_alive()
    server.settle()
    cpu_seconds = server.cpu_seconds() - cpu_before
    log = server.process.log_text(offset)
    reports = server.reports()
    timeline = moments(log)
    complete = [row for row in responses if row.error is None]
    first = min((row.started for row in responses), default=0.0)
    served = Served(
        seconds=max((row.ended for row in responses), default=0.0) - first,
        output_tokens=sum(row.output_tokens for row in complete), responses=len(complete),
        decode_steps=len(timeline) * log_interval, retractions=retractions(log), reports=reports,
        leaked_slots=server.clear(), command=list(server.command), kv_slots=server.kv_slots(),
        cut_prompts=cut_prompts(log), cpu_seconds=cpu_seconds,
    )  # fmt: skip
    cell.write(responses, timeline, served)
    return served


def faults(cell: Cell, served: Served, limits: Mapping[str, int]) -> list[str]:
    """Messages about leaked slots, cut prompts and cut responses. ``limits``: ``max_tokens`` by problem id."""
    messages = []
    if served.leaked_slots:
        messages.append(f"{served.leaked_slots} KV slots leaked")
    if served.cut_prompts:
        messages.append(f"{served.cut_prompts} prompts were cut: longer than {_WHERE}")
    cut = sum(
        row.finish_reason == "length" and row.output_tokens < limits.get(row.problem_id, 0)
        for row in cell.answered().values()
    )
    if cut:
        messages.append(f"{cut} responses were cut before max_tokens: {_WHERE} were full")
    return messages

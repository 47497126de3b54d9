# SPDX-License-Identifier: Apache-2.0
"""What a run looked like from SGLang's own log, the same for every server.

A server logs one decode step in ``--decode-log-interval``. :func:`summarise` needs an
interval of 1, so that every step leaves its line; :func:`moments` takes any.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from eval.runs.records import Moment

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#(?:full )?token: (\d+)")
_SHARED = re.compile(r"#shared token: (\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
_RETRACT = re.compile(r"#retracted_reqs: (\d+)")


@dataclass(frozen=True)
class LogSummary:
    """Figures over the decode steps found in a stretch of log; zeros when there is none."""

    decode_steps: int
    mean_running: float
    peak_slots: int
    mean_slots: float
    retractions: int


def summarise(log: str) -> LogSummary:
    """Read the stretch of log that one measured run wrote."""
    steps = [(int(running), int(slots)) for running, slots in _DECODE.findall(log)]
    running = [r for r, _ in steps] or [0]
    slots = [s for _, s in steps] or [0]
    return LogSummary(
        decode_steps=len(steps),
        mean_running=statistics.fmean(running),
        peak_slots=max(slots),
        mean_slots=statistics.fmean(slots),
        retractions=retractions(log),
    )


def retractions(log: str) -> int:
    """Requests thrown out of a batch in a stretch of log."""
    return sum(int(n) for n in _RETRACT.findall(log))


def moments(log: str, leg: int) -> list[Moment]:
    """One :class:`Moment` for each decode line of a stretch of log, in its order.

    A stock server's lines have nothing shared. With several data-parallel schedulers each
    writes lines of its own.
    """
    found: list[Moment] = []
    for line in log.splitlines():
        decode = _DECODE.search(line)
        if decode is not None:
            shared, speed, queued = (p.search(line) for p in (_SHARED, _SPEED, _QUEUED))
            found.append(
                Moment(
                    leg=leg,
                    step=len(found),
                    running=int(decode[1]),
                    queued=int(queued[1]) if queued else 0,
                    used=int(decode[2]),
                    saved=int(shared[1]) if shared else 0,
                    tokens_per_s=float(speed[1]) if speed else 0.0,
                )
            )
    return found

# SPDX-License-Identifier: Apache-2.0
"""What a run looked like from SGLang's own log, the same for every server.

Needs ``--decode-log-interval 1``, so that every decode step leaves its line.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#(?:full )?token: (\d+)")
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
        retractions=sum(int(n) for n in _RETRACT.findall(log)),
    )

# SPDX-License-Identifier: Apache-2.0
"""What a run looked like from SGLang's own log, the same for every server.

A server logs one decode step in ``--decode-log-interval``.
"""

from __future__ import annotations

import re

from eval.runs.records import Moment

_DECODE = re.compile(r"Decode batch.*?#running-req: (\d+).*?#(?:full )?token: (\d+)")
# Shared and evicted positions need no slot of their own.
_SAVED = re.compile(r"#(?:shared|evicted) token: (\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_QUEUED = re.compile(r"#queue-req: (\d+)")
_RETRACT = re.compile(r"#retracted_reqs: (\d+)")
# Each scheduler says so, of several tensor-parallel ones the first as well as the others.
_CUT = re.compile(r"^(.*)Request length is longer than the KV cache pool size .*Truncated", re.M)
_OTHER_RANK = re.compile(r"\bTP[1-9]\d*\b")


def retractions(log: str) -> int:
    """Requests thrown out of a batch in a stretch of log."""
    return sum(int(n) for n in _RETRACT.findall(log))


def cut_prompts(log: str) -> int:
    """Prompts that were cut to what the model or the memory holds, in a stretch of log."""
    return sum(not _OTHER_RANK.search(prefix) for prefix in _CUT.findall(log))


def moments(log: str, leg: int) -> list[Moment]:
    """One :class:`Moment` for each decode line of a stretch of log, in its order. A stock server's
    lines have nothing saved. With several data-parallel schedulers each writes lines of its own."""
    found: list[Moment] = []
    for line in log.splitlines():
        decode = _DECODE.search(line)
        if decode is not None:
            speed, queued = (pattern.search(line) for pattern in (_SPEED, _QUEUED))
            found.append(
                Moment(
                    leg=leg,
                    step=len(found),
                    running=int(decode[1]),
                    queued=int(queued[1]) if queued else 0,
                    used=int(decode[2]),
                    saved=sum(map(int, _SAVED.findall(line))),
                    tokens_per_s=float(speed[1]) if speed else 0.0,
                )
            )
    return found

# SPDX-License-Identifier: Apache-2.0
"""Compare answers with math-verify, one JSON line in and one out; a script of ``math_grading.py``.

In a process of its own because answers are hostile: an exponent tower ends in C code that no
signal handler interrupts, or eats all memory. Only LaTeX is parsed: math-verify's parser of plain
expressions evaluates them as Python.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

_STEP_S = 3
_ORPHAN_CPU_S = 30


def main() -> None:
    """Answer until standard input ends."""
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The libraries may print; only verdicts reach the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        print(json.dumps(str(error)), file=answers, flush=True)
        return

    def equal(reference: str, answer: str) -> bool:
        gold = parse(f"${reference}$", [LatexExtractionConfig()], parsing_timeout=_STEP_S)
        found = parse(
            f"\\boxed{{{answer}}}",
            [LatexExtractionConfig(boxed_match_priority=0)],
            parsing_timeout=_STEP_S,
        )
        return bool(verify(gold, found, timeout_seconds=_STEP_S))

    # The first parse builds tables; nobody should wait for them within a time limit. Where memory
    # is short math-verify swallows the error and calls everything unequal.
    works = equal("\\frac{1}{2}", "0.5")
    print(json.dumps("ready" if works else "1/2 is not 0.5"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        # Should whoever waits for this answer die, this process does not compute on forever.
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime) + _ORPHAN_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        begin = time.monotonic()
        try:
            result: bool | str = equal(job["reference"], job["answer"])
            # math-verify calls what takes too long unequal, and says no more.
            if not result and time.monotonic() - begin >= _STEP_S:
                result = "timed out"
        except (MemoryError, RecursionError) as error:
            result = type(error).__name__
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()

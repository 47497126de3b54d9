# SPDX-License-Identifier: Apache-2.0
"""Compare answers with math-verify, one JSON line in and one out; a script of ``grading.py``. Only
LaTeX is parsed: math-verify's parser of plain expressions evaluates them as Python."""

import json
import os
import resource
import sys

_STEP_S = 3
_ORPHAN_CPU_S = 30


def main() -> None:
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The libraries may print; only verdicts reach the pipe.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    from math_verify import LatexExtractionConfig, parse, verify

    found_in_box = [LatexExtractionConfig(boxed_match_priority=0)]
    for line in sys.stdin:
        job = json.loads(line)
        # Should whoever waits for this reply die, this process does not compute on forever.
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = int(used.ru_utime + used.ru_stime) + _ORPHAN_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
        try:
            gold = parse(
                f"${job['reference']}$", [LatexExtractionConfig()], parsing_timeout=_STEP_S
            )
            found = parse(f"\\boxed{{{job['answer']}}}", found_in_box, parsing_timeout=_STEP_S)
            result: bool | str = bool(verify(gold, found, timeout_seconds=_STEP_S))
        except (MemoryError, RecursionError) as error:
            result = type(error).__name__
        print(json.dumps(result), file=replies, flush=True)


if __name__ == "__main__":
    main()

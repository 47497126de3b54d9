# SPDX-License-Identifier: Apache-2.0
"""Compares LaTeX answers with math-verify, which runs in a child process because it may hang or crash.

The code is not in ``grading.py``, because lm-eval loads that module under a name that the child process cannot
import."""

import contextlib
import multiprocessing
import resource
from multiprocessing.pool import Pool

_START_S = 120.0
_COMPARE_S = 15.0
_STEP_S = 3
_ORPHAN_CPU_S = 60
_MEMORY_BYTES = 2 << 30


class MathGrader:
    """Runs math-verify in a child process, because an answer such as 9^9^9^9 can make it hang in C code that no
    signal handler interrupts, or take all memory. The child starts when a comparison needs it."""

    def __init__(self, limit_s: float = _COMPARE_S, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.limit_s = limit_s
        self.memory_bytes = memory_bytes
        self._pool: Pool | None = None

    def equal(self, reference: str, answer: str) -> bool:
        """Whether the answers are equal; False also if the comparison fails or exceeds a time or memory limit.
        Raises RuntimeError if math-verify does not work on this machine."""
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = spawn.Pool(1, _limit_memory, (self.memory_bytes,))
            if not self._ask("\\frac{1}{2}", "0.5", _START_S):
                raise RuntimeError("math-verify's process did not start")
        return self._ask(reference, answer, self.limit_s)

    def close(self) -> None:
        """End the child; a later comparison starts a new child."""
        pool = self._pool
        self._pool = None
        if pool is not None:
            pool.terminate()
            pool.join()

    def _ask(self, reference: str, answer: str, limit_s: float) -> bool:
        assert self._pool is not None
        with contextlib.suppress(Exception):
            return self._pool.apply_async(_verify, (reference, answer)).get(limit_s)
        # The child raised an error, hangs or has died. The next comparison starts a new child.
        self.close()
        return False


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _verify(reference: str, answer: str) -> bool:
    """Whether the answers are equal. Parses only LaTeX, because math-verify evaluates other text as Python."""
    from math_verify import LatexExtractionConfig, parse, verify

    # If the parent dies, this limit of CPU time ends the child. Otherwise the child would go on computing.
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + _ORPHAN_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    boxed_first = LatexExtractionConfig(boxed_match_priority=0)
    gold = parse(f"${reference}$", [LatexExtractionConfig()], parsing_timeout=_STEP_S)
    candidate = parse(f"\\boxed{{{answer}}}", [boxed_first], parsing_timeout=_STEP_S)
    return bool(verify(gold, candidate, timeout_seconds=_STEP_S))


MATHEMATICS = MathGrader()

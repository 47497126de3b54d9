# SPDX-License-Identifier: Apache-2.0
"""Compares answers in LaTeX with math-verify, in a process that may fail.

A module of its own: lm-eval loads the functions of task files under names that the process would not
find."""

import contextlib
import multiprocessing
import resource
from multiprocessing.pool import Pool

_START_S, _COMPARE_S, _STEP_S, _ORPHAN_CPU_S = 120.0, 15.0, 3, 60
_MEMORY_BYTES = 2 << 30


class MathGrader:
    """math-verify in a child process, started when first needed and again after it was ended: a
    hostile exponent tower ends in C code that no signal handler interrupts, or eats all memory."""

    def __init__(self, limit_s: float = _COMPARE_S, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.limit_s, self.memory_bytes = limit_s, memory_bytes
        self._pool: Pool | None = None

    def equal(self, reference: str, answer: str) -> bool:
        """False also for what cannot be compared within the limits. Raises RuntimeError: math-verify
        does not work here."""
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = spawn.Pool(1, _limit_memory, (self.memory_bytes,))
            if not self._ask("\\frac{1}{2}", "0.5", _START_S):
                raise RuntimeError("math-verify's process did not start")
        return self._ask(reference, answer, self.limit_s)

    def close(self) -> None:
        """End the child; a later comparison starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.terminate()
            pool.join()

    def _ask(self, reference: str, answer: str, limit_s: float) -> bool:
        assert self._pool is not None
        with contextlib.suppress(Exception):
            return self._pool.apply_async(_verify, (reference, answer)).get(limit_s)
        # A child that died has no reply either; what is left of an exhausted one is not worth keeping.
        self.close()
        return False


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _verify(reference: str, answer: str) -> bool:
    """Only LaTeX is parsed: math-verify's parser of plain expressions evaluates them as Python."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Should whoever waits for this reply die, this process does not compute on forever.
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + _ORPHAN_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    boxed_first = LatexExtractionConfig(boxed_match_priority=0)
    gold = parse(f"${reference}$", [LatexExtractionConfig()], parsing_timeout=_STEP_S)
    found = parse(f"\\boxed{{{answer}}}", [boxed_first], parsing_timeout=_STEP_S)
    return bool(verify(gold, found, timeout_seconds=_STEP_S))


MATHEMATICS = MathGrader()

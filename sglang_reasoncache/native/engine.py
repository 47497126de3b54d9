# SPDX-License-Identifier: Apache-2.0
"""The step filter of ``csrc/filter``: tokens of all requests in, block pairs out, on a thread of its own."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from sglang_reasoncache.filter.proposal import CandidatePair, FilterCounters, StepResult
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

_NUM_COUNTERS = len(FilterCounters.__dataclass_fields__)
# Numbers for each step before its counters; see csrc/filter/capi.cpp.
_HEADER = 5
# Read from the library at once; more are read in several goes.
_TAKE_STEPS = 256
_TAKE_PAIRS = 1024


class _Config(ctypes.Structure):
    """``FilterConfig`` of csrc/filter/config.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("strict", "soft", "fixed_tau")),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "length_factor",
                "use_structure",
                "max_structure_checks",
                "block",
                "page_size",
                "align_tokens",
                "max_step_tokens",
                "max_history_steps",
                "max_candidates",
                "max_blocks_per_step",
                "max_chars",
                "max_depth",
                "max_nodes",
                "max_pending",
            )
        ),
    )

    @classmethod
    def of(cls, config: FilterConfig, max_pending: int) -> _Config:
        same = {
            name: getattr(config, name)
            for name in (field[0] for field in cls._fields_)
            if name not in ("fixed_tau", "align_tokens", "max_pending") and hasattr(config, name)
        }
        limits = config.limits
        return cls(
            fixed_tau=-1.0 if config.fixed_tau is None else config.fixed_tau,
            align_tokens=config.align == "tokens",
            max_pending=max_pending,
            max_chars=limits.max_chars,
            max_depth=limits.max_depth,
            max_nodes=limits.max_nodes,
            **same,
        )


def supports(config: FilterConfig) -> bool:
    """Whether the native filter computes what ``config`` asks for."""
    return (
        config.random_ratio is None
        and (config.structure_tolerance == 0 or not config.use_structure)
        and config.encoder == "tokens"
    )


class NativeEngine:
    """Stage 1 for all requests of a scheduler; see ``sharing.engine.StepEngine``.

    Methods are called by one thread, the scheduler's. :meth:`feed` splits tokens
    into steps and returns; a C++ thread compares them, never with the
    interpreter's lock.

    Args:
        library: of :func:`sglang_reasoncache.native.library`.
        config: a filter that :func:`supports` accepts.
        classes: of the tokenizer.
        vocabulary: of the tokenizer; ids outside it show nothing.
        start_ids: tokens that open the reasoning part, none where all counts.
        end_ids: tokens that close it.
        max_pending: steps handed over and not taken back, beyond which new ones
            are shed.

    Raises:
        MemoryError: not enough memory.
    """

    name = "native"

    def __init__(
        self,
        library: ctypes.CDLL,
        config: FilterConfig,
        classes: TokenClasses,
        vocabulary: Vocabulary,
        start_ids: Iterable[int] = (),
        end_ids: Iterable[int] = (),
        max_pending: int = 256,
    ) -> None:
        self._lib = _declare(library)
        self._block = config.block
        offsets = np.ascontiguousarray(vocabulary.offsets, dtype=np.uint64)
        flags = np.ascontiguousarray(classes.flags, dtype=np.uint8)
        starts, ends = array("i", start_ids), array("i", end_ids)
        self._handle: int | None = self._lib.reasoncache_engine_create(
            ctypes.byref(_Config.of(config, max_pending)),
            vocabulary.blob,
            offsets.ctypes.data,
            flags.ctypes.data,
            vocabulary.size,
            *starts.buffer_info(),
            *ends.buffer_info(),
        )
        if not self._handle:
            raise MemoryError("reasoncache: the native filter could not be created")
        self._next_request = 0
        # The last step may go beyond.
        max_pairs = _TAKE_PAIRS + config.max_blocks_per_step
        self._steps = np.empty((_TAKE_STEPS, _HEADER + _NUM_COUNTERS), dtype=np.int64)
        self._positions = np.empty((max_pairs, 2), dtype=np.int64)
        self._similarities = np.empty(max_pairs, dtype=np.float64)
        self._out = tuple(
            buffer.ctypes.data for buffer in (self._steps, self._positions, self._similarities)
        )

    def open(self, start_position: int, inside: bool) -> int:
        """Follow a new request, whose first token has position ``start_position``.

        Args:
            inside: its reasoning part is open at the start.

        Returns:
            The request's id for the other methods.

        Raises:
            MemoryError: not enough memory.
        """
        request = self._next_request
        self._next_request += 1
        if self._lib.reasoncache_engine_open(self._handle, request, start_position, inside):
            raise MemoryError("reasoncache: no memory to follow another request")
        return request

    def close(self, request: int) -> None:
        """Forget a request; results of its steps may still come."""
        if self._handle:
            self._lib.reasoncache_engine_close(self._handle, request)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Take the next tokens of several requests. All arrays have type ``q``.

        Args:
            requests: ids.
            counts: new tokens of each.
            tokens: all of them, one request after the other.
        """
        self._lib.reasoncache_engine_feed(
            self._handle,
            requests.buffer_info()[0],
            counts.buffer_info()[0],
            len(requests),
            tokens.buffer_info()[0],
        )

    @property
    def outstanding(self) -> int:
        """Steps handed over and not taken: a function of the calls made, not of time."""
        return int(self._lib.reasoncache_engine_outstanding(self._handle))

    @property
    def steps_shed(self) -> int:
        """Finished steps that were not looked at, because too many were waiting."""
        return int(self._lib.reasoncache_engine_shed(self._handle))

    def ready(self) -> int:
        """Results that :meth:`take` would give now."""
        return int(self._lib.reasoncache_engine_ready(self._handle))

    def take(self, limit: int, max_pairs: int = 1 << 30) -> list[StepResult]:
        """See ``sharing.engine.StepEngine``."""
        found: list[StepResult] = []
        while limit > 0 and max_pairs > 0:
            count = self._lib.reasoncache_engine_take(
                self._handle, min(limit, _TAKE_STEPS), min(max_pairs, _TAKE_PAIRS), *self._out
            )
            if not count:
                break
            results = self._read(self._steps[:count].tolist())
            found += results
            limit -= count
            max_pairs -= sum(len(result.pairs) for result in results)
        return found

    def _read(self, rows: Sequence[Sequence[int]]) -> list[StepResult]:
        results = []
        at = 0
        for request, start, end, cpu_ns, num_pairs, *counters in rows:
            stop = at + num_pairs
            pairs = tuple(
                CandidatePair(dst, src, self._block, similarity)
                for (dst, src), similarity in zip(
                    self._positions[at:stop].tolist(),
                    self._similarities[at:stop].tolist(),
                    strict=True,
                )
            )
            at = stop
            results.append(
                StepResult(request, start, end, pairs, FilterCounters(*counters), cpu_ns * 1e-9)
            )
        return results

    def wait(self) -> None:
        """Block until every step handed over has its result; for tests and benchmarks."""
        self._lib.reasoncache_engine_wait(self._handle)

    def shut_down(self) -> None:
        """End the thread and free everything; the object is of no use afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            self._lib.reasoncache_engine_destroy(handle)

    def __del__(self) -> None:
        # Absent when __init__ raised.
        if getattr(self, "_handle", None):
            self.shut_down()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    for name, result, arguments in (
        (
            "create",
            pointer,
            (pointer, pointer, pointer, pointer, size, pointer, size, pointer, size),
        ),
        ("destroy", None, (pointer,)),
        ("open", ctypes.c_int32, (pointer, i64, i64, ctypes.c_int32)),
        ("close", None, (pointer, i64)),
        ("feed", ctypes.c_int32, (pointer, pointer, pointer, size, pointer)),
        ("ready", size, (pointer,)),
        ("outstanding", size, (pointer,)),
        ("shed", ctypes.c_uint64, (pointer,)),
        ("wait", None, (pointer,)),
        ("take", size, (pointer, size, size, pointer, pointer, pointer)),
    ):
        function = getattr(library, f"reasoncache_engine_{name}")
        function.restype = result
        function.argtypes = arguments
    return library

# SPDX-License-Identifier: Apache-2.0
"""Hands tokens to the filter process, and takes the block pairs that it finds."""

from array import array
from collections.abc import Iterable

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.filter.messages import StepResult
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.sharing.records import Records
from sglang_reasoncache.sharing.stats import SharingStats


class RequestTracker:
    """Hands tokens to the filter (the process that looks for similar blocks) and takes the filter's results.
    One per scheduler. All tensor-parallel ranks make the same calls.

    Args:
        process: The scheduler's side of the filter. None if sharing is off.
        records: The records of the requests whose tokens are handed over.
        ranks: Lets all ranks take the same results at the same poll.
    """

    def __init__(
        self,
        process: FilterProcess | None,
        records: Records,
        stats: SharingStats,
        ranks: Ranks,
    ) -> None:
        self._process = process
        self._records = records
        self._stats = stats
        self._ranks = ranks

    def feed(self, reqs: Iterable[Request]) -> None:
        """Hand the new tokens of followed requests to the filter."""
        if self._process is None:
            return
        self._records.close_dropped()
        ids = array("q")
        counts = array("q")
        tokens = array("q")
        for req in reqs:
            record = self._records.born(req)
            if record.followed is None:
                continue
            # The newest token is left out, because its KV is not written before the next forward.
            ready = len(req.output_ids) - 1
            if ready > record.fed:
                ids.append(record.followed.id)
                counts.append(ready - record.fed)
                tokens.extend(req.output_ids[record.fed : ready])
                record.fed = ready
        if ids:
            self._process.feed(ids, counts, tokens)
        self._count(self._process)

    def take(self, limit: int, max_pairs: int) -> list[tuple[Request | None, StepResult]]:
        """Results from up to ``limit`` of the filter's replies that have arrived on all ranks. Takes no more
        replies once the results have ``max_pairs`` block pairs. The request is None if SGLang dropped it."""
        if self._process is None or not self._process.outstanding:
            return []
        ready = self._ranks.least(self._process.ready())
        if ready < 0:
            self._lose(self._process)
            return []
        shed = self._process.steps_shed
        results = self._process.take(min(ready, limit), max_pairs)
        self._stats.steps_shed += self._process.steps_shed - shed
        for result in results:
            seen = result.counters
            self._stats.steps_seen += 1
            self._stats.filter_seconds += result.seconds
            self._stats.steps_with_candidate += bool(seen.candidates)
            self._stats.structure_refusals += seen.dropped_structure
            self._stats.over_bound_steps += seen.over_bound
        return [(self._records.by_filter_id(result.request), result) for result in results]

    def _lose(self, process: FilterProcess) -> None:
        """Restart the filter process, or give it up, because some rank's filter process failed. All ranks do
        this at the same poll. The new process lacks the tokens of running requests, so these requests are not
        followed any more."""
        self._records.unfollow_all()
        process.restart()

    def stop(self) -> None:
        """End the filter process. It gets no more tokens, and :meth:`take` returns no more results."""
        self._records.unfollow_all()
        if self._process is not None:
            self._process.shut_down()
            self._count(self._process)

    def _count(self, process: FilterProcess) -> None:
        self._stats.filter_restarts = process.restarts
        self._stats.filter_given_up = int(process.given_up)

    def reset(self) -> None:
        """Restore ``filter_restarts`` and ``filter_given_up``, because a flush has set all counts to 0."""
        if self._process is not None:
            self._count(self._process)

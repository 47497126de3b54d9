# SPDX-License-Identifier: Apache-2.0
"""Keeps track of which requests take part in sharing, and which of their tokens the filter has received."""

import collections
import weakref
from array import array
from collections.abc import Iterable
from typing import Any

from sglang_reasoncache.cache.composition import marked
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import takes_part
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.filter.messages import StepResult
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.sharing.state import (
    Followed,
    PromptGroup,
    RequestState,
    attach,
    is_running,
    state_of,
)
from sglang_reasoncache.sharing.stats import SharingStats

GroupKey = tuple[bytes, str | None, str | None, str | None]


def group_of(req: Request) -> PromptGroup | None:
    state = state_of(req)
    return None if state is None or state.followed is None else state.followed.group


class RequestTracker:
    """Hands tokens to the filter (the process that looks for similar blocks) and takes the filter's results.
    One per scheduler. All tensor-parallel ranks make the same calls.

    Args:
        process: The scheduler's side of the filter. None if sharing is off; then no request is followed.
        ranks: Lets all ranks take the same results at the same poll.
        markers: Tokens that begin and end the reasoning part of an output. None if all output may share.
        groups: Whether requests with the same prompt share with each other.

    Attributes:
        in_groups: The argument ``groups``.
    """

    def __init__(
        self,
        process: FilterProcess | None,
        stats: SharingStats,
        ranks: Ranks,
        markers: ReasoningMarkers | None = None,
        groups: bool = False,
    ) -> None:
        self._process, self.stats, self.ranks = process, stats, ranks
        self._markers, self.in_groups, self._num_groups = markers, groups, 0
        self._groups: weakref.WeakValueDictionary[GroupKey, PromptGroup]
        self._groups = weakref.WeakValueDictionary()
        # The filter's ids of requests that SGLang dropped; any thread may append an id.
        self._orphans: collections.deque[int] = collections.deque()
        # SGLang's requests by the filter's ids. A request that SGLang dropped disappears from here.
        self._requests: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()

    def follow(self, req: Request) -> RequestState:
        """The state of ``req``, created if it is missing. The filter follows a new ``req`` that may share."""
        state = state_of(req)
        if state is not None:
            return state
        state = attach(req, RequestState(takes_part=self.count(req)))
        process = self._process
        if state.takes_part and process is not None and not process.given_up:
            inside = self._markers is None or self._markers.inside_after(req.origin_input_ids)
            group = self._group_of(req)
            state.followed = Followed(req, process, inside, self._orphans, group)
            if group is not None:
                state.merges = group.merges
            self._requests[state.followed.id] = req
        return state

    def _group_of(self, req: Request) -> PromptGroup | None:
        """The group of ``req``: the requests with the same prompt tokens, ``extra_key``, ``cache_salt`` and
        ``lora_id``. None if requests are not grouped. Also None if ``req`` is kept out of the prefix tree or
        has documents, because its KV may then depend on more than these."""
        if not self.in_groups or req.skip_radix_cache_insert or marked(req):
            return None
        prompt = array("q", req.origin_input_ids).tobytes()
        key = prompt, req.extra_key, req.cache_salt, req.lora_id
        group = self._groups.get(key)
        if group is None:
            self._num_groups += 1
            group = self._groups[key] = PromptGroup(self._num_groups)
        return group

    def source(self, req: Request, number: int) -> Request | None:
        """The request whose filter id is ``number``; None if SGLang dropped it or ``req`` has another group."""
        source, group = self._requests.get(number), group_of(req)
        return source if source and group and group_of(source) is group else None

    def describe_groups(self, most: int) -> list[dict[str, Any]]:
        """JSON of at most ``most`` groups with several running requests. The groups whose requests read the
        most slots of other requests come first."""
        members: dict[PromptGroup, list[tuple[Request, HostRow]]] = {}
        for req in list(self._requests.values()):
            state, group = state_of(req), group_of(req)
            if group and is_running(req) and state and state.row:
                members.setdefault(group, []).append((req, state.row))
        described = [
            {
                "prompt_tokens": len(group[0][0].origin_input_ids),
                "requests": len(group),
                "slots_saved_within_now": sum(row.saved for _, row in group),
                "slots_read_across": sum(row.borrowed for _, row in group),
            }
            for group in members.values()
            if len(group) > 1
        ]
        return sorted(described, key=lambda group: -group["slots_read_across"])[:most]

    def count(self, req: Request) -> bool:
        """Count a new request; returns whether it takes part."""
        yes = takes_part(req)
        self.stats.requests_seen += 1
        self.stats.requests_opted_out += not yes
        return yes

    def feed(self, reqs: Iterable[Request]) -> None:
        """Hand the new tokens of followed requests to the filter."""
        if self._process is None:
            return
        while self._orphans:
            self._process.close(self._orphans.popleft())
        ids, counts, tokens = array("q"), array("q"), array("q")
        for req in reqs:
            state = self.follow(req)
            if state.followed is None:
                continue
            # The newest token is left out, because its KV is not written before the next forward.
            ready = len(req.output_ids) - 1
            if ready > state.fed:
                ids.append(state.followed.id)
                counts.append(ready - state.fed)
                tokens.extend(req.output_ids[state.fed : ready])
                state.fed = ready
        if ids:
            self._process.feed(ids, counts, tokens)
        self._count(self._process)

    def take(self, limit: int, max_pairs: int) -> list[tuple[Request | None, StepResult]]:
        """Results from up to ``limit`` of the filter's replies that have arrived on all ranks. Takes no more
        replies once the results have ``max_pairs`` block pairs. The request is None if SGLang dropped it."""
        if self._process is None or not self._process.outstanding:
            return []
        ready = self.ranks.least(self._process.ready())
        if ready < 0:
            self._lose(self._process)
            return []
        shed = self._process.steps_shed
        results = self._process.take(min(ready, limit), max_pairs)
        self.stats.steps_shed += self._process.steps_shed - shed
        for result in results:
            seen = result.counters
            self.stats.steps_seen += 1
            self.stats.filter_seconds += result.seconds
            self.stats.steps_with_candidate += bool(seen.candidates)
            self.stats.structure_refusals += seen.dropped_structure
            self.stats.over_bound_steps += seen.over_bound
        return [(self._requests.get(result.request), result) for result in results]

    def _lose(self, process: FilterProcess) -> None:
        """Restart the filter process, or give it up, because some rank's filter process failed. All ranks do
        this at the same poll. The new process lacks the tokens of running requests, so these requests are not
        followed any more."""
        for req in list(self._requests.values()):
            state = state_of(req)
            if state is not None and state.followed is not None:
                state.followed.abandon()
                state.followed = None
        self._requests.clear()
        self._orphans.clear()
        process.restart()

    def stop(self) -> None:
        """End the filter process. It gets no more tokens, and :meth:`take` returns no more results."""
        self._requests.clear()
        self._orphans.clear()
        if self._process is not None:
            self._process.shut_down()
            self._count(self._process)

    def _count(self, process: FilterProcess) -> None:
        self.stats.filter_restarts = process.restarts
        self.stats.filter_given_up = int(process.given_up)

    def reset(self) -> None:
        """Restore ``filter_restarts`` and ``filter_given_up``, because a flush has set all counts to 0."""
        if self._process is not None:
            self._count(self._process)

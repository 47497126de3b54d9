# SPDX-License-Identifier: Apache-2.0
"""The one store of requests' records.

The life of a request: *born* when a poll first sees it, *prefilled* when a poll finds that its row has all KV,
then perhaps *retracted* and prefilled again, and *ended*. Each step is one method of :class:`Records`, which
changes the record, its blocks in the ledger and its registration with the filter: whoever stores more about a
request changes it there. The prefix tree itself removes the host's copy of a freed row."""

from __future__ import annotations

import collections
import weakref
from array import array
from collections.abc import Iterator
from typing import Any

from sglang_reasoncache.cache.composition import marked
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.swap import swapped_of
from sglang_reasoncache.compat.carriers import CONTINUED, RECORD
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import takes_part
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.filter.segment import ReasoningMarkers
from sglang_reasoncache.sharing.group import Followed, PromptGroup
from sglang_reasoncache.sharing.ledger import Ledger
from sglang_reasoncache.sharing.request import RequestRecord, has_row, known_record, record_of
from sglang_reasoncache.sharing.stats import SharingStats

_GroupKey = tuple[bytes, str | None, str | None, str | None]


class Records:
    """The records of a scheduler's requests. All tensor-parallel ranks make the same calls.

    Args:
        process: The scheduler's side of the filter. None if sharing is off; then no request is followed.
        markers: Tokens that begin and end the reasoning part of an output. None if all output may share.
        groups: Whether requests with the same prompt share with each other.
        reads_prompt: Whether blocks of a response may read blocks of its prompt.
        stats: Counts the requests.

    Attributes:
        in_groups: The argument ``groups``.
        ledger: Accepted blocks that do not share yet.
    """

    def __init__(
        self,
        process: FilterProcess | None,
        stats: SharingStats,
        markers: ReasoningMarkers | None = None,
        groups: bool = False,
        reads_prompt: bool = False,
    ) -> None:
        self.in_groups = groups
        self._reads_prompt = reads_prompt
        self.ledger = Ledger()
        self._process = process
        self._stats = stats
        self._markers = markers
        self._num_groups = 0
        self._groups: weakref.WeakValueDictionary[_GroupKey, PromptGroup]
        self._groups = weakref.WeakValueDictionary()
        # The filter's ids of requests that SGLang dropped; any thread may append an id.
        self._orphans: collections.deque[int] = collections.deque()
        # SGLang's requests by the filter's ids. A request that SGLang dropped disappears from here.
        self._followed: weakref.WeakValueDictionary[int, Request] = weakref.WeakValueDictionary()
        # Requests that were retracted and wait to be prefilled again.
        self._retracted: weakref.WeakSet[Request] = weakref.WeakSet()
        # Requests whose record has a row, by ``HostRow.number``, in the order in which they were prefilled.
        self._with_row: dict[int, Request] = {}

    # -- a request's life -------------------------------------------------------------

    def born(self, req: Request) -> RequestRecord:
        """The record of ``req``, made if it is missing. The filter follows a new ``req`` that may share."""
        record = record_of(req)
        if record is not None:
            return record
        record = RequestRecord(takes_part=self.count(req))
        setattr(req, RECORD, record)
        process = self._process
        if record.takes_part and process is not None and not process.given_up:
            inside = self._markers is None or self._markers.inside_after(req.origin_input_ids)
            group = self._group_of(req)
            # KV of documents may have been computed for other positions, after other text.
            reads_prompt = self._reads_prompt and not marked(req)
            record.followed = Followed(req, process, inside, self._orphans, group, reads_prompt)
            if group is not None:
                record.merges = group.merges
            self._followed[record.followed.id] = req
        return record

    def prefilled(self, req: Request, record: RequestRecord, row: HostRow) -> None:
        """A poll found that all KV of the prompt, and of output from before a retraction, is in ``row``."""
        if row.first_shared is None:
            # All of it was computed again.
            record.copied = {}
            if record.sampled is not None and getattr(req, CONTINUED, None) is None:
                record.recomputed.append(record.sampled)
        record.sampled = None
        record.row = row
        self._retracted.discard(req)
        self._with_row[row.number] = req
        if record.followed is not None:
            record.followed.join(True)

    def retracted(self, req: Request, row: HostRow) -> None:
        """SGLang freed ``row`` and will prefill the request again. Until then the request leaves its group."""
        record = record_of(req)
        if record is None and getattr(req, CONTINUED, None) is not None:
            # No poll has seen it yet, and it has sampled behind approximate KV.
            record = self.born(req)
        self._retracted.add(req)
        if record is not None:
            record.sampled = _sampled(req, record)
            self._lose_row(req, record, row)
            if record.followed is not None:
                record.followed.join(False)

    def ended(self, req: Request, row: HostRow) -> None:
        """The request finished or was aborted, and SGLang freed ``row``. The filter forgets the request."""
        self._retracted.discard(req)
        record = record_of(req)
        if record is not None:
            self._lose_row(req, record, row)
            if record.followed is not None:
                record.followed.close()

    def dropped(self, handle: Any) -> None:
        """SGLang aborted the request with this handle. If it waited to be prefilled again, its KV on the host
        is freed and the filter forgets it: it does not end, and somebody may keep it, such as a session."""
        for req in [each for each in self._retracted if each.cache_request_handle is handle]:
            self._retracted.discard(req)
            swapped = swapped_of(req)
            if swapped is not None:
                swapped.drop()
            record = record_of(req)
            if record is not None and record.followed is not None:
                record.followed.close()

    def _lose_row(self, req: Request, record: RequestRecord, row: HostRow) -> None:
        """Blocks in the ledger that would read or change the row leave it. Those of other requests become
        pending until ``req`` has a row again."""
        if record.row is not None:
            self._with_row.pop(record.row.number, None)
        blocks = self.ledger.of(req)
        record.lose_row(row)
        for block in blocks:
            self.ledger.remove(block)
            if block.req is not req:
                known_record(block.req).pending.append(block.candidate)

    # -- look-ups -----------------------------------------------------------------------

    def running(self) -> Iterator[tuple[Request, RequestRecord]]:
        """The running requests whose record has a row."""
        for req in list(self._with_row.values()):
            if has_row(req):
                yield req, known_record(req)

    def by_filter_id(self, number: int) -> Request | None:
        """The request whose filter id is ``number``; None if SGLang dropped it or it is not followed."""
        return self._followed.get(number)

    def source(self, req: Request, number: int) -> Request | None:
        """The request whose filter id is ``number``; None if SGLang dropped it or ``req`` has another group."""
        source = self._followed.get(number)
        if source is None:
            return None
        group = known_record(req).group
        return source if group is not None and known_record(source).group is group else None

    def followed(self) -> list[Request]:
        """The requests that were followed and that Python has not garbage-collected."""
        return list(self._followed.values())

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

    # -- the filter -----------------------------------------------------------------------

    def close_dropped(self) -> None:
        """Have the filter forget requests that SGLang dropped without a word, as a decode server of a PD pair
        does."""
        if self._process is not None:
            while self._orphans:
                # The ranks find out at different times.
                self._process.close(self._orphans.popleft(), on_all=False)

    def unfollow_all(self) -> None:
        """No request is followed any more, because the filter process lost their tokens or has ended."""
        for req in self.followed():
            record = record_of(req)
            if record is not None and record.followed is not None:
                record.followed.abandon()
                record.followed = None
        self._followed.clear()
        self._orphans.clear()

    def count(self, req: Request) -> bool:
        """Count a new request; returns whether it takes part."""
        yes = takes_part(req)
        self._stats.requests_seen += 1
        self._stats.requests_opted_out += not yes
        return yes


def _sampled(req: Request, record: RequestRecord) -> tuple[int, int] | None:
    """Positions ``[begin, end)`` of the tokens that a request has sampled behind approximate KV. None if there
    are none."""
    prompt = len(req.origin_input_ids)
    end = prompt + len(req.output_ids)
    begins = [candidate.shared_at for candidate in record.approximate]
    if getattr(req, CONTINUED, None) is not None:
        begins.append(prompt)
    # What was sampled when the request was retracted before, and is not computed again yet, counts still.
    begins += [] if record.sampled is None else [record.sampled[0]]
    begin = min(begins, default=end)
    return (begin, end) if begin < end else None

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the filter's process write to each other.

Arrays of int64, their length in words first:

    feed:  length, steps taken, opened, joined, closed, requests,
           (id, start position, inside) of each opened, (id, group) of those that joined one or
           (-1) left theirs, ids of the closed, ids, counts of new tokens, tokens
    reply: length, number of the reply, steps shed, steps,
           (id, start, end, CPU ns, pairs, pairs across, counters...) of each step,
           of each step (dst_start, src_start) of its pairs, then (dst_start, src_start, source)

Reply 0 says that the process has started, or, with -1 steps shed, why not: a text of that many
bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from sglang_reasoncache.filter.align import AcrossPair, BlockPair
from sglang_reasoncache.filter.proposal import FilterCounters, StepResult

WORD = 8
REPLY_HEADER = 4
_FEED_HEADER = 6
_STEP_WORDS = 6 + len(fields(FilterCounters))
_COUNTERS = attrgetter(*(field.name for field in fields(FilterCounters)))


class Feed(NamedTuple):
    """Tokens of many requests, in the order of the message."""

    steps_taken: int
    opened: array[int]
    joined: array[int]
    closed: array[int]
    requests: array[int]
    counts: array[int]
    tokens: array[int]

    def pack(self) -> bytes:
        length = _FEED_HEADER + sum(map(len, self[1:]))
        opened, joined, closed, requests = map(len, self[1:5])
        head = array("q", (length, self[0], opened // 3, joined // 2, closed, requests))
        return b"".join((head, *self[1:]))

    @classmethod
    def unpack(cls, words: array[int]) -> Feed:
        _, taken, opened, joined, closed, requests = words[:_FEED_HEADER]
        parts, at = [], _FEED_HEADER
        for size in (3 * opened, 2 * joined, closed, requests, requests, len(words)):
            parts.append(words[at : at + size])
            at += size
        return cls(taken, *parts)

    def news(self) -> Iterator[tuple[int, array[int]]]:
        """Each request with its new tokens."""
        at = 0
        for request, count in zip(self.requests, self.counts, strict=True):
            yield request, self.tokens[at : at + count]
            at += count


def pack_reply(number: int, num_shed: int, results: Sequence[StepResult]) -> bytes:
    steps, pairs = array("q"), array("q")
    for request, start, end, found, counters, seconds, across in results:
        steps.extend((request, start, end, round(seconds * 1e9), len(found), len(across)))
        steps.extend(_COUNTERS(counters))
        for pair in (*found, *across):
            pairs.extend(pair)
    length = REPLY_HEADER + len(steps) + len(pairs)
    return (array("q", (length, number, num_shed, len(results))) + steps + pairs).tobytes()


def pack_refusal(reason: str) -> bytes:
    """Reply 0 of a process that cannot start."""
    text = reason.encode()
    padded = text + bytes(-len(text) % WORD)
    return array("q", (REPLY_HEADER + len(padded) // WORD, 0, -1, len(text))).tobytes() + padded


def unpack_results(words: array[int], num_steps: int) -> list[StepResult]:
    """The steps of a reply behind its header.

    Raises:
        ValueError: numbers that do not go together.
    """
    at = num_steps * _STEP_WORDS
    results = []
    for i in range(0, at if 0 <= at <= len(words) else 0, _STEP_WORDS):
        request, start, end, cpu_ns, num_pairs, num_across, *rest = words[i : i + _STEP_WORDS]
        behind = at + 2 * num_pairs
        numbers, others = words[at:behind], words[behind : behind + 3 * num_across]
        pairs = tuple(map(BlockPair, numbers[::2], numbers[1::2]))
        across = tuple(map(AcrossPair, others[::3], others[1::3], others[2::3]))
        if (len(pairs), len(across)) != (num_pairs, num_across):
            raise ValueError(f"{num_pairs} and {num_across} pairs in {len(words)} words")
        at = behind + 3 * num_across
        counters = FilterCounters(*rest)
        results.append(StepResult(request, start, end, pairs, counters, cpu_ns * 1e-9, across))
    if at != len(words) or any(r.start < 0 or r.end <= r.start for r in results):
        raise ValueError(f"{num_steps} steps in {len(words)} words")
    return results

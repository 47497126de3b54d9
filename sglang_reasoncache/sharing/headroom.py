# SPDX-License-Identifier: Apache-2.0
"""Learns for how many tokens of each request's future output admission should reserve slots.

SGLang reserves up to 4,096 tokens of each request's output, of which a fraction counts that it lowers in steps.
A server that is short of slots then runs few requests while slots are free. Without a reserve it admits too
many, retracts them, and computes their KV again."""

import math

from sglang_reasoncache.device.ranks import alike

#: How many tokens may be lost to retractions, per token of output, while requests wait for slots. Computing a
#: token of KV again in a prefill costs about 2% of a decode step. At this cost, a loss of 0.3 to 0.5 is within
#: a few percent of the best fixed reserve (tests/unit/test_headroom.py simulates SGLang's scheduler).
ACCEPTED_LOSS = 0.4
#: What a token costs whose KV is copied to the host and back, as a part of what computing it again costs.
COPYING = 0.25
#: The least number of tokens without speculation: SGLang gives a request a slot for its next token.
LEAST = 2.0
#: The largest number of tokens. SGLang never reserves more by default.
MOST = 4096.0
_START = 64.0
#: After a request had to wait, SGLang is taken to be short of slots for this many decode steps. It does not try
#: again to admit a request before a running one leaves.
_STEPS_AFTER_WAIT = 64


class Headroom:
    """For how many tokens of each request's future output admission reserves slots: :attr:`ahead`.

    Grows with each retraction, and shrinks with each decoded token while requests wait for slots, in such a way
    that both balance at ``ACCEPTED_LOSS``. Losing as many tokens as the KV pool has slots makes it e times as
    large. It depends on counts alone, not on time, so it is the same on all ranks.

    Args:
        slots: Number of slots of the KV pool.
        least: The least number of tokens: how many slots SGLang gives a request ahead of its tokens.
    """

    def __init__(self, slots: int, least: float = LEAST) -> None:
        self._slots = max(slots, 1)
        self._least = least
        self.ahead = max(_START, least)

    def decoded(self, tokens: int) -> None:
        """Count ``tokens`` of output, decoded while a request waited for slots."""
        self._scale(-ACCEPTED_LOSS * tokens)

    def lost(self, tokens: int, copied: int = 0) -> None:
        """Count a retraction of a request with ``tokens`` of KV, ``copied`` of which the host keeps."""
        self._scale(tokens - (1 - COPYING) * copied)

    def _scale(self, tokens: float) -> None:
        # One retraction at most doubles the reserve, even if the request held most of a small pool.
        change = min(tokens / self._slots, math.log(2))
        self.ahead = alike(min(max(self.ahead * math.exp(change), self._least), MOST))


class Shortage:
    """Whether SGLang lacks slots for a request that waits, and what admission learns from it. Counts steps and
    tokens, not time, so all ranks agree.

    Args:
        slots: Number of slots of the KV pool.
        least: How many slots SGLang gives a running request ahead of its tokens.

    Attributes:
        headroom: For how many tokens of each request's future output admission reserves slots.
        steps: Number of decode steps so far.
    """

    def __init__(self, slots: int, least: float = LEAST) -> None:
        self.headroom = Headroom(slots, least)
        self.steps = 0
        self._until = 0
        self._admits_again = False

    @property
    def is_now(self) -> bool:
        """Whether a request waits for slots, or did so a moment ago."""
        return self.steps < self._until

    def request_waits(self, again: bool) -> None:
        """See ``SlotOwner``."""
        self._until = self.steps + _STEPS_AFTER_WAIT
        self._admits_again = self._admits_again or again

    def admits_again(self) -> bool:
        """Whether SGLang should try once more to admit a request for which slots were reclaimed. True once."""
        again = self._admits_again
        self._admits_again = False
        return again

    def decoded(self, tokens: int) -> None:
        """Count a decode step that gave ``tokens`` tokens."""
        self.steps += 1
        if self.is_now:
            self.headroom.decoded(tokens)

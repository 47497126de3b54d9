# SPDX-License-Identifier: Apache-2.0
"""How the filter (the process that looks for similar blocks) knows a request, and groups of requests."""

from array import array
from collections import deque
from weakref import finalize

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.filter.process import FilterProcess
from sglang_reasoncache.sharing.merges import Merges


class PromptGroup:
    """Requests with equal prompts. A group exists while a request refers to it. ``number``: its filter id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.merges = Merges()


class Followed:
    """Registers a request with the filter (the process that looks for similar blocks) until :meth:`close`.

    If ``group`` is not None, the request is a member of this group, except from a retraction until a poll (see
    ``Controller``) finds the request's prefill done again. ``reads_prompt``: whether its blocks may read blocks
    of its prompt.

    SGLang may drop a request without calling our code. When such a request is garbage-collected, perhaps in
    another thread, its id is appended to ``orphans``. The thread that feeds the filter then tells the filter to
    forget the request.
    """

    def __init__(
        self,
        req: Request,
        process: FilterProcess,
        inside: bool,
        orphans: deque[int],
        group: PromptGroup | None = None,
        reads_prompt: bool = False,
    ) -> None:
        self._process = process
        self.group = group
        prompt = array("q", req.origin_input_ids if reads_prompt else ())
        self.id = process.open(len(req.origin_input_ids), inside, prompt)
        self._dropped = finalize(req, orphans.append, self.id)
        self._dropped.atexit = False
        self.join(True)

    def join(self, yes: bool) -> None:
        """Join the group if ``yes`` (the prefill is done), otherwise leave it (the request lost its row)."""
        if self.group is not None and self._dropped.alive:
            self._process.join(self.id, self.group.number if yes else -1)

    def close(self) -> None:
        """Have the filter forget the request. Only the thread that feeds the filter calls this."""
        if self._dropped.detach():
            self._process.close(self.id)

    def abandon(self) -> None:
        """Give up the registration without telling the filter, because the filter process has ended."""
        self._dropped.detach()

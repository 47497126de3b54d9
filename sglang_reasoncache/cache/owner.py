# SPDX-License-Identifier: Apache-2.0
"""The port through which allocator, prefix tree and prefill budget, as we extend SGLang's, ask the plugin.

These classes lie below the code that decides what is shared or evicted, and must not call it by name: they ask
the :class:`SlotOwner` of their allocator. A server has one, the plugin's ``Controller``. Before it is attached,
and in an SGLang without the plugin, :data:`NO_OWNER` answers: nothing shares, and nothing can be reclaimed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.device.ranks import Ranks

_Result = TypeVar("_Result")


class Promise(NamedTuple):
    """What a prefill budget may count on, the same on all ranks.

    Attributes:
        shareable: Number of slots that running requests can free by sharing.
        ahead: For how many tokens of each request's future output to reserve slots, at most as many as SGLang
            would.
        kept: The least fraction of SGLang's reservation to keep, 0 to 1.
    """

    shareable: int
    ahead: float
    kept: float

    def reserved(self, tokens: float, requests: int) -> float:
        """How many slots to reserve for the future output of ``requests`` for which SGLang would reserve
        ``tokens``."""
        return max(min(tokens, self.ahead * requests), tokens * self.kept)


#: SGLang's own reservation, and nothing to share.
NOTHING_PROMISED = Promise(shareable=0, ahead=0.0, kept=1.0)


class SlotOwner(Protocol):
    """What allocator, prefix tree and prefill budget ask. The methods contain the plugin's exceptions, except
    for :meth:`once_more`, :meth:`path_loaded`, and :meth:`contained_alone` with several ranks.

    Attributes:
        ranks: The tensor-parallel ranks that run the same requests.
        composes: Whether prefixes may be composed of several cached documents.
        evicts_prompts: Whether policies may evict positions of prompts.
    """

    @property
    def ranks(self) -> Ranks: ...

    @property
    def evicts_prompts(self) -> bool: ...

    @property
    def composes(self) -> bool: ...

    def once_more(self, work: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        """The result of ``work``, without which SGLang cannot go on. If ``work`` raises, it is called a second
        time; an exception of the second call is not caught."""

    def contained(self) -> AbstractContextManager[Any]:
        """A context that suppresses exceptions of the plugin: they end sharing and evicting on all ranks."""

    def contained_alone(self) -> AbstractContextManager[Any]:
        """A context that suppresses exceptions of the plugin if this is the only rank. With several ranks they
        end the scheduler: after a failure one rank's tree would differ from the others', and the ranks would
        admit different requests."""

    def on_all(self, work: Callable[[], _Result | None]) -> _Result | None:
        """The result of ``work`` if no rank has None, else None. Exceptions are contained. All ranks call this
        together; ``work`` must leave nothing to undo if it raises."""

    def promise(self) -> Promise:
        """What the next prefill budget may count on. All ranks call this together."""

    def reclaim(self, slots: int, evicts: bool) -> None:
        """Try to free ``slots`` slots, which SGLang lacks even if its prefix cache evicts all that it can.
        ``evicts``: whether policies may evict positions if sharing frees too few. All ranks call this
        together."""

    def request_waits(self, again: bool) -> None:
        """SGLang has no slots for a request. ``again``: whether some were reclaimed for it, so that the next
        pass may have enough."""

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a request keeps its prompt out of the prefix tree while it runs."""

    def after_chunk(self, req: Request, written: int) -> None:
        """A chunk of a prompt that is kept out of the tree was computed. ``written``: number of positions of
        ``req`` whose KV is written."""

    def released(self, req: Request, row: HostRow) -> None:
        """A request finished, was aborted or was retracted. ``row``: the host's copy of its freed row."""

    def dropped(self, handle: Any) -> None:
        """SGLang aborted the request with this handle outside the running batch. All ranks call this in the
        same step."""

    def composed(self, documents: int, tokens: int, repaired: int, missed: bool) -> None:
        """A prompt was composed of ``documents`` cached documents; see ``SharingStats.composed``."""

    def restored(self, tokens: int) -> None:
        """The KV of ``tokens`` positions of a retracted request came back from the host; see ``swap.py``."""

    def continued(self, tokens: int) -> None:
        """A prompt reads ``tokens`` positions that an earlier request shared; see ``continuations.py``."""

    def path_loaded(self, slots: torch.Tensor) -> None:
        """Keys in ``slots``, int64 ``[tokens]`` on the device, are those of positions 0, 1, 2, ...: the slots
        of a path of the tree that was loaded from the host."""

    def hold_polls(self, yes: bool) -> None:
        """Poll no running requests while ``yes``: between a vote of DP attention on the next forward and that
        forward, a poll could change what was voted on."""

    def flushed(self) -> None:
        """SGLang flushes its cache, while no request runs."""


class NoOwner:
    """A :class:`SlotOwner` that shares and evicts nothing."""

    ranks = Ranks()
    composes = False
    evicts_prompts = False

    def once_more(self, work: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        return work(*arguments, **named)

    def contained(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def contained_alone(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def on_all(self, work: Callable[[], _Result | None]) -> _Result | None:
        return work()

    def promise(self) -> Promise:
        return NOTHING_PROMISED

    def reclaim(self, slots: int, evicts: bool) -> None:
        pass

    def request_waits(self, again: bool) -> None:
        pass

    def keeps_prompt(self, req: Request) -> bool:
        return False

    def after_chunk(self, req: Request, written: int) -> None:
        pass

    def released(self, req: Request, row: HostRow) -> None:
        pass

    def dropped(self, handle: Any) -> None:
        pass

    def composed(self, documents: int, tokens: int, repaired: int, missed: bool) -> None:
        pass

    def restored(self, tokens: int) -> None:
        pass

    def continued(self, tokens: int) -> None:
        pass

    def path_loaded(self, slots: torch.Tensor) -> None:
        pass

    def hold_polls(self, yes: bool) -> None:
        pass

    def flushed(self) -> None:
        pass


NO_OWNER: SlotOwner = NoOwner()

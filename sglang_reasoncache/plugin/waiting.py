# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in the server's main process while their documents are prefilled. No scheduler has such a
request yet, so SGLang alone could neither abort it nor refuse a second request with its id."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.compat.carriers import WAITING


class WaitingRequest:
    """A request that waits. Make it with :func:`waiting`.

    Attributes:
        states: SGLang's state of the request. With ``n`` > 1 there is one for each sample.
        aborted: Set when a client aborts the request.
    """

    def __init__(self, manager: Any, obj: Any, request: Any) -> None:
        self._manager = manager
        self._request = request
        # A copy is normalized, because SGLang normalizes ``obj`` later, and can do that only once.
        self._obj = copy.copy(obj)
        self._obj.normalize_batch_and_arguments()
        manager._init_req_state(self._obj, request)
        rids = [self._obj.rid] if self._obj.is_single else self._obj.rid
        self.states = [manager.rid_to_state[rid] for rid in rids]
        self.aborted = asyncio.Event()
        for state in self.states:
            # The request has taken no LoRA adapter yet, so SGLang must release none.
            state.lora_released = True

    async def until(self, prefills: Coroutine[Any, Any, dict[str, Any] | None]) -> Any:
        """Wait for ``prefills``, which returns a finish reason if SGLang aborted a prefill, else None. Returns
        that, or SGLang's finish reason of an abort once a client aborts the request. ``prefills`` is cancelled
        if it has not ended then; SGLang aborts cancelled prefills in the schedulers, too."""
        work = asyncio.ensure_future(prefills)
        aborted = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait((work, aborted), return_when=asyncio.FIRST_COMPLETED)
            reason = work.result() if work.done() else None
            if reason is None and self.aborted.is_set():
                reason = compat.FINISH_ABORT().to_json()
            return reason
        finally:
            work.cancel()
            aborted.cancel()

    async def answers(self, reason: dict[str, Any]) -> list[Any]:
        """SGLang's answers to the request, which ends with the finish ``reason`` of an abort. If ``reason`` has
        a status code and the request does not stream, raises SGLang's error: HTTPException or ValueError."""
        answers = []
        for index, state in enumerate(self.states):
            rid = state.obj.rid
            self._manager._handle_abort_req(compat.AbortReq(rid=rid, finished_reason=reason))
            if not state.finished:
                # SGLang ignores aborts of ids that begin like those of its own health checks.
                raise ValueError(f"request {rid!r:.80} was aborted")
            sample = self._manager._stream_one_response(state.obj, state, self._request)
            answers.append(await anext(sample))
            if not self._obj.is_single and self._obj.stream:
                answers[-1]["index"] = index
        return answers if self._obj.is_single or self._obj.stream else [answers]


@contextmanager
def waiting(manager: Any, obj: Any, request: Any) -> Iterator[WaitingRequest]:
    """Context manager. Inside it, SGLang's ``manager`` knows the request ``obj``. Raises ValueError if SGLang
    refuses the request, for example because its id is in use."""
    entered = WaitingRequest(manager, obj, request)
    others = _waiting_in(manager)
    others.append(entered)
    try:
        yield entered
    finally:
        others.remove(entered)
        for state in entered.states:
            if not state.finished:
                state.time_stats.set_finished_time()
        manager._release_req_states_on_failure({state.obj.rid: state for state in entered.states})


def _waiting_in(manager: Any) -> list[WaitingRequest]:
    if not hasattr(manager, WAITING):
        setattr(manager, WAITING, [])
    requests: list[WaitingRequest] = getattr(manager, WAITING)
    return requests


def after_abort(_result: None, manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Hook after SGLang's ``abort_request``: aborts waiting requests, as SGLang aborts those of the schedulers.
    If SGLang knows the id ``rid``, or several processes serve HTTP, it aborts all requests whose id begins with
    ``rid``. If another process gets the abort, the schedulers abort the prefills: their ids begin with that of
    the request."""
    several = manager.server_args.tokenizer_worker_num > 1
    if abort_all or (rid and (several or rid in manager.rid_to_state)):
        for request in _waiting_in(manager):
            if abort_all or any(state.obj.rid.startswith(rid) for state in request.states):
                request.aborted.set()

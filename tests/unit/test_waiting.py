# SPDX-License-Identifier: Apache-2.0
"""Aborts of requests whose documents are being prefilled, with SGLang's own ``TokenizerManager``. The tests
play the scheduler: they read what the manager sends, and answer."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import HTTPException
from sglang.srt.managers import io_struct, tokenizer_manager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    GenerateReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_context, get_server_args, publish
from sglang.srt.server_args import PortArgs

from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import documents_of
from sglang_reasoncache.plugin import documents, waiting

#: Spans of three documents behind a base of four tokens.
SPANS = [[4, 12], [12, 20], [20, 26]]
PROMPT = list(range(5, 40))
STATUS = {"type": "abort", "message": "too many requests", "status_code": 503, "err_type": None}


class Manager(TokenizerManager):
    """The manager with our hooks. ``sent``: the requests and aborts that it sent to the scheduler."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sent: list[Any] = []
        self._reasoncache_composes = True

    def generate_request(self, obj: Any, request: Any = None) -> Any:
        return documents.around_generate(TokenizerManager.generate_request, self, obj, request)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        super().abort_request(rid, abort_all)
        waiting.after_abort(None, self, rid, abort_all)

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        self.sent.append(obj)

    def auto_create_handle_loop(self) -> None:
        """Nothing is received: the test calls what handles SGLang's answers."""

    def received(self) -> list[Any]:
        """The requests that the scheduler has received and that were not aborted."""
        aborted = {each.rid for each in self.sent if isinstance(each, AbortReq)}
        sent = (each for each in self.sent if isinstance(each, TokenizedGenerateReqInput))
        return [each for each in sent if each.rid not in aborted]

    async def finish(self, rid: str, reason: dict[str, Any] | None = None) -> None:
        """The scheduler ends a request, with the finish reason of a full length unless ``reason`` is given."""
        required = (field for field in msgspec.structs.fields(BatchStrOutput) if field.required)
        values: dict[str, list[Any]] = {field.name: [None] for field in required}
        numbers = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")
        values |= {name: [0] for name in (*numbers, "retraction_counts")}
        values |= {
            "output_strs": [""],
            "output_ids": [array("q")],
            "finished_reasons": [reason or {"type": "length", "length": 0}],
        }
        await self._handle_batch_output(BatchStrOutput(rids=[rid], **values))

    def echo(self) -> None:
        """The scheduler tells the manager which of its requests were aborted."""
        rids = [each.rid for each in self.sent if isinstance(each, TokenizedGenerateReqInput)]
        for abort in [each for each in self.sent if isinstance(each, AbortReq)]:
            for rid in rids:
                if rid in self.rid_to_state and (abort.abort_all or rid.startswith(abort.rid)):
                    self._handle_abort_req(AbortReq(rid=rid))


class Client:
    """An HTTP request whose client leaves once ``left`` is set."""

    left = False

    async def is_disconnected(self) -> bool:
        return self.left


@pytest.fixture
def run(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs an asynchronous test with a manager. No request may be left when the test ends."""
    monkeypatch.setattr(tokenizer_manager, "_REQUEST_STATE_WAIT_TIMEOUT", 0.01)
    path = str(model_path)

    async def whole(test: Callable[[Manager], Awaitable[None]]) -> None:
        manager = Manager(get_server_args(), PortArgs.init_new(get_server_args()))
        try:
            await asyncio.wait_for(test(manager), 60)
            await _turns()
            manager.echo()
            assert not manager.rid_to_state and not waiting._waiting_in(manager)
        finally:
            # Garbage collection of ZeroMQ's context would wait for open sockets, for ever.
            manager.recv_from_detokenizer.close(0)
            manager.send_to_scheduler.close(0)

    with get_context().override_server_args(model_path=path, tokenizer_path=path, device="cpu"):
        publish(get_server_args(), role="tokenizer")
        setattr(get_server_args(), CONFIG, ReasonCacheConfig())
        yield lambda test: asyncio.run(whole(test))


async def _turns() -> None:
    """Let everything run that waits for nothing."""
    for _ in range(50):
        await asyncio.sleep(0)


def _obj(
    rid: Any = "mine", marked: bool = True, n: int = 1, repair: str = "none", **options: Any
) -> Any:
    sampling: dict[str, Any] = {"max_new_tokens": 8, "n": n}
    custom = {"documents": SPANS, "documents_repair": repair}
    sampling |= {"custom_params": custom} if marked else {}
    return GenerateReqInput(input_ids=PROMPT, rid=rid, sampling_params=sampling, **options)


async def _all_of(manager: Manager, obj: Any, client: Any = None) -> list[Any]:
    return [answer async for answer in manager.generate_request(obj, client)]


async def _prefilling(manager: Manager, obj: Any, client: Any = None) -> Any:
    """A task that generates ``obj``. Its first document is prefilled, the others are in the scheduler."""
    task = asyncio.ensure_future(_all_of(manager, obj, client))
    await _turns()
    [first] = manager.received()
    assert list(first.input_ids) == PROMPT[:12]
    await manager.finish(first.rid)
    await _turns()
    assert [list(each.input_ids) for each in manager.received()[1:]] == [
        [*PROMPT[:4], *PROMPT[slice(*span)]] for span in SPANS[1:]
    ]
    return task


def _is_abort(answer: Any, rid: str | None = "mine") -> bool:
    reason = answer["meta_info"]["finish_reason"]
    return reason["type"] == "abort" and rid in (None, answer["meta_info"]["id"])


def test_documents_first_then_the_request(run: Any) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj())
        for each in manager.received()[1:]:
            await manager.finish(each.rid)
        await _turns()
        assert manager.received()[-1].rid == "mine"
        await manager.finish("mine")
        [answer] = await task
        assert not _is_abort(answer) and len(manager.sent) == 1 + len(SPANS)

    run(test)


def test_schedulers_can_read_what_is_sent(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In SGLang's messages (``SGLANG_USE_PICKLE_IPC=0``), which have no lists of lists; where SGLang sorts by
    ``routing_key``, documents keep their request's."""
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", False)

    async def test(manager: Manager) -> None:
        obj = _obj(routing_key="a", repair="query:.5")
        task = await _prefilling(manager, obj)
        for _ in range(2):
            for each in manager.received()[1:]:
                if each.rid in manager.rid_to_state and each.rid != "mine":
                    await manager.finish(each.rid)
            await _turns()
        for each in manager.received():
            each.wrap_pickle_fields()
            read = io_struct.msgpack_decode(io_struct.msgpack_encode(each))
            assert read.routing_key == "a"
            marked = documents_of(read.sampling_params.custom_params, len(read.input_ids))
            assert marked is None or [list(span) for span in marked.spans()] == SPANS
        assert manager.received()[-1].rid == "mine" and marked is not None
        await manager.finish("mine")
        await task

    run(test)


def test_documents_and_their_request_go_to_one_group(run: Any) -> None:
    """Each group of DP attention, or replica, has a prefix cache of its own."""

    async def test(manager: Manager) -> None:
        manager.elastic_worker_count = 8
        task = await _prefilling(manager, _obj())
        for each in manager.received()[1:]:
            await manager.finish(each.rid)
        await _turns()
        await manager.finish("mine")
        await task
        [group] = {each.routed_dp_rank for each in manager.received()}
        assert group in range(8)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["rid", "prefix", "all"])
def test_an_abort_ends_the_prefills(run: Any, how: str, stream: bool) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj(stream=stream), Client())
        prefills = manager.received()[1:]
        # SGLang ignores an id that it does not know.
        manager.abort_request("mi")
        manager.abort_request("")
        await _turns()
        assert not task.done() and manager.received()[1:] == prefills
        if how == "prefix":
            # Now it knows the id, and aborts all requests whose id begins so.
            other = asyncio.ensure_future(_all_of(manager, _obj("mi", marked=False)))
            await _turns()
        rid = {"rid": "mine", "prefix": "mi", "all": ""}[how]
        manager.abort_request(rid, abort_all=how == "all")
        [answer] = await task
        assert _is_abort(answer)
        await _turns()
        assert not [each for each in prefills if each in manager.received()]
        manager.echo()
        assert not manager.rid_to_state
        if how == "prefix":
            assert _is_abort((await other)[0], "mi")
        # The id is free again.
        manager.sent.clear()
        again = asyncio.ensure_future(_all_of(manager, _obj(marked=False)))
        await _turns()
        await manager.finish("mine")
        assert not _is_abort((await again)[0])

    run(test)


def test_an_abort_in_another_process_that_serves_http(run: Any) -> None:
    """It reaches the scheduler only, which aborts all requests whose id begins with the aborted id."""

    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj())
        manager.sent.append(AbortReq(rid="mine"))
        manager.echo()
        assert _is_abort((await task)[0])

    run(test)


def test_a_prefix_of_an_id_that_another_process_knows(run: Any) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj())
        manager.server_args = SimpleNamespace(tokenizer_worker_num=2)
        manager.abort_request("mi")
        assert _is_abort((await task)[0])

    run(test)


def test_an_abort_before_a_document_is_sent(run: Any) -> None:
    """While generation is paused, SGLang sends nothing to the scheduler. An abort is answered all the same."""

    async def test(manager: Manager) -> None:
        manager.is_pause = True
        task = asyncio.ensure_future(_all_of(manager, _obj()))
        await _turns()
        manager.abort_request("mine")
        assert _is_abort((await task)[0])
        assert not manager.received()

    run(test)


def test_an_abort_just_when_the_documents_are_done(run: Any) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj())
        for each in manager.received()[1:]:
            await manager.finish(each.rid)
        manager.abort_request("mine")
        assert _is_abort((await task)[0])
        assert len(manager.received()) == len(SPANS)

    run(test)


def test_an_abort_while_the_schedulers_are_asked(run: Any) -> None:
    """The schedulers' answer reaches whom it is for, though the first who asked was aborted."""

    async def test(manager: Manager) -> None:
        del manager._reasoncache_composes
        task = asyncio.ensure_future(_all_of(manager, _obj()))
        await _turns()
        [asked] = [each for each in manager.sent if not isinstance(each, AbortReq)]
        manager.abort_request("mine")
        assert _is_abort((await task)[0])
        later = asyncio.ensure_future(manager.get_internal_state_communicator(asked))
        for number in (1, 2):
            await _turns()
            state = {"number": number}
            manager.get_internal_state_communicator.handle_recv(_State(state))
        assert [told.internal_state for told in await later] == [{"number": 2}]

    run(test)


def test_the_schedulers_are_asked_once_for_all(run: Any) -> None:
    """Each question takes a pass of a scheduler, and after a restart many requests come at once."""

    async def test(manager: Manager) -> None:
        del manager._reasoncache_composes
        asking = [asyncio.ensure_future(documents._composes(manager)) for _ in range(50)]
        await _turns()
        [asked] = manager.sent
        assert asked.rid == "/reasoncache"
        # A scheduler that failed says nothing, and is asked again.
        manager.get_internal_state_communicator.handle_recv(_State({"reasoncache": {}}))
        assert await asyncio.gather(*asking) == [False] * 50
        asking = [asyncio.ensure_future(documents._composes(manager)) for _ in range(50)]
        await _turns()
        answer = _State({"reasoncache": {"documents_off": None}})
        manager.get_internal_state_communicator.handle_recv(answer)
        assert await asyncio.gather(*asking) == [True] * 50
        assert await documents._composes(manager) and len(manager.sent) == 2

    run(test)


class _State:
    def __init__(self, internal_state: dict[str, Any]) -> None:
        self.internal_state = internal_state


def test_an_id_in_use_is_refused(run: Any) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj())
        sent = list(manager.sent)
        for marked in (True, False):
            with pytest.raises(ValueError, match="Duplicate request ID detected: mine"):
                await _all_of(manager, _obj(marked=marked))
        assert manager.sent == sent and not task.done()
        manager.abort_request("mine")
        assert _is_abort((await task)[0])
        # A marked request, too, is refused if SGLang has an unmarked request with its id.
        manager.echo()
        manager.sent.clear()
        other = asyncio.ensure_future(_all_of(manager, _obj(marked=False)))
        await _turns()
        with pytest.raises(ValueError, match="Duplicate request ID detected: mine"):
            await _all_of(manager, _obj())
        await manager.finish("mine")
        assert not _is_abort((await other)[0])

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_of_several_samples(run: Any, stream: bool) -> None:
    """SGLang numbers the ids of samples. It answers with a list, or streams each sample with its index."""

    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj(n=2, stream=stream))
        manager.abort_request("mine_1")
        found = await task
        samples = found if stream else found[0]
        assert [_is_abort(each, f"mine_{at}") for at, each in enumerate(samples)] == [True, True]
        assert not stream or [each["index"] for each in samples] == [0, 1]

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_by_the_scheduler_keeps_its_reason(run: Any, stream: bool) -> None:
    """A refused document's other documents are aborted, and the client is told why."""

    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj(stream=stream))
        prefills = manager.received()[1:]
        await manager.finish(prefills[0].rid, STATUS)
        await _turns()
        if not stream:
            with pytest.raises(HTTPException) as told:
                await task
            assert (told.value.status_code, told.value.detail) == (503, STATUS["message"])
            assert prefills[1] not in manager.received()
            return
        await manager.finish(prefills[1].rid)
        [answer] = await task
        assert _is_abort(answer) and answer["meta_info"]["finish_reason"] == STATUS

    run(test)


@pytest.mark.parametrize("background", [False, True])
def test_a_client_that_leaves(run: Any, background: bool) -> None:
    async def test(manager: Manager) -> None:
        client = Client()
        task = await _prefilling(manager, _obj(background=background), client)
        prefills = manager.received()[1:]
        client.left = True
        if not background:
            with pytest.raises(ValueError, match="disconnected"):
                await task
            await _turns()
            assert not [each for each in prefills if each in manager.received()]
            return
        # A background response goes on without its client, and so do its documents.
        await asyncio.sleep(0.1)
        for each in prefills:
            await manager.finish(each.rid)
        await _turns()
        await manager.finish("mine")
        assert not _is_abort((await task)[0])

    run(test)


def test_a_stream_that_is_cancelled(run: Any) -> None:
    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj(stream=True), Client())
        task.cancel()
        await _turns()
        assert task.cancelled() and len(manager.received()) == 1

    run(test)


def test_an_id_like_that_of_a_health_check(run: Any) -> None:
    """SGLang ignores aborts of its own health checks. Who borrows such an id gets an error, not silence."""

    async def test(manager: Manager) -> None:
        task = await _prefilling(manager, _obj("HEALTH_CHECK_mine"))
        manager.abort_request(abort_all=True)
        with pytest.raises(ValueError, match="'HEALTH_CHECK_mine' was aborted"):
            await task
        for each in manager.received()[1:]:
            await manager.finish(each.rid)

    run(test)


def test_a_server_without_the_plugin_gets_requests_as_they_are(run: Any) -> None:
    """An earlier server in the process has installed the hooks."""

    async def test(manager: Manager) -> None:
        manager.server_args = SimpleNamespace()
        obj = _obj()
        before = dict(obj.sampling_params)
        seen: list[Any] = []
        original: Any = lambda *given: seen.append(given)  # noqa: E731
        documents.around_generate(original, manager, obj)
        assert seen == [(manager, obj, None)] and obj.sampling_params == before

    run(test)

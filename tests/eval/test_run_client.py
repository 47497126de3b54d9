# SPDX-License-Identifier: Apache-2.0
"""The client against an HTTP server that answers, breaks off, lies and never ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from eval.runs import client
from eval.runs.client import Request, ask_all, send_all
from eval.runs.records import Response
from tests.eval.peer import Peer as ManyPeer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """One server-sent event as an HTTP chunk."""
    finish = fields.pop("finish_reason", None)
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta is not None else []
    body = {"id": "r1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return raw("data: " + json.dumps({**body, "choices": choices, **fields}))


def raw(text: str) -> bytes:
    data = (text + "\n\n").encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12})
END = raw("data: [DONE]") + b"0\r\n\r\n"
STOP = event({}, finish_reason="stop")


class Peer:
    """Sends each request the next script; the last one again and again.

    Attributes:
        bodies: of the requests, in order of arrival.
        most_open: requests that were open at once.
    """

    def __init__(self, *scripts: bytes, pause: float = 0.0, endless: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_open = 0
        self._open = 0
        self._scripts = scripts
        self._pause = pause
        self._endless = endless

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            yield f"http://127.0.0.1:{port}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length:")[1].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(size)))
        script = self._scripts[min(len(self.bodies), len(self._scripts)) - 1]
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        await asyncio.sleep(self._pause)
        try:
            writer.write(script)
            while self._endless:
                writer.write(event({"content": "x" * 1000}))
                await writer.drain()
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._open -= 1
            writer.close()


def ask(peer: Peer, count: int = 1, **options: Any) -> list[Response]:
    """All responses in the order they ended."""
    ended: list[Response] = []

    async def run() -> None:
        async with peer.serving() as url:
            requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(count)]
            await send_all(url, "m", requests, 3, ended.append, 10.0, **options)

    asyncio.run(run())
    return ended


def test_reasoning_comes_before_the_answer() -> None:
    script = HEAD + event({"role": "assistant", "content": ""})
    for delta in ({"reasoning_content": "so "}, {"reasoning_content": "be it"}, {"content": "4"}):
        script += event(delta)
    peer = Peer(script + STOP + USAGE + END)
    (response,) = ask(peer)
    assert response.error is None
    assert response.text == "<think>so be it</think>4"
    assert (response.prompt_tokens, response.output_tokens) == (5, 7)
    assert (response.problem_id, response.leg, response.request_id) == ("p0", 3, "r1")
    assert response.finish_reason == "stop"
    assert response.first_token is not None
    assert response.started <= response.first_token <= response.ended


def test_the_body_is_what_was_asked_for() -> None:
    peer = Peer(HEAD + event({"content": "a"}) + STOP + USAGE + END)
    (response,) = ask(peer)
    assert response.text == "a"
    (body,) = peer.bodies
    assert (body["top_k"], body["stream"], body["model"]) == (4, True, "m")
    assert body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "prompt 0"}]


BROKEN = {
    "breaks off": HEAD + event({"content": "half"}),
    "ends without a finish reason": HEAD + event({"content": "half"}) + END,
    "is aborted": HEAD + event({"content": "half"}) + event({}, finish_reason="abort") + END,
    "is no JSON": HEAD + event({"content": "half"}) + raw("data: {nope") + END,
    "tells of an error": HEAD
    + event({"content": "half"})
    + raw('data: {"error": {"message": "no memory", "code": 500}}')
    + END,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_goes_wrong(name: str) -> None:
    (response,) = ask(Peer(BROKEN[name]))
    assert response.error
    assert response.text == "half"


@pytest.mark.parametrize(
    "script",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\n{}",
        b"what?",
        b"",
    ],
)
def test_no_answer_at_all(script: bytes) -> None:
    (response,) = ask(Peer(script))
    assert response.error
    assert (response.text, response.first_token) == ("", None)


def test_failures_are_recorded_and_tried_again() -> None:
    good = HEAD + event({"content": "a"}) + STOP + USAGE + END
    first, second = ask(Peer(BROKEN["breaks off"], good), attempts=3)
    assert first.error
    assert (second.error, second.text) == (None, "a")
    assert len(ask(Peer(b""), attempts=3)) == 3


def test_an_endless_response_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CHARACTERS", 10_000)
    (response,) = ask(Peer(HEAD, endless=True))
    assert response.error == "the response has more than 10000 characters"
    assert len(response.text) < 20_000


@pytest.mark.parametrize(("in_flight", "expected"), [(2, 2), (None, 150)])
def test_requests_in_flight(in_flight: int | None, expected: int) -> None:
    """Without a bound all are open at once, whatever the client's library is used to."""
    good = HEAD + event({"content": "a"}) + STOP + USAGE + END
    peer = Peer(good, pause=0.01 if in_flight else 2.0)
    count = expected if in_flight is None else 10
    responses = ask(peer, count, in_flight=in_flight)
    assert not [row.error for row in responses if row.error]
    assert len({row.problem_id for row in responses}) == count
    assert peer.most_open == expected


def test_responses_in_the_order_of_the_requests() -> None:
    with ManyPeer().serving() as peer:
        requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(5)]
        answers = ask_all(peer.url, "m", requests)
    assert [row.problem_id for row in answers] == [f"p{i}" for i in range(5)]
    assert {body["top_k"] for body in peer.bodies} == {4}


def test_what_a_listener_raises_comes_through() -> None:
    good = HEAD + event({"content": "a"}) + STOP + USAGE + END

    def full(_: Response) -> None:
        raise OSError("disk full")

    async def run(ended: Callable[[Response], None]) -> None:
        async with Peer(good).serving() as url:
            await send_all(url, "m", [Request("p", "q")], 0, ended, 10.0)

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(run(full))

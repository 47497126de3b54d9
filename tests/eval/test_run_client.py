# SPDX-License-Identifier: Apache-2.0
"""The client against an HTTP server that answers, breaks off, lies and never ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eval.runs import client
from eval.runs.client import Request, ask_all, send_all
from eval.runs.records import Response
from tests.eval.peer import END, HEAD, Peer, answer, event, raw

HALF = HEAD + event({"content": "half"})


def ask(peer: Peer, count: int = 1, **options: Any) -> list[Response]:
    """All responses in the order they ended."""
    ended: list[Response] = []
    requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(count)]
    with peer.serving():
        asyncio.run(send_all(peer.url, "m", requests, 3, ended.append, 10.0, **options))
    return ended


def test_reasoning_comes_before_the_answer() -> None:
    script = HEAD + event({"role": "assistant", "content": ""})
    for delta in ({"reasoning_content": "so "}, {"reasoning_content": "be it"}, {"content": "4"}):
        script += event(delta)
    (response,) = ask(Peer(script + answer("")[len(HEAD) :]))
    assert response.error is None
    assert response.text == "<think>so be it</think>4"
    assert (response.prompt_tokens, response.output_tokens) == (5, 7)
    assert (response.problem_id, response.leg, response.request_id) == ("p0", 3, "r1")
    assert response.finish_reason == "stop"
    assert response.first_token is not None
    assert response.started <= response.first_token <= response.ended


def test_a_stream_that_goes_wrong() -> None:
    for rest in (
        b"",
        END,
        event({}, finish_reason="abort") + END,
        raw("data: {nope") + END,
        raw('data: {"error": {"message": "no memory", "code": 500}}') + END,
    ):
        (response,) = ask(Peer(HALF + rest))
        assert response.error and response.text == "half", rest


def test_no_answer_at_all() -> None:
    oops = b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops"
    for script in (oops, b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\n{}", b"what?", b""):
        (response,) = ask(Peer(script))
        assert response.error and (response.text, response.first_token) == ("", None), script
    first, second = ask(Peer(HALF, answer("a")), attempts=3)
    assert first.error and (second.error, second.text) == (None, "a")
    assert len(ask(Peer(b""), attempts=3)) == 3


def test_an_endless_response_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CHARACTERS", 10_000)
    (response,) = ask(Peer(HEAD, endless=True))
    assert response.error == "the response has more than 10000 characters"
    assert len(response.text) < 20_000


@pytest.mark.parametrize(("in_flight", "expected"), [(2, 2), (None, 150)])
def test_requests_in_flight(in_flight: int | None, expected: int) -> None:
    """Without a bound all are open at once, whatever the client's library is used to."""
    peer = Peer(answer("a"), pause=0.01 if in_flight else 2.0)
    count = expected if in_flight is None else 10
    responses = ask(peer, count, in_flight=in_flight)
    assert not [row.error for row in responses if row.error]
    assert len({row.problem_id for row in responses}) == count
    assert peer.most_open == expected


def test_responses_in_the_order_of_the_requests() -> None:
    with Peer().serving() as peer:
        requests = [Request(f"p{i}", f"prompt {i}", {"top_k": 4}) for i in range(5)]
        answers = ask_all(peer.url, "m", requests)
    assert [(row.problem_id, row.text) for row in answers] == [(f"p{i}", "a") for i in range(5)]
    for body in peer.bodies:
        assert (body["top_k"], body["stream"], body["model"]) == (4, True, "m")
        assert body["stream_options"] == {"include_usage": True}
    asked = sorted(body["messages"][0]["content"] for body in peer.bodies)
    assert asked == [request.prompt for request in requests]


def test_what_a_listener_raises_comes_through() -> None:
    def full(_: Response) -> None:
        raise OSError("disk full")

    with Peer().serving() as peer, pytest.raises(OSError, match="disk full"):
        asyncio.run(send_all(peer.url, "m", [Request("p", "q")], 0, full, 10.0))

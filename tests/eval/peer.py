# SPDX-License-Identifier: Apache-2.0
"""An HTTP peer that answers chat completions, the server of a run that speaks for it, and rows."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from eval.runs.records import Leg, Moment, Response, Result
from eval.runs.servers import Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def raw(text: str) -> bytes:
    """One server-sent event as an HTTP chunk."""
    data = (text + "\n\n").encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A piece of a streamed completion."""
    finish = fields.pop("finish_reason", None)
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta is not None else []
    body = {"id": "r1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return raw("data: " + json.dumps({**body, "choices": choices, **fields}))


END = raw("data: [DONE]") + b"0\r\n\r\n"


def answer(text: str, finish_reason: str = "stop", tokens: int = 7) -> bytes:
    """A whole response."""
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    end = event({}, finish_reason=finish_reason) + event(usage=usage) + END
    return HEAD + event({"content": text}) + end


class Peer:
    """Sends each request the next script; the last one again and again."""

    def __init__(self, *scripts: bytes, pause: float = 0.0, endless: bool = False) -> None:
        self.url = ""  # while it is serving
        self.bodies: list[dict[str, Any]] = []  # of the requests, in order of arrival
        # What a GET of a path says; 404 elsewhere.
        self.pages: dict[str, Callable[[], Any]] = {"/v1/models": lambda: {"data": [{"id": "m"}]}}
        self.scripts = scripts or (answer("a"),)
        self.most_open = self._open = 0  # requests at once
        self._pause, self._endless, self._lock = pause, endless, threading.Lock()

    @contextmanager
    def serving(self) -> Iterator[Peer]:
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = peer.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(page() if page else {}).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(ConnectionError):
                    for piece in peer._pieces(json.loads(body)):
                        self.wfile.write(piece)

            def log_message(self, *_: object) -> None:
                return None

        class Listener(ThreadingHTTPServer):
            # The requests of a run all come at once.
            request_queue_size = 256

        server = Listener(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _pieces(self, body: dict[str, Any]) -> Iterator[bytes]:
        with self._lock:
            self.bodies.append(body)
            script = self.scripts[min(len(self.bodies), len(self.scripts)) - 1]
            self._open += 1
            self.most_open = max(self.most_open, self._open)
        try:
            time.sleep(self._pause)
            yield script
            while self._endless:
                yield event({"content": "x" * 1000})
        finally:
            with self._lock:
                self._open -= 1


class PeerServer(Server):
    """A peer as what a cell is measured on; every fault can be had on demand."""

    def __init__(self, peer: Peer, *flags: str) -> None:
        super().__init__(url=peer.url)
        self.command = ["serve", *flags]
        self.totals: dict[str, Any] = {}  # of its report
        self.settling: Exception | None = None  # raised when it is to settle
        self.log: str | OSError = ""  # what it has written; an OSError is raised instead

    def report(self) -> dict[str, Any]:
        return {"totals": dict(self.totals)} if self.totals else {}

    def kv_slots(self) -> int | None:
        return 4000

    def settle(self) -> None:
        if self.settling is not None:
            raise self.settling

    def clear(self) -> int | None:
        return 0

    def log_text(self, since: int) -> str:
        if isinstance(self.log, OSError):
            raise self.log
        return self.log[since:]


def response(problem: str, **changes: Any) -> Response:
    row: dict[str, Any] = {"started": 0.5, "first_token": 1.0, "ended": 2.0, "leg": 0, "text": ""}
    row |= {"request_id": "r", "prompt_tokens": 5, "output_tokens": 11, "finish_reason": "stop"}
    return Response(problem_id=problem, **{**row, **changes})


def result(problem: str, right: bool, group: str = "", tokens: int = 5) -> Result:
    return Result(problem, right, float(right), None, "", group, tokens)


def leg(number: int = 0, totals: dict[str, Any] | None = None, **changes: Any) -> Leg:
    row: dict[str, Any] = {"seconds": 10.0, "output_tokens": 100, "responses": 4, "decode_steps": 9}
    row |= {"retractions": 1, "leaked_slots": 0, "command": ["serve"]}
    row |= {"report": {"totals": totals} if totals else {}}
    return Leg(leg=number, **{**row, **changes})


def moment(
    step: int, running: int = 1, used: int = 10, saved: int = 3, rate: float = 100
) -> Moment:
    return Moment(0, step, running, 0, used, saved, rate)

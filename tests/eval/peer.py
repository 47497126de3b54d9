# SPDX-License-Identifier: Apache-2.0
"""An HTTP peer that answers every chat completion alike, and the server of a run that speaks for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Peer:
    """Streams one text to whoever asks.

    Attributes:
        url: where, while it is :meth:`serving`.
        bodies: of the requests, in order of arrival.
        pages: what a GET of a path says; 404 elsewhere.
        text, finish_reason, output_tokens: of each answer.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.pages: dict[str, Callable[[], Any]] = {"/v1/models": lambda: {"data": [{"id": "m"}]}}
        self.text, self.finish_reason, self.output_tokens = "a", "stop", 7

    @contextmanager
    def serving(self) -> Iterator[Peer]:
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = peer.pages.get(self.path)
                self._say(404 if page is None else 200, json.dumps(page() if page else {}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                peer.bodies.append(json.loads(body))
                self._say(200, peer.stream(), "text/event-stream")

            def _say(self, status: int, text: str, kind: str = "application/json") -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return None

        class Server(ThreadingHTTPServer):
            # The requests of a run all come at once.
            request_queue_size = 256

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def stream(self) -> str:
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": self.output_tokens,
            "total_tokens": 5 + self.output_tokens,
        }
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": self.text}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]},
            {"choices": [], "usage": usage},
        ]
        head = {"id": "r", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        lines = [f"data: {json.dumps({**head, **event})}\n\n" for event in events]
        return "".join(lines) + "data: [DONE]\n\n"


class PeerServer:
    """A peer as what a cell is measured on; every fault can be had on demand.

    Attributes:
        totals: of its report.
        settling: raised when it is to settle.
        log: what it has written; an OSError is raised instead.
    """

    model = "m"

    def __init__(self, peer: Peer, *flags: str) -> None:
        self.url = peer.url
        self.command = ["serve", *flags]
        self.totals: dict[str, Any] = {}
        self.settling: Exception | None = None
        self.log: str | OSError = ""

    def report(self) -> dict[str, Any]:
        return {"totals": dict(self.totals)} if self.totals else {}

    def kv_slots(self) -> int | None:
        return 4000

    def settle(self) -> None:
        if self.settling is not None:
            raise self.settling

    def clear(self) -> int | None:
        return 0

    def log_size(self) -> int:
        return 0

    def log_text(self, since: int) -> str:
        if isinstance(self.log, OSError):
            raise self.log
        return self.log[since:]

    def check(self) -> None:
        return None

# SPDX-License-Identifier: Apache-2.0
"""A fake chat-completions server (the peer), a ``Server`` backed by it, and functions that make records."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from eval.runs.client import Request, send_all
from eval.runs.folder import Moment, Response, Result, Served
from eval.runs.servers import Server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def raw(text: str) -> bytes:
    data = (text + "\n\n").encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta: dict[str, Any] | None = None, **fields: Any) -> bytes:
    finish = fields.pop("finish_reason", None)
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta is not None else []
    body = {"id": "r1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return raw("data: " + json.dumps({**body, "choices": choices, **fields}))


END = raw("data: [DONE]") + b"0\r\n\r\n"


def answer(text: str, finish_reason: str = "stop") -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    end = event({}, finish_reason=finish_reason) + event(usage=usage) + END
    return HEAD + event({"content": text}) + end


def ask_all(url: str, model: str, requests: Sequence[Request]) -> list[Response]:
    """Sends all requests at once, without retries; returns the responses in the order of the requests."""
    ended: list[Response] = []
    asyncio.run(send_all(url, model, requests, ended.append, 600.0))
    found = {response.problem_id: response for response in ended}
    return [found[request.problem_id] for request in requests]


class Peer(ThreadingHTTPServer):
    """Sends one script (a raw HTTP response) per request, then repeats the last. Serves inside ``with``."""

    request_queue_size = (
        256  # connections that may wait for acceptance; a run sends all requests at once
    )

    def __init__(self, *scripts: bytes, pause: float = 0.0, endless: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.bodies: list[dict[str, Any]] = []  # request bodies, in order of arrival
        self.scripts = scripts or (answer("a"),)
        self.open = self.most_open = 0  # requests in flight now, and the most so far
        self.pause = pause
        self.endless = endless
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        # The server looks for a shutdown every 10 ms; the default is half a second.
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Peer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        peer = self.server
        with peer.lock:
            peer.bodies.append(json.loads(body))
            script = peer.scripts[min(len(peer.bodies), len(peer.scripts)) - 1]
            peer.open += 1
            peer.most_open = max(peer.most_open, peer.open)
        with contextlib.suppress(ConnectionError):
            time.sleep(peer.pause)
            self.wfile.write(script)
            while peer.endless:
                self.wfile.write(event({"content": "x" * 1000}))
        with peer.lock:
            peer.open -= 1

    def log_message(self, *_: object) -> None:
        return None


class PeerServer(Server):
    """A ``Server`` whose requests go to a peer, so that a run can be measured without SGLang."""

    def __init__(self, peer: Peer, *flags: str) -> None:
        self.log = ""  # text of the server log
        process: Any = SimpleNamespace(
            url=peer.url,
            command=["serve", *flags],
            check_alive=lambda: None,
            log_size=lambda: 0,
            log_text=lambda since: self.log,
        )
        super().__init__(process)
        self.totals: dict[str, Any] = {}  # ``totals`` of the report; if empty, there is no report
        self.settling: Exception | None = None  # ``settle`` raises this

    def reports(self) -> list[dict[str, Any]]:
        return [{"totals": dict(self.totals)}] if self.totals else []

    def kv_slots(self) -> int:
        return 4000

    def cpu_seconds(self) -> float:
        return 1.0

    def settle(self) -> None:
        if self.settling is not None:
            raise self.settling

    def clear(self) -> int:
        return 0


def response(problem: str, **changes: Any) -> Response:
    row: dict[str, Any] = {"started": 0.5, "first_token": 1.0, "ended": 2.0, "text": ""}
    row |= {"request_id": "r", "prompt_tokens": 5, "output_tokens": 11, "finish_reason": "stop"}
    return Response(problem_id=problem, **{**row, **changes})


def result(problem: str, right: bool, group: str = "", tokens: int = 5) -> Result:
    return Result(problem, right, float(right), None, "", group, tokens)


def served(totals: dict[str, Any] | None = None, **changes: Any) -> Served:
    row: dict[str, Any] = {"seconds": 10.0, "output_tokens": 100, "responses": 4, "decode_steps": 9}
    row |= {"retractions": 1, "leaked_slots": 0, "command": ["serve"], "kv_slots": 4000}
    row |= {"cut_prompts": 0, "cpu_seconds": 2.0}
    row |= {"reports": [{"totals": totals}] if totals else []}
    return Served(**{**row, **changes})


def moment(step: int, running: int = 1, used: int = 10, saved: int = 3, queued: int = 0) -> Moment:
    return Moment(step, running, queued, used, saved, 100.0)


def write_rows(path: Path, *rows: Any) -> Path:
    """Writes a JSONL file. A row of type ``str`` is written unchanged, so that a line may be invalid JSON."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path

# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, started or given by URL, and what they say of themselves."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from eval.runs.client import api_key, is_local
from eval.runs.folder import RunError
from eval.serving import MODEL_NAME, ServerError, ServerProcess

#: Folder of a run with the output of each server it started, whole.
LOGS = "servers"
_IDLE_TIMEOUT_S = 120.0
#: Ratio -> what it is an average over.
_WEIGHTS = {
    "memory_saving_ratio": "polls",
    "mean_running": "polls",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}
_COUNTS = ("requests_finished", "polls", "blocks_shared")


class Server(Protocol):
    """What measuring a cell needs of a server; ``command`` is [] of a given one."""

    @property
    def url(self) -> str: ...

    @property
    def command(self) -> list[str]: ...

    @property
    def model(self) -> str:
        """The name that requests give."""

    def report(self) -> dict[str, Any]:
        """``GET /reasoncache`` as of :func:`merge`, {} for stock."""

    def kv_slots(self) -> int | None:
        """KV slots that it really has, of one data-parallel scheduler; None if it does not say."""

    def settle(self) -> None:
        """Wait until nothing runs, so that the totals of :meth:`report` are whole."""

    def clear(self) -> int | None:
        """Flush its caches once it is idle, so that its totals restart; slots in use after."""

    def log_size(self) -> int:
        """Bytes it has written, for :meth:`log_text`."""

    def log_text(self, since: int) -> str:
        """What it has written since, "" for a given server."""

    def check(self) -> None:
        """Raises ServerError if it is dead."""


class StartedServer:
    """A server of our own."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.model = MODEL_NAME

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def command(self) -> list[str]:
        return self.process.command

    def report(self) -> dict[str, Any]:
        return fetch_report(self.process.get)

    def kv_slots(self) -> int | None:
        return fetch_kv_slots(self.process.get)

    def settle(self) -> None:
        _wait(self._idle, f"{self.url}: requests still run")

    def clear(self) -> int:
        self.settle()
        _wait(self._flushed, f"{self.url}: /flush_cache was refused")
        if any(self.report().get("totals", {}).get(name) for name in _COUNTS):
            raise RunError(f"{self.url}/reasoncache: the totals did not restart at /flush_cache")
        return self._sum("num_used_tokens")

    def log_size(self) -> int:
        return self.process.log_size()

    def log_text(self, since: int) -> str:
        return self.process.log_text(since)

    def check(self) -> None:
        self.process.check_alive()

    def _idle(self) -> bool:
        self.check()
        return not self._sum("num_running_reqs") and not self._sum("num_waiting_reqs")

    def _flushed(self) -> bool:
        self.check()
        return self.process.post("/flush_cache", params={"timeout": 10}).status_code == 200

    def _sum(self, name: str) -> int:
        try:
            response = self.process.get("/v1/loads", params={"include": "all"})
            response.raise_for_status()
            return int(sum(load[name] for load in response.json()["loads"]))
        except httpx.HTTPError as error:
            self.check()
            raise ServerError(f"{self.url}/v1/loads says {error!r}") from error


class GivenServer:
    """A server that somebody else runs; it is only asked, never flushed or ended."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.command: list[str] = []
        self._before: dict[str, Any] = {}
        try:
            response = self._get("/v1/models")
            response.raise_for_status()
            self.model = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"--url {self.url}: /v1/models says {error!r}") from error

    def report(self) -> dict[str, Any]:
        return since(self._before, fetch_report(self._get))

    def kv_slots(self) -> int | None:
        return fetch_kv_slots(self._get)

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(
            self.url + path,
            timeout=60.0,
            trust_env=not is_local(self.url),
            headers={"Authorization": f"Bearer {api_key()}"},
        )

    def settle(self) -> None:
        return None

    def clear(self) -> None:
        # Not ours to flush: what it has counted so far is taken off later reports.
        self._before = fetch_report(self._get)

    def log_size(self) -> int:
        return 0

    def log_text(self, since: int) -> str:
        return ""

    def check(self) -> None:
        return None


class Servers:
    """Started servers, by their flags. A context manager.

    Where idle servers cost nothing (a CPU, with ``--sleep-on-idle``) ``keep`` can stay up and
    take turns; the one that was used longest ago is closed. Logs go into the run's folder.
    """

    def __init__(self, run: Path, model_path: str | Path, device: str, keep: int = 1) -> None:
        self._logs = run / LOGS
        self._model_path = model_path
        self._device = device
        self._keep = keep
        self._up: OrderedDict[tuple[str, ...], StartedServer] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str, flags: Sequence[str], starting: Callable[[], None]) -> StartedServer:
        """The running server with these flags, else a new one.

        Args:
            name: for the log's file name.
            flags: of the server.
            starting: called before a start, which takes a minute or, for large models, many.

        Raises:
            ServerError: it does not start.
        """
        key = tuple(flags)
        server = self._up.pop(key, None)
        if server is not None and not server.process.alive:
            server.process.close()
            server = None
        if server is None:
            while len(self._up) >= self._keep:
                self._up.popitem(last=False)[1].process.close()
            starting()
            server = StartedServer(self._start(name, flags))
        self._up[key] = server
        return server

    def _start(self, name: str, flags: Sequence[str]) -> ServerProcess:
        number = len(list(self._logs.glob("*.log")))
        process = ServerProcess(
            self._model_path,
            flags=flags,
            log_path=self._logs / f"{number:03d}-{name}.log",
            device="cuda" if self._device == "cuda" else "cpu",
            # Weights of a large model may have to be fetched first.
            start_timeout_s=7200.0,
        )
        return process.start()

    def close(self) -> None:
        """End all."""
        while self._up:
            self._up.popitem()[1].process.close()


def _wait(ready: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise RunError(f"{problem} after {_IDLE_TIMEOUT_S:g} s")
        time.sleep(0.1)


def fetch_report(get: Callable[[str], httpx.Response]) -> dict[str, Any]:
    """The merged report, {} of a server without the plugin.

    Raises:
        ServerError: it cannot be had.
    """
    try:
        response = get("/reasoncache")
        if response.status_code == 404:
            return {}
        response.raise_for_status()
        return merge(response.json()["schedulers"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"/reasoncache says {error!r}") from error


def fetch_kv_slots(get: Callable[[str], httpx.Response]) -> int | None:
    """KV slots of a scheduler as ``/server_info`` tells, None of a server that does not."""
    # A server that somebody else runs need not be SGLang.
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        return int(get("/server_info").json()["max_total_num_tokens"])
    return None


def merge(schedulers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One report of all data-parallel schedulers: totals added up, ratios averaged by weight.

    Settings are the first scheduler's, which all share. {} where nothing shares.
    """
    reports = [dict(report) for report in schedulers if report]
    if len(reports) < 2:
        return reports[0] if reports else {}
    merged = reports[0]
    merged["totals"] = _combined([report.get("totals", {}) for report in reports], 1)
    for name in ("slots_saved_now", "positions_evicted_now"):
        merged[name] = sum(report.get(name, 0) for report in reports)
    merged["recent"] = [row for report in reports for row in report.get("recent", [])]
    return merged


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What a server has counted between two reports; {} if it began anew in between."""
    if not now or not before:
        return dict(now) if not before else {}
    totals = _combined([now.get("totals", {}), before.get("totals", {})], -1)
    if any(totals.get(name, 0) < 0 for name in _WEIGHTS.values()):
        return {}
    seen = {row.get("rid") for row in before.get("recent", [])}
    recent = [row for row in now.get("recent", []) if row.get("rid") not in seen]
    return {**now, "totals": totals, "recent": recent}


def _combined(totals: Sequence[Mapping[str, Any]], sign: int) -> dict[str, Any]:
    """The first with the others added or subtracted; of ratios what they average over is."""
    signs = [1, *[sign] * (len(totals) - 1)]
    out: dict[str, Any] = {}
    for name, first in totals[0].items():
        values = [one.get(name, type(first)()) for one in totals]
        if isinstance(first, dict):
            keys = {key for value in values for key in value}
            out[name] = {
                key: sum(s * value.get(key, 0) for s, value in zip(signs, values, strict=True))
                for key in sorted(keys)
            }
        elif name in _WEIGHTS:
            weights = [s * one.get(_WEIGHTS[name], 0) for s, one in zip(signs, totals, strict=True)]
            products = [value * weight for value, weight in zip(values, weights, strict=True)]
            out[name] = sum(products) / sum(weights) if sum(weights) > 0 else 0.0
        elif isinstance(first, (int, float)):
            out[name] = sum(s * value for s, value in zip(signs, values, strict=True))
    return out

# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, started or given by URL, and what they say of themselves."""

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from eval.runs.client import api_key, is_local
from eval.runs.folder import RunError
from eval.serving import MODEL_NAME, ServerError, ServerProcess

_IDLE_TIMEOUT_S = 120.0
#: Ratio -> what it is an average over.
_WEIGHTS = {
    "memory_saving_ratio": "polls",
    "across_ratio": "polls",
    "mean_running": "polls",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}
_COUNTS = ("requests_finished", "polls", "blocks_shared")


class Server:
    """A server of a cell: one of our own, or one given by URL, which is only asked."""

    def __init__(self, process: ServerProcess | None = None, url: str = "") -> None:
        """Raises ServerError: nothing answers at ``url``."""
        self.process = process
        self.url = process.url if process else url.rstrip("/").removesuffix("/v1")
        self.command = process.command if process else []  # [] of a given one
        self.model = MODEL_NAME  # the name that requests give
        self._before: dict[str, Any] = {}
        self._get: Any
        if process is not None:
            self._get = process.get
        else:
            own, key = is_local(self.url), {"Authorization": f"Bearer {api_key()}"}
            client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=not own, headers=key)
            self._get = client.get
            try:
                self.model = str(self._json("/v1/models")["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise ServerError(f"--url {self.url}: /v1/models says {error!r}") from error

    def report(self) -> dict[str, Any]:
        """``GET /reasoncache``, of our own server with details, {} for stock; see :func:`merge`,
        :func:`since`. Raises ServerError."""
        try:
            response = self._get("/reasoncache/details" if self.process else "/reasoncache")
            stock = response.status_code == 404
            told = [] if stock else response.raise_for_status().json()["schedulers"]
            return since(self._before, merge(told))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/reasoncache says {error!r}") from error

    def kv_slots(self) -> int | None:
        """KV slots that it really has, of one data-parallel scheduler; None if it does not say."""
        # A server that somebody else runs need not be SGLang.
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            return int(self._json("/server_info")["max_total_num_tokens"])
        return None

    def settle(self) -> None:
        """Wait until nothing runs in a server of our own, so that its totals are whole."""
        if self.process is not None:
            _wait(self._idle, f"{self.url}: requests still run")

    def clear(self) -> int | None:
        """Flush it once it is idle, so that its totals restart; slots in use after. None of a given
        server: what that has counted so far is taken off later reports."""
        if self.process is None:
            self._before = {}
            self._before = self.report()
            return None
        self.settle()
        _wait(self._flushed, f"{self.url}: /flush_cache was refused")
        if any(self.report().get("totals", {}).get(name) for name in _COUNTS):
            raise RunError(f"{self.url}/reasoncache: the totals did not restart at /flush_cache")
        return self._sum("num_used_tokens")

    def log_size(self) -> int:
        return self.process.log_size() if self.process else 0

    def log_text(self, since: int) -> str:
        """What it has written since, "" for a given server."""
        return self.process.log_text(since) if self.process else ""

    def check(self) -> None:
        if self.process is not None:
            self.process.check_alive()

    def _json(self, path: str, **options: Any) -> Any:
        return self._get(path, **options).raise_for_status().json()

    def _idle(self) -> bool:
        self.check()
        return not self._sum("num_running_reqs") and not self._sum("num_waiting_reqs")

    def _flushed(self) -> bool:
        self.check()
        assert self.process is not None
        return self.process.post("/flush_cache", params={"timeout": 10}).status_code == 200

    def _sum(self, name: str) -> int:
        try:
            loads = self._json("/v1/loads", params={"include": "all"})["loads"]
            return int(sum(load[name] for load in loads))
        except httpx.HTTPError as error:
            self.check()
            raise ServerError(f"{self.url}/v1/loads says {error!r}") from error


class Servers:
    """Started servers by their flags, a context manager. ``keep`` stay up and take turns, of which
    the one that was used longest ago is closed. Logs go into the run's folder."""

    def __init__(self, run: Path, model_path: str | Path, device: str, keep: int = 1) -> None:
        self._logs, self._keep = run / "servers", keep
        self._model_path, self._device = model_path, device
        self._up: OrderedDict[tuple[str, ...], ServerProcess] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str, flags: Sequence[str], starting: Callable[[], None]) -> Server:
        """The running server with these flags, else a new one. ``name`` is for its log's file;
        ``starting`` is called before a start. Raises ServerError: it does not start."""
        process = self._up.pop(tuple(flags), None)
        if process is not None and not process.alive:
            process.close()
        if process is None or not process.alive:
            while len(self._up) >= self._keep:
                self._up.popitem(last=False)[1].close()
            starting()
            number = len(list(self._logs.glob("*.log")))
            process = ServerProcess(
                self._model_path,
                flags=flags,
                log_path=self._logs / f"{number:03d}-{name}.log",
                device="cuda" if self._device == "cuda" else "cpu",
                # Weights of a large model may have to be fetched first.
                start_timeout_s=7200.0,
            ).start()
        self._up[tuple(flags)] = process
        return Server(process)

    def close(self) -> None:
        while self._up:
            self._up.popitem()[1].close()


def _wait(ready: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise RunError(f"{problem} after {_IDLE_TIMEOUT_S:g} s")
        time.sleep(0.1)


def merge(schedulers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One report of all data-parallel schedulers: totals added up, ratios averaged by weight,
    settings the first one's. {} where nothing shares."""
    reports = [dict(report) for report in schedulers if report]
    if len(reports) < 2:
        return reports[0] if reports else {}
    totals = _combined([(1, report.get("totals", {})) for report in reports])
    recent = [row for report in reports for row in report.get("recent", [])]
    return {**reports[0], "totals": totals, "recent": recent}


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What a server has counted between two reports; {} if it began anew in between."""
    if not now or not before:
        return dict(now) if not before else {}
    totals = _combined([(1, now.get("totals", {})), (-1, before.get("totals", {}))])
    if any(totals.get(name, 0) < 0 for name in _WEIGHTS.values()):
        return {}
    return {**now, "totals": totals}


def _combined(signed: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Totals added with their signs; of ratios what they average over is."""
    out: dict[str, Any] = {}
    for sign, totals in signed:
        for name, value in totals.items():
            if isinstance(value, dict):
                counts = out.setdefault(name, Counter())
                counts.update({key: sign * count for key, count in value.items()})
            elif isinstance(value, (int, float)):
                weight = totals.get(_WEIGHTS[name], 0) if name in _WEIGHTS else 1
                out[name] = out.get(name, 0) + sign * weight * value
    for name, weighed in _WEIGHTS.items():
        if name in out:
            weight = out.get(weighed, 0)
            out[name] = out[name] / weight if weight > 0 else 0.0
    return out

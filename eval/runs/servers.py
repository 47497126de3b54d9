# SPDX-License-Identifier: Apache-2.0
"""The servers of a run and the figures that they report."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from eval.runs.folder import RunError
from eval.serving import ServerError, ServerProcess

_IDLE_TIMEOUT_S = 120.0
_COUNTS = ("requests_finished", "polls", "blocks_shared")


class Server:
    """A running server on which a cell is measured."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.url = process.url
        self.command = process.command

    def reports(self) -> list[dict[str, Any]]:
        """Each scheduler's part of ``GET /reasoncache/details``; [] for a stock server."""
        details = self._json("/reasoncache/details")
        return [scheduler for scheduler in details["schedulers"] if scheduler] if details else []

    def kv_slots(self) -> int:
        """The number of KV slots that each data-parallel scheduler really has."""
        return int(self._json("/server_info")["max_total_num_tokens"])

    def cpu_seconds(self) -> float:
        """CPU seconds used by the server's schedulers and by the processes that they started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        schedulers = [
            child for child in children if "scheduler" in " ".join((child.name(), *child.cmdline()))
        ]
        alike = {
            process.pid: process
            for scheduler in schedulers
            for process in (scheduler, *scheduler.children(recursive=True))
        }
        times = [process.cpu_times() for process in alike.values()]
        return sum(cpu.user + cpu.system for cpu in times)

    def settle(self) -> None:
        """Wait until no request runs or waits; then the server's totals are complete."""
        _wait(self._idle, f"{self.url}: requests still run")

    def clear(self) -> int:
        """Wait until the server is idle, and flush its cache. Returns the number of slots still in use. Raises
        RunError if requests do not end, or flush or reset of totals fails, ServerError if the server died."""
        self.settle()
        _wait(self._flushed, f"{self.url}: /flush_cache was refused")
        totals = [report.get("totals", {}) for report in self.reports()]
        if any(counts.get(name) for counts in totals for name in _COUNTS):
            raise RunError(f"{self.url}/reasoncache: the totals did not restart at /flush_cache")
        return self._sum("num_used_tokens")

    def _idle(self) -> bool:
        return not self._sum("num_running_reqs") and not self._sum("num_waiting_reqs")

    def _flushed(self) -> bool:
        self.process.check_alive()
        return self.process.post("/flush_cache", params={"timeout": 10}).status_code == 200

    def _sum(self, name: str) -> int:
        loads = self._json("/v1/loads", params={"include": "all"})["loads"]
        return int(sum(load[name] for load in loads))

    def _json(self, path: str, **options: Any) -> Any:
        """Returns the JSON at ``path``, or None for status 404. Raises ServerError if the request fails."""
        try:
            response = self.process.get(path, **options)
            return None if response.status_code == 404 else response.raise_for_status().json()
        except httpx.HTTPError as error:
            self.process.check_alive()
            raise ServerError(f"{self.url}{path} says {error!r}") from error


class Servers:
    """Starts servers, and keeps up to ``keep`` of them running to be used again: the least recently used server
    is closed to make room for a new server. A context manager. Logs go into the run's folder."""

    def __init__(self, run: Path, model_path: str | Path, device: str, keep: int = 1) -> None:
        self._logs = run / "servers"
        self._keep = keep
        self._model_path = model_path
        self._device = device
        self._up: OrderedDict[tuple[object, ...], ServerProcess] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str, flags: Sequence[str], env: Mapping[str, str] | None = None) -> Server:
        """Returns the running server with these flags and variables, or a new server whose log is named after
        ``name``. Raises ServerError if a new server does not start."""
        key = (*flags, *sorted((env or {}).items()))
        process = self._up.pop(key, None)
        if process is not None and not process.alive:
            process.close()
            process = None
        if process is None:
            while len(self._up) >= self._keep:
                self._up.popitem(last=False)[1].close()
            number = len(list(self._logs.glob("*.log")))
            process = ServerProcess(
                self._model_path,
                flags=flags,
                env=env,
                log_path=self._logs / f"{number:03d}-{name}.log",
                device="cuda" if self._device == "cuda" else "cpu",
                # The timeout is long, because a large model's weights may have to be downloaded first.
                start_timeout_s=7200.0,
            ).start()
        self._up[key] = process
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

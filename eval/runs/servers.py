# SPDX-License-Identifier: Apache-2.0
"""The servers of a run and the figures that they report."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import httpx
import psutil

from eval.router import Router
from eval.runs.folder import RunError
from eval.runs.pairs import DECODES, Prefills
from eval.serving import ServerError, ServerProcess

_IDLE_TIMEOUT_S = 120.0
#: The timeout is long, because a large model's weights may have to be downloaded first.
_START_TIMEOUT_S = 7200.0
_COUNTS = ("requests_finished", "polls", "blocks_shared")


class Server:
    """A running server on which a cell is measured.

    Args:
        router: What gets its requests, if it is the decode server of a pair.
        prefills: The prefill server of the pair.

    Attributes:
        url: Where requests are sent.
    """

    def __init__(
        self,
        process: ServerProcess,
        router: Router | None = None,
        prefills: ServerProcess | None = None,
    ) -> None:
        self.process = process
        self.url = (router or process).url
        self.command = process.command
        self._flushes = [server for server in (process, prefills) if server is not None]

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
        flushed = True
        for server in self._flushes:
            server.check_alive()
            flushed &= server.post("/flush_cache", params={"timeout": 10}).status_code == 200
        return flushed

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


class _Up(NamedTuple):
    """A server that runs, and the router in front of it, if it decodes only."""

    process: ServerProcess
    router: Router | None

    def close(self) -> None:
        if self.router is not None:
            self.router.close()
        self.process.close()


class Servers:
    """Starts servers, and keeps up to ``keep`` of them running to be used again: the least recently used server
    is closed to make room for a new server. A context manager. Logs go into the run's folder.

    Args:
        prefill_flags: Flags of a prefill server of stock SGLang. If not None, all servers are decode servers,
            and SGLang's router is in front of each.
    """

    def __init__(
        self,
        run: Path,
        model_path: str | Path,
        device: str,
        keep: int = 1,
        prefill_flags: Sequence[str] | None = None,
    ) -> None:
        self._logs = run / "servers"
        self._keep = keep
        self._model_path = model_path
        self._device: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
        self._up: OrderedDict[tuple[object, ...], _Up] = OrderedDict()
        self._prefill_flags = prefill_flags
        self._prefills: Prefills | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, name: str, flags: Sequence[str], env: Mapping[str, str] | None = None) -> Server:
        """Returns the running server with these flags and variables, or a new server whose log is named after
        ``name``. Raises ServerError if a new server does not start."""
        key = (*flags, *sorted((env or {}).items()))
        up = self._up.pop(key, None)
        if up is not None and not up.process.alive:
            up.close()
            up = None
        prefills = self._prefill()
        if up is None:
            while len(self._up) >= self._keep:
                self._up.popitem(last=False)[1].close()
            number = len(list(self._logs.glob("[0-9]*.log")))
            process = ServerProcess(
                self._model_path,
                flags=flags if prefills is None else (*DECODES, *flags),
                env=env,
                log_path=self._logs / f"{number:03d}-{name}.log",
                device=self._device,
                start_timeout_s=_START_TIMEOUT_S,
            ).start()
            try:
                up = _Up(process, None if prefills is None else prefills.route(process))
            except BaseException:
                process.close()
                raise
        self._up[key] = up
        return Server(*up, None if prefills is None else prefills.process)

    def _prefill(self) -> Prefills | None:
        """The prefill server, started if need be. None if all servers prefill themselves."""
        if self._prefill_flags is None:
            return None
        if self._prefills is not None and not self._prefills.process.alive:
            self.close()
        if self._prefills is None:
            where = (self._logs, self._model_path, self._device)
            self._prefills = Prefills(*where, self._prefill_flags, _START_TIMEOUT_S).start()
        return self._prefills

    def close(self) -> None:
        while self._up:
            self._up.popitem()[1].close()
        if self._prefills is not None:
            self._prefills.process.close()
            self._prefills = None


def _wait(ready: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise RunError(f"{problem} after {_IDLE_TIMEOUT_S:g} s")
        time.sleep(0.1)

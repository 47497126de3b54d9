# SPDX-License-Identifier: Apache-2.0
"""Runs SGLang's router as a subprocess, for measurements and tests."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

from eval.serving import ServerError, free_port, kill_when_we_die

#: A request may wait for slots for long, and the router would take the server for broken and ask it again.
_PATIENT = ("--request-timeout-secs", "86400", "--disable-circuit-breaker", "--disable-retries")
_START_TIMEOUT_S = 120.0


def of_pair(prefill_url: str, bootstrap_port: str, decode_url: str) -> tuple[str, ...]:
    """The arguments of a :class:`Router` in front of a PD pair."""
    prefill = ("--prefill", prefill_url, bootstrap_port)
    return ("--pd-disaggregation", *prefill, "--decode", decode_url)


class Router:
    """SGLang's router in front of servers, until :meth:`close`. Raises ServerError if it does not start.

    Args:
        words: Its arguments that name servers.
    """

    def __init__(self, words: Sequence[str], log_path: Path) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        where = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", str(free_port()))
        command = (sys.executable, "-m", "sglang_router.launch_router", *where, *_PATIENT, *words)
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )
        self._guard = kill_when_we_die(self._process.pid)
        try:
            self._wait(log_path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, log_path: Path) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                health = httpx.get(f"{self.url}/readiness", timeout=30.0, trust_env=False)
                if health.status_code == 200:
                    return
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                what = "exited" if ended else f"was not ready after {_START_TIMEOUT_S:g} s"
                raise ServerError(
                    f"SGLang's router {what}; end of its log:\n{log_path.read_text()[-2000:]}"
                )
            time.sleep(0.25)

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self._process.kill()
        self._process.wait()
        # Otherwise the guard could later kill an unrelated process group that has got the same id.
        self._guard.kill()
        self._guard.communicate()

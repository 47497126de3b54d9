# SPDX-License-Identifier: Apache-2.0
"""Servers that tests share, and the check that a test left no request, held slot or error behind."""

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

from eval.serving import (
    STRICT_CHECKS,
    ServerError,
    ServerProcess,
    log_errors,
    wait_until_idle,
)
from tests.server import tiny_models
from tests.server.specs import ServerSpec


class ServerPool:
    """Starts a server when a test first asks for it. Keeps the ``capacity`` most recently used servers alive:
    a start takes ten seconds of CPU time, but an idle server takes up to 3 GB of memory."""

    def __init__(self, model_path: Path, log_dir: Path, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._model_path = model_path
        self._log_dir = log_dir
        self._capacity = capacity
        self._starts = 0
        self._alive: OrderedDict[ServerSpec, ServerProcess] = OrderedDict()
        self._unstartable: dict[ServerSpec, ServerError] = {}
        self._models = {"": model_path}

    def model(self, name: str) -> Path:
        """The folder of model ``name`` of ``tiny_models.py``. An empty name means ``eval/tiny_reasoner``."""
        if name not in self._models:
            self._models[name] = tiny_models.make(name, self._model_path, self._log_dir)
        return self._models[name]

    def get(self, spec: ServerSpec) -> ServerProcess:
        """Return a living server for ``spec``. May end the least recently used server."""
        server = self._alive.pop(spec, None)
        if server is None or not server.alive:
            if server is not None:
                server.close()
            while len(self._alive) >= self._capacity:
                self._alive.popitem(last=False)[1].close()
            # A server that failed to start is not started again for later tests.
            if spec in self._unstartable:
                raise ServerError(f"{spec.name} failed to start before: {self._unstartable[spec]}")
            self._starts += 1
            model = self.model(spec.model)
            drafts = ("--speculative-draft-model-path", str(self.model(spec.draft)))
            server = ServerProcess(
                model,
                flags=(*spec.flags, *drafts) if spec.draft else spec.flags,
                env={**STRICT_CHECKS, **dict(spec.env)},
                log_path=self._log_dir / f"{self._starts:02d}-{spec.name}.log",
                device=spec.device,
            )
            try:
                server.start()
            except ServerError as error:
                self._unstartable[spec] = error
                raise
        self._alive[spec] = server
        return server

    def close(self) -> None:
        while self._alive:
            self._alive.popitem()[1].close()


def assert_whole(server: ServerProcess, log_start: int = 0) -> None:
    """Check that every slot is free or evictable, that a flush resets the totals of ``GET /reasoncache``, that
    the server can generate, and that the log has no error from byte ``log_start`` on."""
    wait_until_idle(server)
    flushed = server.post("/flush_cache", params={"timeout": 30})
    assert flushed.status_code == 200, f"flush refused: {flushed.text}"
    for ours in server.get("/reasoncache").json().get("schedulers", ()):
        if ours is not None and ours["disabled"] is None:
            assert ours["totals"]["blocks_shared"] == ours["totals"]["positions_evicted"] == 0
    health = server.get("/health_generate")
    assert health.status_code == 200, f"unhealthy: status {health.status_code}"
    wait_until_idle(server)
    wrong = log_errors(server.log_text(log_start))
    assert not wrong, f"in {server.log_path}:\n{wrong}"


def generate(
    server: ServerProcess, text: str | list[str], max_new_tokens: int, **options: Any
) -> Any:
    """Generate greedily through SGLang's ``/generate``. ``options`` are further fields of the request.
    ``sampling_params`` among them are added to, and override, the temperature and the length set here."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    sampling |= options.pop("sampling_params", {})
    response = server.post("/generate", json={"text": text, "sampling_params": sampling, **options})
    with contextlib.suppress(ValueError):
        assert response.status_code == 200, response.json()
    response.raise_for_status()
    return response.json()

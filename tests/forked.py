# SPDX-License-Identifier: Apache-2.0
"""Forks CPU servers from a process that has imported SGLang's libraries, because importing them takes most of a
server's start. That process imports nothing of SGLang, which reads environment variables on import."""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from eval.serving import LEAN_START
from sglang_reasoncache.platform import PLATFORM_NAME

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("torch._inductor.compile_fx", "torch.distributed.tensor", "torchvision", "torchaudio"),
        *("transformers.generation.candidate_generator", "transformers.integrations.hub_kernels"),
        *("transformers.models.gemma.tokenization_gemma", "compressed_tensors", "scipy.stats"),
        *("openai", "fastapi", "gguf", "xgrammar", "aiohttp", "IPython", "uvicorn"),
    ]
)


class ForkedServer:
    """A forked server, with the methods and attributes of ``subprocess.Popen`` that ``ServerProcess`` uses."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> None:
        arguments = command[2:], dict(env), log.name
        self._process = _FORKS.Process(target=_serve, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0)


def launch(
    command: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO, **options: Any
) -> Any:
    """Starts a process: forks it if it is a CPU server and its variable REASONCACHE_FORK is not empty."""
    on_cpu = env.get("SGLANG_PLATFORM") == PLATFORM_NAME and "sglang.launch_server" in command
    if on_cpu and env.get("REASONCACHE_FORK"):
        return ForkedServer(command, env, stdout)
    return subprocess.Popen(command, env=env, stdout=stdout, **options)


def _serve(arguments: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Runs ``python -m ARGUMENTS`` in a session of its own."""
    os.setsid()
    for name, flags, descriptors in ((os.devnull, os.O_RDONLY, (0,)), (log, os.O_WRONLY, (1, 2))):
        opened = os.open(name, flags | os.O_APPEND)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
    runpy.run_path(str(LEAN_START / "sitecustomize.py"))
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)

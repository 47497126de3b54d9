# SPDX-License-Identifier: Apache-2.0
"""Forks CPU servers from a process that has imported SGLang's libraries, because importing them takes most of a
server's start. That process imports nothing of SGLang, which reads environment variables on import."""

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.process import parent_process
from typing import Any, BinaryIO
from unittest import mock

from eval.serving import LEAN_START
from sglang_reasoncache.cpu.activate import PLATFORM_NAME

set_forkserver_preload(
    [
        *("torch._inductor.compile_fx", "torch.distributed.tensor", "torchvision", "torchaudio"),
        *("transformers.generation.candidate_generator", "transformers.integrations.hub_kernels"),
        *("transformers.models.gemma.tokenization_gemma", "compressed_tensors", "scipy.stats"),
        *("openai", "fastapi", "gguf", "xgrammar", "aiohttp", "IPython", "uvicorn"),
    ]
)


def start() -> None:
    """Starts the process, if it does not run, with variables that libraries read once, on import."""
    once = dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    with mock.patch.dict(os.environ, once):
        ensure_running()


class ForkedServer(ForkServerProcess):
    """A forked server, with the methods and attributes of ``subprocess.Popen`` that ``ServerProcess`` uses."""

    def poll(self) -> int | None:
        return self.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)  # type: ignore[arg-type]

    def join(self, timeout: float | None = 0.0) -> None:
        """Does not wait by default, because multiprocessing joins its processes when pytest ends."""
        super().join(timeout)

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0)


def launch(
    command: Sequence[str], *, env: Mapping[str, str], stdout: BinaryIO, **options: Any
) -> Any:
    """Starts a process: forks it if it is a CPU server and its variable REASONCACHE_FORK is not empty."""
    on_cpu = env.get("SGLANG_PLATFORM") == PLATFORM_NAME and "sglang.launch_server" in command
    if on_cpu and env.get("REASONCACHE_FORK"):
        start()
        server = ForkedServer(target=_serve, args=(command[2:], dict(env), stdout.name))
        server.start()
        return server
    return subprocess.Popen(command, env=env, stdout=stdout, **options)


def _serve(arguments: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Runs ``python -m ARGUMENTS`` in a session of its own."""
    os.setsid()
    if not parent_process().is_alive():  # type: ignore[union-attr]
        return  # pytest ended before it could start the guard of ``ServerProcess``
    for descriptor, name in enumerate((os.devnull, log, log)):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
    runpy.run_path(str(LEAN_START / "sitecustomize.py"))
    module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)

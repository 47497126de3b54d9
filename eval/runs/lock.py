# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from eval.runs.folder import RunError

LOCK = "lock"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run's folder, made if need be; the kernel lets go however the process ends.

    Raises:
        RunError: another process holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise RunError(f"{path}: process {holder} is working in this folder") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield

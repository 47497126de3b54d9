# SPDX-License-Identifier: Apache-2.0
"""Where Triton tests run: on a GPU if there is one, else under Triton's interpreter.

The interpreter replaces Triton as a whole when it is imported, so interpreted tests
run in a process of their own, which runs their file again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"
)
#: Of the test that calls :func:`run_interpreted`.
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="is the interpreted run")


def interpreted(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` under the interpreter, from the project's root."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_interpreted(file: str) -> None:
    """Run the tests of a file again, interpreted; they must pass, and there must be some."""
    done = interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\b\d+ passed", done.stdout)


def there(tensor: torch.Tensor) -> torch.Tensor:
    """On the device, strides and distance from an aligned address included."""
    if DEVICE == "cpu":
        return tensor
    storage = tensor.untyped_storage().to(device=DEVICE)
    empty = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

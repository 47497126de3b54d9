# SPDX-License-Identifier: Apache-2.0
"""Runs Triton tests on a GPU, if there is one, and under Triton's interpreter.

A process runs either all Triton kernels under the interpreter (with TRITON_INTERPRET=1) or none. So the test
file that imports this module is run a second time, in another process, under the interpreter."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"
)
_SMALL = dict.fromkeys(("decode_triton.SPLITS", "plan_triton.PIECES"), 4)
under_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under the interpreter")

if INTERPRETED:
    from triton.runtime import interpreter

    @functools.cache
    def _patch_lang(kernel: Any, patch: Any = interpreter._patch_lang) -> Any:
        """Replaces Triton's functions for a kernel, for good. Triton does and undoes it at every call, which
        takes half of a test's time."""
        scope = patch(kernel)
        scope.restore = lambda: None
        return scope

    interpreter._patch_lang = _patch_lang


def interpreted(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` with Triton's interpreter, in the project's root."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


#: Test file -> other test files to run in its second process: each process takes seconds to import SGLang.
_BESIDE = {
    "test_attention": [
        f"tests/kernels/test_{name}.py"
        for name in ("attention_triton", "distance", "page_logits", "plan")
    ],
    "test_attention_cuda_graph": ["tests/selection/test_device.py"],
}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the interpreted run")
def test_interpreted(request: pytest.FixtureRequest) -> None:
    """The importing file and its ``_BESIDE`` files pass under the interpreter. Each has a test that runs. Tests
    that this run leaves out by their marks (``long``) are left out there, too."""
    files = [str(request.path.relative_to(ROOT)), *_BESIDE.get(request.path.stem, ())]
    marks = request.config.getoption("markexpr")
    done = interpreted(
        *("-m", "pytest", "-q", "-x", "-rp", "-p", "no:cacheprovider", "-m", marks, *files)
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert all(f"PASSED {file}::" in done.stdout for file in files)


def long_if(names: Iterable[str], *long: str) -> list[Any]:
    """Test parameters, of which those in ``long`` are marked so."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name in long)) for name in names]


def there(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the device, with its strides and its offset from an aligned address."""
    if DEVICE == "cpu":
        return tensor
    storage = tensor.untyped_storage().to(device=DEVICE)
    empty = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def shrink_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernels launch fewer programs with more tiles: an idle program takes the interpreter 10 ms."""
    for name, value in _SMALL.items():
        monkeypatch.setattr(f"sglang_reasoncache.kernels.{name}", value)


@pytest.fixture(autouse=True)
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        shrink_launches(monkeypatch)

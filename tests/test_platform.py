# SPDX-License-Identifier: Apache-2.0
"""The CPU platform is activated only if SGLANG_PLATFORM names it."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from sglang_reasoncache.cpu import activate


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", activate.PLATFORM_NAME)
    for name in ("SGLANG_USE_CPU_ENGINE", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("selected", [None, "", "cuda", "reasoncache", "another_platform"])
def test_silent_unless_named(monkeypatch: pytest.MonkeyPatch, selected: str | None) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM")
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert activate.activate() is None


def test_named_returns_the_class_but_beside_a_gpu_or_sglangs_cpu_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert activate.activate() == "sglang_reasoncache.cpu.platform:TorchCpuPlatform"
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    activate.activate()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        activate.activate()
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(RuntimeError, match="SGLANG_USE_CPU_ENGINE"):
        activate.activate()


def test_its_entry_point_and_that_importing_it_imports_neither_sglang_nor_torch() -> None:
    entries = entry_points(group="sglang.srt.platforms")
    ours = [entry.name for entry in entries if entry.load() is activate.activate]
    assert ours == [activate.PLATFORM_NAME]
    code = (
        "import sglang_reasoncache.cpu.activate, sys; print({'sglang', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

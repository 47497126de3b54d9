# SPDX-License-Identifier: Apache-2.0
"""``tools/gpu.sh`` between stand-ins for the programs it calls: what it runs and what it reports."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu.sh"
#: What the script finds on PATH besides what a test puts there.
TOOLS = [
    "cat",
    "date",
    "dirname",
    "env",
    "git",
    "grep",
    "ls",
    "mkdir",
    "rm",
    "sed",
    "sh",
    "tail",
    "timeout",
]
#: Notes how it was called; fails, or lets every test be skipped, as told.
PYTHON = """#!/bin/sh
echo "$*" >>calls
case "$*" in
*"$FAILS"*) echo broken; exit 3 ;;
*"$SKIPS"*) echo "== 4 skipped in 1 s ==" ;;
*pytest*) echo "== 7 passed, 1 skipped in 1 s ==" ;;
*attention*) echo "| requests x tokens | ours |" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, a set-up that has nothing to do, and a PATH without a GPU's programs."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    program(tmp_path / "tools" / "setup.sh", "#!/bin/sh\n")
    program(tmp_path / ".venv" / "bin" / "python", PYTHON)
    (tmp_path / "path").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"no {tool}")
        (tmp_path / "path" / tool).symlink_to(found)
    return tmp_path


def run(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {"FAILS": "nothing", "SKIPS": "nothing", "CUDA_HOME": "/nowhere", **environment}
    return subprocess.run(
        [checkout / "tools" / "gpu.sh"],
        env={"PATH": str(checkout / "path"), "HOME": os.environ.get("HOME", "/"), **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def with_gpu(checkout: Path) -> None:
    program(checkout / "path" / "nvidia-smi", '#!/bin/sh\necho "NVIDIA H200, 9.0, 580.1"\n')


def results(checkout: Path) -> dict[str, str]:
    """Of each part, from the summary."""
    lines = (checkout / "build/bench/gpu/summary.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cell[0]: cell[1] for cell in cells if len(cell) > 1}


def test_without_a_gpu_it_says_so_and_installs_nothing(checkout: Path) -> None:
    program(checkout / "tools" / "setup.sh", "#!/bin/sh\ntouch installed\n")
    done = run(checkout)
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert not (checkout / "installed").exists() and not (checkout / "build").exists()


def test_a_driver_without_a_gpu(checkout: Path) -> None:
    program(checkout / "path" / "nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    done = run(checkout)
    assert done.returncode == 2
    assert "nvidia-smi finds no GPU: No devices were found" in done.stderr


def test_a_gpu_that_pytorch_cannot_use(checkout: Path) -> None:
    with_gpu(checkout)
    done = run(checkout, FAILS="import sys, torch")
    assert done.returncode == 2
    assert "PyTorch cannot use it" in done.stderr
    assert not (checkout / "build").exists()


def test_every_part_runs(checkout: Path) -> None:
    with_gpu(checkout)
    program(checkout / "path" / "compute-sanitizer", '#!/bin/sh\nshift 6\nexec "$@"\n')
    done = run(checkout, BENCH_ARGS="--rounds 2")
    assert done.returncode == 0, done.stderr
    found = results(checkout)
    passed = {"kernels", "memcheck", "racecheck", "server", "bench"}
    assert {name for name, result in found.items() if result == "passed"} == passed
    assert found["requests x tokens"] == "ours"
    assert "- NVIDIA H200, 9.0, 580.1" in done.stdout
    calls = (checkout / "calls").read_text()
    assert "-m pytest tests/server/test_cuda.py" in calls
    assert "-m eval.bench.attention --growth --rounds 2" in calls


@pytest.mark.parametrize("broken", ["tests/kernels", "tests/server", "eval.bench.attention"])
def test_a_part_that_fails_keeps_no_other_from_running(checkout: Path, broken: str) -> None:
    with_gpu(checkout)
    done = run(checkout, FAILS=broken)
    assert done.returncode == 1
    found = results(checkout)
    part = {"tests/kernels": "kernels", "tests/server": "server"}.get(broken, "bench")
    assert found.pop(part) == "failed: exit status 3"
    assert "not installed" in found.pop("compute-sanitizer")
    assert {"kernels", "server", "bench"} - {part} <= set(found)
    assert all(found[name] == "passed" for name in {"kernels", "server", "bench"} - {part})
    assert "broken" in (checkout / f"build/bench/gpu/{part}.log").read_text()


def test_tests_that_were_all_skipped_are_a_failure(checkout: Path) -> None:
    with_gpu(checkout)
    done = run(checkout, SKIPS="tests/server")
    assert done.returncode == 1
    assert results(checkout)["server"] == "failed: no test ran"


def test_a_part_that_hangs_is_ended(checkout: Path) -> None:
    with_gpu(checkout)
    hang = PYTHON.replace("*attention*)", "*eval.bench*) sleep 30 ;;\n*attention*)")
    program(checkout / ".venv" / "bin" / "python", hang)
    (checkout / "path" / "sleep").symlink_to(str(shutil.which("sleep")))
    done = run(checkout, SECONDS_A_PART="1")
    assert done.returncode == 1
    assert results(checkout)["bench"] == "failed: ended after 1 s"

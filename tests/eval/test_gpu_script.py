# SPDX-License-Identifier: Apache-2.0
"""Runs ``tools/gpu.sh`` with fakes of Python, ``setup.sh`` and GPU tools; checks its calls and its summary."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu.sh"
#: Real programs on the script's PATH; the tests add fakes.
TOOLS = "cat date dirname env git grep ls mkdir rm sed sh sleep tail timeout"
#: A fake Python that logs its arguments. If these contain $FAILS, $HANGS or $SKIPS, it fails, hangs or skips.
PYTHON = """#!/bin/sh
echo "$*" >>calls
case "$*" in
*"$FAILS"*) echo broken; echo "FAILED at once" >&${REASONCACHE_FAILURES:-2}; exit 3 ;;
*"$HANGS"*) sleep 30 ;;
*"$SKIPS"*) echo "== 4 skipped in 1 s ==" ;;
*pytest*) echo "== 7 passed, 1 skipped in 1 s ==" ;;
*attention*) echo "| requests x tokens | ours |" ;;
esac
"""
GPU = 'echo "NVIDIA H200, 9.0, 580.1"'


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, and fakes of ``setup.sh``, of Python and (in ``path``) of ``nvidia-smi``."""
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    program(tmp_path / "tools" / "setup.sh", "#!/bin/sh\n: >installed\n")
    program(tmp_path / ".venv" / "bin" / "python", PYTHON)
    program(tmp_path / "path" / "nvidia-smi", f"#!/bin/sh\n{GPU}\n")
    for tool in TOOLS.split():
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"no {tool}")
        (tmp_path / "path" / tool).symlink_to(found)
    return tmp_path


def run(checkout: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    told = dict.fromkeys(("FAILS", "HANGS", "SKIPS"), "nothing") | {"CUDA_HOME": "/nowhere"}
    told |= {"PATH": str(checkout / "path"), "HOME": os.environ.get("HOME", "/"), **environment}
    command = [str(checkout / "tools" / "gpu.sh"), *parts]
    return subprocess.run(
        command, env=told, capture_output=True, text=True, timeout=60, check=False
    )


def results(checkout: Path) -> dict[str, str]:
    lines = (checkout / "build/bench/gpu/summary.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cell[0]: cell[1] for cell in cells if len(cell) > 1}


DEFAULT = {"kernels", "servers", "bench"}


def test_every_part_runs(checkout: Path) -> None:
    program(checkout / "path" / "compute-sanitizer", '#!/bin/sh\nshift 6\nexec "$@"\n')
    parts = [*DEFAULT, "memcheck", "racecheck", "load"]
    arguments = {"BENCH_ARGS": "--rounds 2", "LOAD_ARGS": "--only waiting"}
    done = run(checkout, *parts, **arguments, TRACES="some")
    assert done.returncode == 0, done.stderr
    found = results(checkout)
    assert found.pop("requests x tokens") == "ours"
    assert {name for name, result in found.items() if result == "passed"} == set(parts)
    assert "- NVIDIA H200, 9.0, 580.1" in done.stdout
    calls = (checkout / "calls").read_text()
    assert "-m pytest tests/server/test_cuda.py" in calls
    assert "-m pytest tests/kernels tests/unit/test_no_wait.py" in calls
    assert "-m eval.bench.attention --device cuda --rounds 2" in calls
    assert "-m eval.bench.servers gpu --traces some --only waiting" in calls


@pytest.mark.parametrize(
    ("part", "told", "result"),
    [
        ("kernels", {"FAILS": "tests/kernels"}, "failed: exit status 3"),
        ("servers", {"FAILS": "tests/server"}, "failed: exit status 3"),
        ("bench", {"FAILS": "eval.bench.attention"}, "failed: exit status 3"),
        ("servers", {"SKIPS": "tests/server"}, "failed: no test ran"),
        ("bench", {"HANGS": "eval.bench", "SECONDS_A_PART": "1"}, "failed: ended after 1 s"),
        ("memcheck", {}, "failed: compute-sanitizer is not installed"),
    ],
)
def test_a_part_that_fails_keeps_no_other_from_running(
    checkout: Path, part: str, told: dict[str, str], result: str
) -> None:
    done = run(checkout, *sorted(DEFAULT | {part}), **told)
    assert done.returncode == 1
    found = results(checkout)
    assert found.pop(part) == result
    assert all(found[name] == "passed" for name in DEFAULT - {part})
    if "FAILS" in told:
        log = (checkout / f"build/bench/gpu/{part}.log").read_text()
        assert "broken" in log and "FAILED at once" not in log
        assert "FAILED at once" in done.stderr

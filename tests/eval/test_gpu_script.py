# SPDX-License-Identifier: Apache-2.0
"""``tools/gpu.sh`` between stand-ins for the programs it calls: what it runs and what it reports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu.sh"
#: What the script finds on PATH besides what a test puts there.
TOOLS = "cat date dirname env git grep ls mkdir rm sed sh sleep tail timeout"
#: Notes how it was called; fails, hangs, or lets every test be skipped, as told.
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
    """The script, a set-up that has nothing to do, and a PATH with a GPU's program."""
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


@pytest.mark.parametrize(
    ("text", "fails", "message"),
    [
        (None, "nothing", "needs an NVIDIA GPU"),
        ("echo 'None found'\nexit 6", "nothing", "nvidia-smi finds no GPU: None found"),
        (GPU, "import sys, torch", "PyTorch cannot use it"),
    ],
)
def test_without_a_gpu_that_can_be_used_it_says_so(
    checkout: Path, text: str | None, fails: str, message: str
) -> None:
    (checkout / "path" / "nvidia-smi").unlink()
    if text is not None:
        program(checkout / "path" / "nvidia-smi", f"#!/bin/sh\n{text}\n")
    done = run(checkout, FAILS=fails)
    assert done.returncode == 2 and message in done.stderr
    # Nothing is installed before a GPU was seen.
    assert (checkout / "installed").exists() == (text == GPU)
    assert not (checkout / "build").exists()


@pytest.mark.parametrize(
    ("part", "message"), [("kernel", "got kernel"), ("load", "TRACES=FOLDER must name a folder")]
)
def test_parts_are_checked_first(checkout: Path, part: str, message: str) -> None:
    done = run(checkout, "bench", part)
    assert done.returncode == 2 and message in done.stderr
    assert not (checkout / "installed").exists()


DEFAULT = {"kernels", "servers", "bench"}


def test_every_part_runs(checkout: Path) -> None:
    program(checkout / "path" / "compute-sanitizer", '#!/bin/sh\nshift 6\nexec "$@"\n')
    parts = [*DEFAULT, "memcheck", "racecheck", "load"]
    arguments = {"BENCH_ARGS": "--rounds 2", "LOAD_ARGS": "--reference stock:flashinfer"}
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
    assert "-m eval.bench.gpu some --reference stock:flashinfer" in calls


def test_nine_minutes_are_enough(checkout: Path) -> None:
    """The time limits of what runs without a name, and what ``timeout`` waits before it kills."""
    found = re.search(r"timeout --kill-after=(\d+) ", SCRIPT.read_text())
    assert found is not None
    done = run(checkout)
    limits = re.findall(r"gpu: (\w+), (\d+) s at most", done.stderr)
    assert {name for name, _ in limits} == DEFAULT
    assert sum(int(seconds) + int(found[1]) for _, seconds in limits) <= 540


def imported(*modules: str) -> set[str]:
    """What they import before anything is called, by way of other files of ours, too."""
    found, root = set[str](), SCRIPT.parents[1]
    left = list(modules)
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        path = root / name.replace(".", "/")
        files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        for node in [node for file in files for node in ast.parse(file.read_text()).body]:
            if isinstance(node, ast.Import):
                left += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return found


def test_what_only_tasks_need_is_not_needed() -> None:
    """Where every gigabyte counts it was left out."""
    kernels = [
        f"tests.kernels.{path.stem}" for path in SCRIPT.parents[1].glob("tests/kernels/*.py")
    ]
    tests = ["tests.conftest", *kernels, "tests.unit.test_no_wait", "tests.server.test_cuda"]
    bench = ["eval.bench.attention", "eval.bench.attention_cuda"]
    found = imported(*tests, *bench, "eval.bench.gpu")
    assert {"eval.bench.gpu", "torch", "eval.serving", "sglang_reasoncache.config"} <= found
    assert not {"lm_eval", "statsmodels", "datasets", "zss"} & {
        name.split(".")[0] for name in found
    }


@pytest.mark.parametrize(
    ("part", "told", "result"),
    [
        ("kernels", {"FAILS": "tests/kernels"}, "failed: exit status 3"),
        ("servers", {"FAILS": "tests/server"}, "failed: exit status 3"),
        ("bench", {"FAILS": "eval.bench.attention"}, "failed: exit status 3"),
        ("servers", {"SKIPS": "tests/server"}, "failed: no test ran"),
        ("bench", {"HANGS": "eval.bench", "SECONDS_A_PART": "1"}, "failed: ended after 1 s"),
    ],
)
def test_a_part_that_fails_keeps_no_other_from_running(
    checkout: Path, part: str, told: dict[str, str], result: str
) -> None:
    done = run(checkout, **told)
    assert done.returncode == 1
    found = results(checkout)
    assert found.pop(part) == result
    assert all(found[name] == "passed" for name in DEFAULT - {part})
    if "FAILS" in told:
        log = (checkout / f"build/bench/gpu/{part}.log").read_text()
        assert "broken" in log and "FAILED at once" not in log
        assert "FAILED at once" in done.stderr


def test_without_the_sanitizer_its_part_fails(checkout: Path) -> None:
    assert run(checkout, "memcheck").returncode == 1
    assert results(checkout)["memcheck"] == "failed: compute-sanitizer is not installed"


@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["one process", "workers"])
def test_a_failed_test_is_shown_at_once(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Once; though the run is killed before pytest could say so."""
    text = "def test_first():\n    assert 1 == 2, 'because'\n"
    if not more:
        text += (
            "def test_later():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
    (tmp_path / "test_it.py").write_text(text)
    read, write = os.pipe()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, *more, str(tmp_path)],
        cwd=SCRIPT.parents[1],
        # This test may itself run in a worker.
        env={key: value for key, value in os.environ.items() if "XDIST" not in key}
        | {"REASONCACHE_FAILURES": str(write)},
        capture_output=True,
        pass_fds=[write],
        timeout=120,
        check=False,
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert told.count("FAILED ") == 1 and "test_first" in told and "because" in told

# SPDX-License-Identifier: Apache-2.0
"""``tools/setup.sh`` between stand-ins: with a new environment, and with a link to an existing one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.eval.test_gpu_script import SCRIPT, program

TOOLS = "cat cksum dirname ln mkdir readlink rm sh tail"
#: Makes an environment, in place of uv.
UV = """#!/bin/sh
[ "$1" = --version ] || echo "$1" >>installed
[ "$1" != venv ] || { for last; do :; done; mkdir -p "$last/bin"; ln -s "$0" "$last/bin/python"; }
"""
#: What is imported in an environment that somebody else filled.
IMPORTS = "import flashinfer, sglang, torch, triton, sglang_reasoncache"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT.with_name("setup.sh"), tmp_path / "tools")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    program(tmp_path / "path" / "python3", "#!/bin/sh\n")
    program(tmp_path / "path" / "uv", UV)
    for tool in TOOLS.split():
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"no {tool}")
        (tmp_path / "path" / tool).symlink_to(found)
    return tmp_path


def run(checkout: Path) -> subprocess.CompletedProcess[str]:
    command, told = [str(checkout / "tools" / "setup.sh")], {"PATH": str(checkout / "path")}
    return subprocess.run(
        command, env=told, capture_output=True, text=True, timeout=60, check=False
    )


def linked(checkout: Path, python: str) -> Path:
    """Where the link leads; ``python``: what the Python there does."""
    there = checkout / "elsewhere"
    program(there / "bin" / "python", f'#!/bin/sh\necho "$2" >>"{checkout}/asked"\n{python}\n')
    (checkout / ".venv").symlink_to(there)
    return there


def test_a_link_to_an_environment_that_serves_is_used_as_it_is(checkout: Path) -> None:
    there = linked(checkout, "exit 0")
    assert run(checkout).returncode == 0
    assert (checkout / "asked").read_text() == f"{IMPORTS}\n"
    assert (checkout / ".venv").is_symlink() and not (checkout / "installed").exists()
    assert [path.name for path in there.iterdir()] == ["bin"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_one_that_does_not_is_named_and_left_alone(checkout: Path, exists: bool) -> None:
    error = "ModuleNotFoundError: No module named 'triton'"
    there = linked(checkout, f'echo Traceback >&2\necho "{error}" >&2\nexit 1')
    if not exists:
        shutil.rmtree(there)
        error = "not found"
    done = run(checkout)
    assert done.returncode == 1
    assert f'.venv is a link to {there}, in which "{IMPORTS}" fails (' in done.stderr
    assert error in done.stderr and f"remove the link (rm {checkout}/.venv)" in done.stderr
    assert (checkout / ".venv").is_symlink() and not (checkout / "installed").exists()
    assert there.exists() == exists


def test_without_a_link_it_is_made_once(checkout: Path) -> None:
    """What was made and stamped here serves behind a link as well, unasked."""
    for _ in range(2):
        assert run(checkout).returncode == 0
    assert (checkout / "installed").read_text() == "venv\npip\n"
    venv, there = checkout / ".venv", checkout / "elsewhere"
    venv.rename(there)
    venv.symlink_to(there)
    (there / "bin" / "python").unlink()
    program(there / "bin" / "python", "#!/bin/sh\nexit 1\n")
    assert run(checkout).returncode == 0
    assert (checkout / "installed").read_text() == "venv\npip\n"

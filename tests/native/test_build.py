# SPDX-License-Identifier: Apache-2.0
"""Tests how the C++ library is built, cached and loaded. If a build or load fails, callers get the reason."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_reasoncache import native

ROOT = Path(__file__).parents[2]
#: A program that hides the compiler package ziglang and prints, twice, the library's path or why it is missing.
LOAD = """
import sys
sys.modules["ziglang"] = None
from sglang_reasoncache import native
for _ in range(2):
    try:
        print(native.library()._name)
    except native.NativeUnavailable as error:
        print(str(error).splitlines()[0])
"""


def load(**env: str) -> list[str]:
    """Runs LOAD in a new Python process with these environment variables. Returns the printed lines."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("REASONCACHE")} | env
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A fake compiler that fails, prints bytes that are not UTF-8, and logs its calls."""
    script = tmp_path / "cxx"
    script.write_text(f"#!/bin/sh\necho x >>{tmp_path}/calls\nprintf 'br\\377ken' >&2\nexit 3\n")
    script.chmod(0o700)
    return script


def test_a_failing_compiler_is_a_reason_and_asked_once(tmp_path: Path, compiler: Path) -> None:
    said = load(CXX=str(compiler), REASONCACHE_CACHE_DIR=str(tmp_path / "new"))
    assert len(said) == 2 and all("failed (3)" in line for line in said)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    for text in ('g++ "', " "):
        said = load(CXX=text, REASONCACHE_CACHE_DIR=str(tmp_path / "new"))
        assert len(said) == 2 and all("cannot build or load" in line for line in said)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda cache: None, "cannot build or load"),
        (shutil.rmtree, "no C++ compiler on PATH"),
        # If another user owns the cache folder or may write to it, no library is loaded from it.
        (lambda cache: cache.chmod(0o770), "no C++ compiler on PATH"),
        (lambda cache: cache.chmod(0o707), "no C++ compiler on PATH"),
        pytest.param(
            lambda cache: os.chown(cache, 12345, 12345),
            "no C++ compiler on PATH",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away"),
        ),
    ],
)
def test_without_a_compiler_what_is_in_our_cache_is_used(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    """The cache holds a broken file instead of a library. This file is loaded only if the cache is trusted."""
    flags = (*native._FLAGS, *native._OPTIMISED)
    cache = tmp_path / "cache"
    key = native._key(native._source_root(), flags)
    (cache / key).mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    (cache / key / native._NAME).write_bytes(b"no library")
    spoil(cache)
    said = load(PATH=str(tmp_path), CXX="", REASONCACHE_CACHE_DIR=str(cache))
    assert message in said[0]


def test_no_home_leaves_no_folder_behind(compiler: Path) -> None:
    """Here ``~/.cache`` expands to itself, as for a user without a home. No folder ``~`` may be created."""
    load(HOME="~", XDG_CACHE_HOME="", CXX=str(compiler))
    assert not (ROOT / "~").exists()


def test_builds_once_in_a_private_folder(tmp_path: Path) -> None:
    """The first call builds the library in a folder that no other user may write to. Later calls load this
    library. The compiler here is a script that copies the real library, which this process has loaded."""
    try:
        library = native.library()._name
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    cache = tmp_path / "new" / "cache"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{library}" "$2"\n')
    compiler.chmod(0o700)
    env = dict(REASONCACHE_CACHE_DIR=str(cache), CXX=str(compiler))
    first = Path(load(**env)[0])
    built = first.stat().st_mtime_ns
    assert first.is_relative_to(cache)
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0
    compiler.unlink()
    assert load(**env) == [str(first)] * 2
    assert first.stat().st_mtime_ns == built
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"], "no scratch left"

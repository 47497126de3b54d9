# SPDX-License-Identifier: Apache-2.0
"""Free host memory is what the machine has, or what a container's limit leaves."""

from pathlib import Path

import pytest

from sglang_reasoncache.device.host_memory import free_host_memory, gpus_of_machine


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("4096", "1024", 3072), ("4096", "5000", 0), ("max", "1024", None), ("4096", None, None)],
)
def test_free_host_memory(tmp_path: Path, limit: str, used: str | None, free: int | None) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    if used is not None:
        (tmp_path / "memory.current").write_text(f"{used}\n")
    found = free_host_memory(tmp_path)
    assert found == free if free is not None else found > 2**20


@pytest.mark.parametrize(
    ("stat", "free"),
    [
        ("anon 500\nactive_file 100\ninactive_file 1000\n", 1196),
        ("inactive_file 1000\n", 1096),
        ("anon 500\n", 96),
        ("not a number\n", 96),
        ("inactive_file many\n", 96),
    ],
)
def test_what_the_kernel_keeps_of_files_is_free(tmp_path: Path, stat: str, free: int) -> None:
    """Such as a checkpoint that was read just before."""
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text(stat)
    assert free_host_memory(tmp_path) == free


def test_gpus_of_other_servers_count(tmp_path: Path) -> None:
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / gpu).mkdir()
    assert gpus_of_machine(tmp_path) == 2
    assert gpus_of_machine(tmp_path / "nowhere") == 0

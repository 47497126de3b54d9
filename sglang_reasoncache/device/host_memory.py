# SPDX-License-Identifier: Apache-2.0
"""How much host memory is free, and how many GPUs share it."""

from pathlib import Path

import psutil

#: A container's memory limit and use, in bytes (cgroup v2). Without a limit the first file says ``max``.
_CGROUP = Path("/sys/fs/cgroup")
#: NVIDIA's driver has an entry here for each GPU, or in a container for each that the container may use.
_GPUS = Path("/proc/driver/nvidia/gpus")


def free_host_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that are free, or fewer, if the limit of a container leaves less. What the kernel
    keeps of files that were read, such as a checkpoint, counts as free, because the kernel gives it back."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return free
    return min(free, max(limit - used + _cached_files(cgroup), 0))


def _cached_files(cgroup: Path) -> int:
    """Bytes of a container's use that hold contents of files. 0 if not known."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return 0
    return sizes.get("active_file", 0) + sizes.get("inactive_file", 0)


def gpus_of_machine(folder: Path = _GPUS) -> int:
    """Number of NVIDIA GPUs of this machine, also of those that this process does not use. 0 if not known."""
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return 0

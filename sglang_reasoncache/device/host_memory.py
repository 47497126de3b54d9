# SPDX-License-Identifier: Apache-2.0
"""How much host memory is free."""

from pathlib import Path

import psutil

#: A container's memory limit and use, in bytes (cgroup v2). Without a limit the first file says ``max``.
_CGROUP = Path("/sys/fs/cgroup")


def free_host_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that are free, or fewer, if the limit of a container leaves less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):
        return free
    return min(free, max(limit - used, 0))

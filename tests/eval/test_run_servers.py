# SPDX-License-Identifier: Apache-2.0
"""Command lines of the servers that a run starts."""

from __future__ import annotations

from eval.runs.servers import _unlimit
from eval.serving import ServerProcess


def test_a_gpu_without_a_budget_is_filled() -> None:
    """ServerProcess bounds the KV slots unless told; that bound is meant for CPUs."""
    command = ServerProcess("m", device="cuda", flags=["--tp", "2"]).command
    assert "--max-total-tokens" in command
    _unlimit(command)
    assert "--max-total-tokens" not in command
    assert command[-2:] == ["--tp", "2"]
    assert command[command.index("--random-seed") + 1] == "0"

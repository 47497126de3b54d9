# SPDX-License-Identifier: Apache-2.0
"""Command lines of the servers that a run starts."""

from __future__ import annotations

from typing import Literal

import pytest

from eval.serving import DEFAULT_KV_SLOTS, ServerProcess


@pytest.mark.parametrize(("device", "bounded"), [("cpu", True), ("cuda", False)])
def test_a_gpu_without_a_budget_is_filled(device: Literal["cpu", "cuda"], bounded: bool) -> None:
    command = ServerProcess("m", device=device, flags=["--tp", "2"]).command
    assert ("--max-total-tokens" in command) == bounded
    assert (str(DEFAULT_KV_SLOTS) in command) == bounded
    assert command[-2:] == ["--tp", "2"]
    assert command[command.index("--random-seed") + 1] == "0"

# SPDX-License-Identifier: Apache-2.0
"""Counts work, so that a test can bound it. Unlike a time, a count does not depend on the machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(run: Callable[[], object]) -> int:
    """Number of calls of Python and C functions while ``run`` runs in this thread."""
    calls = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls

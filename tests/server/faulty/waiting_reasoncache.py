# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for tests. If the variable :data:`WAITS` is set, each poll of the running requests waits for
all replies of the filter process, so that responses share the same blocks at the same steps in every run."""

import os
import time

from sglang_reasoncache.filter.process import FilterProcess

WAITS = "REASONCACHE_WAIT_FOR_FILTER"
_ready = FilterProcess.ready


def wait_for(step_filter: FilterProcess) -> int:
    """Wait until the process has replied to all that it was fed, or has failed. Return the last ``ready``."""
    while 0 <= (ready := _ready(step_filter)) < step_filter.outstanding:
        time.sleep(0.0005)
    return ready


def register() -> None:
    if os.environ.get(WAITS):
        FilterProcess.ready = wait_for  # type: ignore[assignment,method-assign]

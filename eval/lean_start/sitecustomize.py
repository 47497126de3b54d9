# SPDX-License-Identifier: Apache-2.0
"""Start-up diet for CPU servers; Python runs it first in every server process. Each imports SGLang
anew, 30 CPU seconds, a third of them for the garbage collector and for flashinfer without a GPU."""

import gc
import multiprocessing
import os
import sys

gc.set_threshold(100_000, 20, 100)
# None makes "import flashinfer" raise ImportError, which SGLang's own guards take
# as "not installed".
sys.modules["flashinfer"] = None  # type: ignore[assignment]

if os.environ.get("REASONCACHE_FORK"):
    # For tests, which start many servers: spawned, as SGLang asks for, each process imports anew.
    _set = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: _set("fork", force=True)  # type: ignore

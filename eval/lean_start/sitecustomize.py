# SPDX-License-Identifier: Apache-2.0
"""Makes CPU servers start faster; Python runs this file first in every server process. Each process imports
SGLang, which takes 10 CPU seconds, two of them for flashinfer, scikit-learn and garbage collection."""

import gc
import multiprocessing
import os
import sys

gc.set_threshold(100_000, 20, 100)
# None makes an import raise ImportError, so SGLang and transformers take these packages as not installed.
sys.modules |= dict.fromkeys(("flashinfer", "sklearn"))  # type: ignore[arg-type]

if os.environ.get("REASONCACHE_FORK"):
    # For tests, which start many servers: forked processes inherit the imported SGLang, spawned ones import it.
    _set = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: _set("fork", force=True)  # type: ignore

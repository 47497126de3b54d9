# SPDX-License-Identifier: Apache-2.0
"""Start-up diet for CPU servers; Python runs it first in every server process. Each imports SGLang
anew, 30 CPU seconds, a third of them for the garbage collector and for flashinfer without a GPU."""

import gc
import sys

gc.set_threshold(100_000, 20, 100)
# None makes "import flashinfer" raise ImportError, which SGLang's own guards take
# as "not installed".
sys.modules["flashinfer"] = None  # type: ignore[assignment]

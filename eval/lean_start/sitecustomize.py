# SPDX-License-Identifier: Apache-2.0
"""Start-up diet for CPU servers; Python runs it first in every server process.

Each of a server's three processes imports SGLang anew, about 30 CPU seconds.
A third of that is the garbage collector walking millions of fresh import-time
objects, and flashinfer, which SGLang imports even where no GPU can run it.
"""

import gc
import sys

gc.set_threshold(100_000, 20, 100)
# None makes "import flashinfer" raise ImportError, which SGLang's own guards take
# as "not installed".
sys.modules["flashinfer"] = None  # type: ignore[assignment]

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.idle ROUNDS``: what sharing costs where there is nothing to share.

A stock server and ours take turns on random text; the temperature is so high that it is noise."""

import json
import sys
from pathlib import Path
from typing import Any

from eval.bench import sides
from eval.methods import DENSE

_OURS = "newest"
# Short rounds: what else the machine does changes within seconds.
_ASKED: dict[str, Any] = {"limit": 32, "warm_up": 4}


def summary(rounds: int) -> dict[str, Any]:
    """Figures of ``rounds`` loads of noise; medians of the ratios of neighbours."""
    out = sides.fresh(Path("build/bench/idle"), "run")
    cells = sides.in_turns("noise", (DENSE, _OURS), rounds, out, **_ASKED)
    found = sides.speeds_of(cells[_OURS], cells[DENSE])
    return {
        "idle_rounds": rounds,
        "idle_totals": cells[_OURS][-1].served().totals(),
        "idle_throughput_ratio": found["throughput_ratio"],
        "idle_throughput_ratios": found["throughput_ratios"],
        "idle_tpot_p99_ratio": found["tpot_p99_ratio"],
        "idle_scheduler_cpu_ratio": found["cpu_ratio"],
    }


if __name__ == "__main__":
    print(json.dumps(summary(int(sys.argv[1]) if len(sys.argv) > 1 else 32), indent=1))

# SPDX-License-Identifier: Apache-2.0
"""Two stock servers of the embedded model that differ in the attention backend alone, in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.idle import in_turn
from eval.bench.turns import as_text, by_round, spread
from eval.serving import ServerProcess
from eval.tiny_reasoner import CHECKPOINT
from sglang_reasoncache import compat


def serve(rounds: int, logs: Path) -> dict[str, Any]:
    """Output tokens/s of both; prints a table.

    Raises:
        RuntimeError: a request failed.
    """
    body = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 512}
    native, ours = names = ("torch_native", compat.CPU_BACKEND)
    flags = ["--max-total-tokens", "40000", "--attention-backend"]
    servers = {
        name: ServerProcess(
            CHECKPOINT, flags=[*flags, name], log_path=logs / f"attention_{name}.log"
        )
        for name in names
    }
    with servers[native], servers[ours]:
        speeds = by_round(in_turn(servers, body, rounds), "throughput")
    ratio = spread(speeds[ours] / speeds[native])
    print(f"\n{rounds} rounds of 32 requests x 512 tokens, embedded model\n")
    line = [
        "output tokens/s",
        *(as_text(speeds[name].median()) for name in names),
        as_text(ratio, 2),
    ]
    table = pd.DataFrame([line], columns=["", *names, "ratio"])
    print(table.to_markdown(index=False, disable_numparse=True))
    return {
        "server_tokens_per_s_ratio": ratio["median"],
        "server_tokens_per_s": {name: speeds[name].tolist() for name in names},
    }

# SPDX-License-Identifier: Apache-2.0
"""Two stock servers of the embedded model that differ in the attention backend alone, in turn."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.attention_rig import spread, text
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from sglang_reasoncache import compat

_SEED = 5


def serve(rounds: int, logs: Path, requests: int = 32, max_tokens: int = 512) -> dict[str, Any]:
    """Output tokens/s of both; prints a table.

    Raises:
        openai.OpenAIError: a request failed.
    """
    names = ("torch_native", compat.CPU_BACKEND)
    servers = {
        name: ServerProcess(
            CHECKPOINT,
            flags=["--max-total-tokens", "40000", "--attention-backend", name],
            log_path=logs / f"attention_{name}.log",
        )
        for name in names
    }
    lines = []
    with servers[names[0]], servers[names[1]]:
        for number in range(rounds + 1):
            prompts = [problem.prompt for problem in generate(_SEED + number, requests)]
            for name in names[:: 1 if number % 2 else -1]:
                speed = tokens_per_s(servers[name], prompts, max_tokens)
                lines.append({"round": number, "server": name, "speed": speed})
    # The first round warms up.
    speeds = pd.DataFrame(lines).pivot(index="round", columns="server", values="speed")[1:]
    ratio = spread(speeds[names[1]] / speeds[names[0]])
    medians = [f"{speeds[name].median():.0f}" for name in names]
    print(f"\n{rounds} rounds of {requests} requests x {max_tokens} tokens, embedded model\n")
    table = pd.DataFrame(
        [["output tokens/s", *medians, text(ratio, 2)]], columns=["", *names, "ratio"]
    )
    print(table.to_markdown(index=False, disable_numparse=True))
    return {
        "server_tokens_per_s_ratio": ratio["median"],
        "server_tokens_per_s": {name: speeds[name].tolist() for name in names},
    }


def tokens_per_s(server: ServerProcess, prompts: list[str], max_tokens: int) -> float:
    """All prompts at once, ``max_tokens`` each; output tokens over the wall time."""
    client = server.openai()

    def ask(prompt: str) -> int:
        answer = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        tokens = sum(pool.map(ask, prompts))
    return tokens / (time.perf_counter() - began)

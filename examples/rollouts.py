# SPDX-License-Identifier: Apache-2.0
"""Samples several responses to one prompt. Each says which of its positions read others' KV, so that a trainer
can mask tokens: docs/rollouts.md.

python examples/rollouts.py --url http://127.0.0.1:30000 --samples 4 "<|user|> ... <|assistant|>"
"""

import argparse
from typing import Any

import httpx


def exact_tokens(meta: dict[str, Any]) -> int:
    """Number of the response's first tokens that were computed before a block of it shared."""
    record = meta.get("reasoncache")
    if record is None or record["continued"] is not None or "prompt_tokens" not in meta:
        # Nothing is known of it, or its prompt was approximate, or it was aborted while it waited: then SGLang
        # does not say where the response begins.
        return 0
    began = [block[0] for block in (*record["blocks"], *record["blocks_across"])]
    began += [eviction[0] for eviction in record["evictions"]]
    began += [start for start, _ in record["recomputed"]]
    first = min(began, default=meta["prompt_tokens"] + meta["completion_tokens"])
    return int(first - meta["prompt_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", help="text as the model's chat template makes it")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server listens")
    parser.add_argument("--most", type=int, default=1000, help="most tokens of a response")
    options = parser.parse_args()

    sampling = {
        "n": options.samples,
        "temperature": 1.0,
        "max_new_tokens": options.most,
        "custom_params": {"reasoncache": {"record": True}},
    }
    body = {"text": options.prompt, "sampling_params": sampling}
    reply = httpx.post(f"{options.url}/generate", json=body, timeout=None).raise_for_status()
    responses = reply.json()
    for number, response in enumerate(responses if isinstance(responses, list) else [responses]):
        meta = response["meta_info"]
        record = meta.get("reasoncache", {"blocks": [], "blocks_across": []})
        shared = len(record["blocks"]) + len(record["blocks_across"])
        print(
            f"sample {number}: {meta['completion_tokens']} tokens, {shared} blocks "
            f"shared, the first {exact_tokens(meta)} tokens before any of them"
        )


if __name__ == "__main__":
    main()

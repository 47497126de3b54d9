# SPDX-License-Identifier: Apache-2.0
"""What sharing KV between similar steps does to accuracy, simulated without a server.

A plain decode loop keeps keys and values in tensors. When a step ends, the blocks that the filter
proposes are overwritten by their sources, if

    mean over layers of (|K - K'| + |V - V'|) / (2 * block * kv_width)

is within a running percentile of all such distances seen. Modes: ``dense`` shares nothing;
``corrected`` rotates shared keys to their new position; ``no structure check`` lets formal tokens
differ and ``nor same tokens`` also takes blocks by their offset in the step, whatever they hold;
``as-cached`` leaves keys as they were computed; ``random`` overwrites as many random blocks by
random earlier ones, rotated too.
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.tiny_reasoner.decoder import Decoder
from eval.tiny_reasoner.task import EOS, Problem, generate, grade
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.tokenizer_bytes import vocabulary_of

# Distances seen before the percentile is trusted; until then nothing is shared.
WARM = 30
MODES: dict[str, dict[str, Any]] = {
    "corrected": {},
    "no structure check": {"use_structure": False},
    "nor same tokens": {"use_structure": False, "align": "index"},
    "as-cached": {},
}


@dataclass
class Response:
    """One response in the making."""

    tokens: list[int]
    prompt: int
    filter: RequestFilter | None
    steps: int = 0
    saved: int = 0
    saved_sum: int = 0
    total_sum: int = 0
    eligible: int = 0


@dataclass
class Sharer:
    """Overwrites blocks whenever a step ends.

    Attributes:
        tokenizer: Of the model.
        config: Of the filter; None shares nothing.
        percentile: Of the distances, up to which a block is overwritten.
        corrected: Whether keys are rotated to their new position.
    """

    tokenizer: Any
    config: FilterConfig | None = None
    percentile: float = 80
    corrected: bool = True
    distances: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.config is not None:
            self._vocabulary = vocabulary_of(self.tokenizer)
            self._classes = TokenClasses(self._vocabulary)

    def begin(self, prompt: Sequence[int]) -> Response:
        """A response that has yet to be decoded."""
        follows = None
        if self.config is not None:
            follows = RequestFilter(self.config, self._classes, self._vocabulary, len(prompt))
        return Response(list(prompt), len(prompt), follows)

    def written(self, decoder: Decoder, row: int, response: Response) -> None:
        """To be called when K and V of the newest token of a response have been written."""
        if self.config is None or response.filter is None:
            return
        for proposal in response.filter.push(response.tokens[-1:]):
            response.steps += 1
            if response.steps > 1:
                block = self.config.block
                response.eligible += len(proposal.step) // block * block
            for pair in proposal.pairs:
                self._share(decoder, row, response, pair.dst_start, pair.src_start, pair.length)

    def _share(
        self, decoder: Decoder, row: int, response: Response, to: int, origin: int, size: int
    ) -> None:
        assert self.config is not None
        keys, values = decoder.block(row, to, size)
        from_keys, from_values = decoder.block(row, origin, size)
        if self.corrected:
            from_keys = decoder.rotate(from_keys, to - origin)
        if self.config.random_ratio is None:
            sides = ((keys, from_keys), (values, from_values))
            gaps = torch.stack([(a - b).flatten(1).norm(dim=1) for a, b in sides]).sum(0)
            distance = float(gaps.mean()) / (2 * size * decoder.kv_heads * decoder.dim)
            insort(self.distances, distance)
            seen = len(self.distances)
            rank = bisect_right(self.distances, distance)
            if seen <= WARM or rank > seen * self.percentile / 100:
                return
        keys.copy_(from_keys)
        values.copy_(from_values)
        response.saved += size


@torch.no_grad()
def decode(
    model: Any, prompts: list[list[int]], stop: int, sharer: Sharer, limit: int
) -> list[Response]:
    """Greedy responses to a batch of prompts, fed token by token too: no padding, no mask."""
    responses = [sharer.begin(prompt) for prompt in prompts]
    decoder = Decoder(model, len(prompts), max(map(len, prompts)) + limit)
    live = list(responses)
    for position in range(decoder.keys.shape[3]):
        logits = decoder.step(torch.tensor([s.tokens[position] for s in live]), position)
        for row, (one, token) in enumerate(zip(live, logits.argmax(-1).tolist(), strict=True)):
            if position < one.prompt - 1:
                continue
            if position >= one.prompt:
                sharer.written(decoder, row, one)
            one.saved_sum += one.saved
            one.total_sum += position + 1
            one.tokens.append(token)
        rows = [r for r, s in enumerate(live) if s.tokens[-1] != stop]
        if len(rows) < len(live):
            live = [live[r] for r in rows]
            decoder.keep(rows)
        if not live:
            break
    return responses


def run(
    model: Any, problems: list[Problem], sharer: Sharer, batch: int, limit: int
) -> tuple[list[Response], list[str]]:
    """Responses and their texts for all problems."""
    tokenizer = sharer.tokenizer
    chats = [[{"role": "user", "content": p.prompt}] for p in problems]
    prompts = [
        tokenizer(t)["input_ids"]
        for t in tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    ]
    stop = tokenizer.convert_tokens_to_ids(EOS)
    responses: list[Response] = []
    for start in range(0, len(prompts), batch):
        responses += decode(model, prompts[start : start + batch], stop, sharer, limit)
    texts = tokenizer.batch_decode(
        [s.tokens[s.prompt :] for s in responses], skip_special_tokens=True
    )
    return responses, texts


def main() -> None:
    """Print accuracy and savings of every mode."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--percentile", type=float, default=80)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--limit", type=int, default=900, help="most tokens of a response")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modes", nargs="+", help="only these, dense and corrected always")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    problems = generate(args.seed, args.problems)
    errors = pd.Series([p.error for p in problems])
    lines: list[dict[str, Any]] = []
    baseline: list[str] = []
    rate = 0.0
    for mode in ("dense", *MODES, "random"):
        if args.modes and mode not in ("dense", "corrected", *args.modes):
            continue
        knobs = {"random_ratio": rate} if mode == "random" else MODES.get(mode)
        config = None if knobs is None else FilterConfig(block=args.block, **knobs)
        began = time.perf_counter()
        sharer = Sharer(tokenizer, config, args.percentile, corrected=mode != "as-cached")
        responses, texts = run(model, problems, sharer, args.batch, args.limit)
        right = pd.Series([grade(t, p) for t, p in zip(texts, problems, strict=True)])
        found = pd.DataFrame([vars(s) | {"length": len(s.tokens)} for s in responses])
        baseline = baseline or texts
        if mode == "corrected":
            rate = float(found["saved"].sum() / found["eligible"].sum())
        lines.append(
            {
                "mode": mode,
                "accuracy": right.mean(),
                "no error": right[~errors].mean(),
                "error": right[errors].mean(),
                "saved at the end": found["saved"].sum() / found["length"].sum(),
                "over decode steps": (found["saved_sum"] / found["total_sum"]).mean(),
                "tokens": found["length"].mean(),
                "text as dense": sum(map(str.__eq__, texts, baseline)) / len(texts),
                "seconds": time.perf_counter() - began,
            }
        )
        print(f"{mode}: {right.mean():.3f}", flush=True)
    print("\n" + pd.DataFrame(lines).to_markdown(index=False, floatfmt=".3f"))


if __name__ == "__main__":
    main()

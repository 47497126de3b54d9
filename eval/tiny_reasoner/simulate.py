# SPDX-License-Identifier: Apache-2.0
"""What sharing KV between similar steps does to accuracy, simulated without a server.

A plain decode loop keeps keys and values in tensors. When a step ends, blocks of it that hold the
same tokens as its best candidate (see ``redundancy``) are overwritten by the candidate's, if

    mean over layers of (|K - K'| + |V - V'|) / (2 * block * kv_width)

is within a running percentile of all such distances seen. Modes: ``dense`` shares nothing;
``corrected`` rotates shared keys to their new position; ``no structure check`` lets formal tokens
differ and ``nor same tokens`` also takes blocks by their offset in the step, whatever they hold;
``as-cached`` leaves keys as they were computed; ``random`` overwrites as many random blocks by
random earlier ones, rotated too.
"""

from __future__ import annotations

import argparse
import random
import time
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from .redundancy import Step, aligned_runs, best_candidate, make_step
from .task import EOS, FORMAL, STEP_END, Problem, generate, grade

# Distances seen before the percentile is trusted; until then nothing is shared.
WARM = 30


class Decoder:
    """The model with its KV in plain tensors; every row of the batch is at the same position."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        config = model.config
        self.model = model
        self.kv_heads, self.dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, rows, self.kv_heads, length, self.dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def rotate(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """Rotate queries or keys onward by ``positions`` (rotary embedding; negative goes back)."""
        angle = positions * self.frequencies
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Feed one token a row; logits of the next."""
        rows = len(tokens)
        x = self.model.model.embed_tokens(tokens)
        layers = zip(self.model.model.layers, self.keys, self.values, strict=True)
        for layer, keys, values in layers:
            attention, h = layer.self_attn, layer.input_layernorm(x)
            q = self.rotate(
                attention.q_norm(attention.q_proj(h).view(rows, -1, self.dim)), position
            )
            k = self.rotate(
                attention.k_norm(attention.k_proj(h).view(rows, -1, self.dim)), position
            )
            keys[:, :, position] = k
            values[:, :, position] = attention.v_proj(h).view(rows, -1, self.dim)
            # Query heads of one KV head are consecutive: group them instead of repeating K and V.
            mixed = F.scaled_dot_product_attention(
                q.view(rows, self.kv_heads, -1, self.dim),
                keys[:, :, : position + 1],
                values[:, :, : position + 1],
            )
            x = x + attention.o_proj(mixed.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def block(self, row: int, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each (layers, kv heads, size, dim)."""
        part = slice(start, start + size)
        return self.keys[:, row, :, part], self.values[:, row, :, part]


@dataclass
class Sequence:
    """One response in the making."""

    tokens: list[int]
    prompt: int
    begin: int
    steps: list[Step] = field(default_factory=list)
    saved: int = 0
    saved_sum: int = 0
    total_sum: int = 0
    eligible: int = 0


@dataclass(frozen=True)
class Mode:
    """How to share."""

    name: str
    similar: bool = False
    corrected: bool = True
    structure: bool = True
    same_tokens: bool = True
    """Share runs of equal tokens; otherwise blocks at the same offset in both steps."""
    rate: float = 0.0
    """Probability that a block is overwritten by a random one."""


@dataclass
class Sharer:
    """Applies a mode whenever a step ends."""

    mode: Mode
    block: int
    percentile: float
    formal: frozenset[int]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    distances: list[float] = field(default_factory=list)

    def end_step(self, decoder: Decoder, row: int, seq: Sequence) -> None:
        """Called when the KV of the last token of ``seq`` has been written and it ends a step."""
        step = make_step(seq.begin, seq.tokens[seq.begin :], self.formal)
        if seq.steps:
            seq.eligible += len(step.tokens) // self.block * self.block
            if self.mode.similar:
                source = best_candidate(step, seq.steps, self.mode.structure)
                runs: Iterable[tuple[int, int]] = ()
                if source and self.mode.same_tokens:
                    runs = aligned_runs(step, source, self.block)
                elif source:
                    runs = zip(self._starts(step), self._starts(source), strict=False)
                for to, origin in runs:
                    self._share(decoder, row, seq, to, origin, judge=True)
            elif self.mode.rate:
                self._share_random(decoder, row, seq, step)
        seq.steps.append(step)
        seq.begin = len(seq.tokens)

    def _starts(self, step: Step) -> range:
        return range(step.start, step.start + len(step.tokens) - self.block + 1, self.block)

    def _share_random(self, decoder: Decoder, row: int, seq: Sequence, step: Step) -> None:
        origins = [start for earlier in seq.steps for start in self._starts(earlier)]
        for to in self._starts(step):
            if origins and self.rng.random() < self.mode.rate:
                self._share(decoder, row, seq, to, self.rng.choice(origins), judge=False)

    def _share(
        self, decoder: Decoder, row: int, seq: Sequence, to: int, origin: int, judge: bool
    ) -> None:
        keys, values = decoder.block(row, to, self.block)
        from_keys, from_values = decoder.block(row, origin, self.block)
        if self.mode.corrected:
            from_keys = decoder.rotate(from_keys, to - origin)
        if judge:
            gaps = sum(
                (a - b).flatten(1).norm(dim=1)
                for a, b in ((keys, from_keys), (values, from_values))
            )
            distance = float(gaps.mean()) / (2 * self.block * decoder.kv_heads * decoder.dim)
            insort(self.distances, distance)
            seen = len(self.distances)
            if (
                seen <= WARM
                or bisect_right(self.distances, distance) > seen * self.percentile / 100
            ):
                return
        keys.copy_(from_keys)
        values.copy_(from_values)
        seq.saved += self.block


@torch.no_grad()
def decode(
    model: Any, prompts: list[list[int]], end: int, stop: int, sharer: Sharer, limit: int
) -> list[Sequence]:
    """Greedy responses to a batch of prompts, fed token by token too: no padding, no mask."""
    sequences = [Sequence(list(p), len(p), len(p)) for p in prompts]
    decoder = Decoder(model, len(prompts), max(map(len, prompts)) + limit)
    live = list(sequences)
    for position in range(decoder.keys.shape[3]):
        logits = decoder.step(torch.tensor([s.tokens[position] for s in live]), position)
        following = logits.argmax(-1).tolist()
        for row, (seq, token) in enumerate(zip(live, following, strict=True)):
            if position < seq.prompt - 1:
                continue
            if seq.tokens[-1] == end and position >= seq.prompt:
                sharer.end_step(decoder, row, seq)
            seq.saved_sum += seq.saved
            seq.total_sum += position + 1
            seq.tokens.append(token)
        rows = [r for r, s in enumerate(live) if s.tokens[-1] != stop]
        if len(rows) < len(live):
            live = [live[r] for r in rows]
            decoder.keep(rows)
        if not live:
            break
    return sequences


def run(
    model: Any, tokenizer: Any, problems: list[Problem], sharer: Sharer, batch: int, limit: int
) -> tuple[list[Sequence], list[str]]:
    """Sequences and response texts for all problems."""
    end, stop = tokenizer.convert_tokens_to_ids([STEP_END, EOS])
    chats = [[{"role": "user", "content": p.prompt}] for p in problems]
    prompts = [
        tokenizer(t)["input_ids"]
        for t in tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    ]
    sequences: list[Sequence] = []
    for start in range(0, len(prompts), batch):
        sequences += decode(model, prompts[start : start + batch], end, stop, sharer, limit)
    texts = tokenizer.batch_decode(
        [s.tokens[s.prompt :] for s in sequences], skip_special_tokens=True
    )
    return sequences, texts


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
    formal = frozenset(tokenizer.convert_tokens_to_ids(sorted(FORMAL)))
    problems = generate(args.seed, args.problems)
    modes = [
        Mode("dense"),
        Mode("corrected", similar=True),
        Mode("no structure check", similar=True, structure=False),
        Mode("nor same tokens", similar=True, structure=False, same_tokens=False),
        Mode("as-cached", similar=True, corrected=False),
    ]
    if args.modes:
        modes = [m for m in modes if m.name in ("dense", "corrected", *args.modes)]
    print(f"{'mode':20} all   clean error saved over-steps tokens as-dense seconds")
    baseline: list[str] = []
    rate = 0.0
    while modes:
        mode = modes.pop(0)
        begin = time.perf_counter()
        sharer = Sharer(mode, args.block, args.percentile, formal)
        sequences, texts = run(model, tokenizer, problems, sharer, args.batch, args.limit)
        right = [grade(t, p) for t, p in zip(texts, problems, strict=True)]
        by_error = [
            fmean([ok for ok, p in zip(right, problems, strict=True) if p.error == e] or [0])
            for e in (False, True)
        ]
        tokens = sum(len(s.tokens) for s in sequences)
        saved = sum(s.saved for s in sequences)
        baseline = baseline or texts
        if mode.name == "corrected":
            rate = saved / sum(s.eligible for s in sequences)
            if not args.modes or "random" in args.modes:
                modes.append(Mode("random", rate=rate))
        over = fmean(s.saved_sum / s.total_sum for s in sequences)
        same = fmean(a == b for a, b in zip(texts, baseline, strict=True))
        mean_tokens, seconds = tokens / len(sequences), time.perf_counter() - begin
        print(
            f"{mode.name:20} {fmean(right):.3f} {by_error[0]:.3f} {by_error[1]:.3f} "
            f"{saved / tokens:.3f} {over:.3f}      {mean_tokens:6.0f} {same:.3f}    {seconds:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

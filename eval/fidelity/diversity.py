# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity.diversity MODEL RESPONSES`` makes the small tables of the KeyDiff paper (arXiv
2504.15364): how much space the keys span that a policy keeps, what part of a text a budget holds, and how many
operations KeyDiff's scores take."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eval import command
from eval.command import commas, option
from eval.fidelity.arms import parse
from eval.fidelity.cache import EditableCache, Reader
from eval.fidelity.replay import ArmCache
from eval.fidelity.responses import OnResponses
from eval.tokenizers import load_tokenizer

_CHUNK = 128
#: Added to the diagonal before the logarithm, so that keys that span fewer dimensions have a finite value.
_RIDGE = 1e-6


@dataclass(frozen=True)
class Options(OnResponses):
    shortest: int = option(600, "shorter responses are left out", least=1)
    policies: tuple[str, ...] = option(
        ("keydiff:recent=1:prompt=true", "streamingllm:prompt=true", "l2norm:prompt=true"),
        "policies that evict; -by-head behind a name lets each head choose",
    )
    budgets: tuple[int, ...] = option(
        (128, 256, 512), "positions that stay", read=commas(int), least=2
    )
    limit: int = option(3, "responses to measure, from the first on", least=1)
    out: Path = option(Path("build/bench/diversity.csv"), "CSV file of the figures")

    def __post_init__(self) -> None:
        for name in self.policies:
            if parse(name).evictor is None:
                raise ValueError(f"--policies must evict, got {name!r}")


def flops(kept: int, head_dim: int) -> int:
    """Operations of KeyDiff's scores of ``kept`` keys of a head, by the paper's weights (an addition and a
    square root 1, a multiplication 3, a division 47), without the choice of the highest."""
    return (12 * head_dim + 97) * kept + 3 * head_dim + 94


def diversity(keys: torch.Tensor) -> float:
    """Log-determinant of the second moment of unit keys, ``[..., positions, head_dim]``, the mean of all. The
    paper's determinant of K K^T is 0 for more keys than dimensions; K^T K has its other eigenvalues."""
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    moments = unit.mT @ unit / unit.shape[1]
    return float(torch.logdet(moments + _RIDGE * torch.eye(keys.shape[-1])).mean())


def spans(reader: Reader, cache: EditableCache, arms: Mapping[str, ArmCache]) -> dict[str, float]:
    """:func:`diversity` of the keys that each arm keeps, the mean of the layers; ``all`` keeps every key."""
    means = {}
    for name, arm in {"all": None, **arms}.items():
        values = []
        for layer in range(reader.layers):
            keys = cache.keys[layer, 0, :, : cache.length].cpu()
            kept = [torch.arange(cache.length)] * len(keys) if arm is None else arm.kept(layer)
            values += [diversity(head[at]) for head, at in zip(keys, kept, strict=True)]
        means[name] = sum(values) / len(values)
    return means


def work(options: Options) -> list[dict[str, Any]]:
    """Measure, print a table, write it, and return its rows. Raises ValueError if there is no response."""
    arms = [parse(name) for name in options.policies]
    tokenizer = load_tokenizer(str(options.model), local=True)
    reader = options.reader()
    measured: list[dict[str, Any]] = []
    head_dim = 0
    for response in islice(options.read(tokenizer), options.limit):
        length = len(response.tokens)
        for budget in options.budgets:
            cache = reader.cache(1 + len(arms), length)
            caches = {arm.name: ArmCache(arm, reader, cache, response.prompt) for arm in arms}
            for start in range(0, length, _CHUNK):
                chunk = response.tokens[start : start + _CHUNK]
                reader.forward(cache, chunk, logits_to_keep=1)
                for arm in caches.values():
                    arm.evict(
                        max(0, cache.length - budget), sum(response.tokens[: response.prompt])
                    )
            row = {"budget": budget, "held": min(1.0, budget / length)}
            measured.append({**row, **spans(reader, cache, caches)})
            head_dim = cache.keys.shape[-1]
    if not measured:
        raise ValueError(f"{options.responses}: no response of --shortest tokens")
    frame = pd.DataFrame(measured).groupby("budget").mean().reset_index()
    frame.insert(2, "KeyDiff, operations a head", [flops(n, head_dim) for n in frame["budget"]])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(options.out, index=False)
    rows: list[dict[str, Any]] = frame.to_dict("records")
    print(frame.to_markdown(index=False, floatfmt=".3f"))
    print(f"\nheld: mean min(1, budget / tokens); policies: log-determinants\nwrote {options.out}")
    return rows


if __name__ == "__main__":
    command.run(Options, work)

# SPDX-License-Identifier: Apache-2.0
"""Runs the sides of a comparison in turns, for many rounds; can measure memory bandwidth after each turn. Load
from other programs changes within seconds, but affects all sides alike if they take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas as pd

#: A side of a comparison. Each call measures it once and returns samples, which are dictionaries of figures.
Side = Callable[[], Sequence[Mapping[str, float]]]
Call = Callable[[], object]


def take_turns(
    sides: Mapping[str, Side], rounds: int, between: Callable[[], Mapping[str, float]] = dict
) -> pd.DataFrame:
    """Returns a table with a row for each sample: ``side``, ``round``, the sample's figures, and the figures
    that ``between`` gave after the side. Every second round is in reverse order. A warm-up round is omitted."""
    import pandas as pd

    lines = []
    for number in range(rounds + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            samples = sides[name]()
            behind = between()
            lines += [{"side": name, "round": number, **behind, **sample} for sample in samples]
    table = pd.DataFrame(lines)
    return table[table["round"] > 0]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median and the quartiles."""
    points = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    quantiles = torch.tensor([*values], dtype=torch.float64).quantile(points)
    return dict(zip(("median", "low", "high"), quantiles.tolist(), strict=True))


def as_text(figure: Any) -> str:
    """Formats a :func:`spread` as ``median (low to high)``; rounds a number, keeps text; None gives ""."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    if not isinstance(figure, dict):
        return f"{round(figure, 3):g}"
    median, low, high = (as_text(figure[name]) for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def seconds(call: Call, device: torch.device) -> float:
    """Wall time of one call, or on a CUDA device the time between two events around the call."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Yardstick:
    """Measures memory bandwidth: copies and reads 0.5 GB with all threads, or 2 GB on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = 250_000_000 if device.type == "cuda" else 62_500_000
        source = torch.ones(count, dtype=torch.int64, device=device)
        target = torch.zeros_like(source)
        self._bytes = source.nbytes
        self._copy: Call = lambda: target.copy_(source)
        self._read: Call = source.view(torch.float32).sum

    def rates(self) -> dict[str, float]:
        """The bandwidths, in GB/s, of a ``copy`` (bytes read plus bytes written) and of a ``read``."""
        copy, read = (seconds(call, self._device) for call in (self._copy, self._read))
        return {"copy": 2 * self._bytes / copy / 1e9, "read": self._bytes / read / 1e9}

# SPDX-License-Identifier: Apache-2.0
"""Rounds in which sides take turns, so that what else the machine does hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

#: Runs once; returns its samples, each a dictionary of figures.
Side = Callable[[], Sequence[Mapping[str, float]]]


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    warm_up_rounds: int = 0,
    between: Callable[[], Mapping[str, float]] = dict,
) -> pd.DataFrame:
    """Samples of all rounds, one a line: ``side``, ``round``, its figures and those ``between``.

    Every second round runs in the opposite order; rounds that warm up are left out.
    """
    lines = []
    for number in range(warm_up_rounds + rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            samples, behind = sides[name](), between()
            if number >= warm_up_rounds:
                lines += [{"side": name, "round": number} | {**behind, **one} for one in samples]
    return pd.DataFrame(lines)


def by_round(samples: pd.DataFrame, figure: str) -> pd.DataFrame:
    """One figure, a line a round and a column a side."""
    return samples.pivot(index="round", columns="side", values=figure)


def spread(values: Sequence[float] | pd.Series) -> dict[str, float]:
    """Median and quartiles."""
    found = pd.Series(values).quantile([0.5, 0.25, 0.75])
    return dict(zip(("median", "low", "high"), map(float, found), strict=True))


def as_text(figure: Any, digits: int = 0) -> str:
    """``median (low to high)`` of a :func:`spread`, a rounded number, or the text; "" for None."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    if not isinstance(figure, dict):
        return f"{figure:.{digits}f}"
    median, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"

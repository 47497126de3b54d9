# SPDX-License-Identifier: Apache-2.0
"""The look of all figures: colour-blind-safe, quiet axes, names that stay text."""

from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.jsonl import one_line

sns.set_palette("colorblind")
LABEL_SIZE = 8.5
_MAX_CHARS = 34


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of so many inches, with its axes [rows, columns]."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=9)
    return made, axes


def save(made: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=150)


def text(name: str) -> str:
    """A name of any content in a figure: one short line, no formula."""
    return one_line(name, _MAX_CHARS).replace("$", r"\$")


def light_grid(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#EBEBEB", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)

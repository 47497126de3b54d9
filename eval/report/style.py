# SPDX-License-Identifier: Apache-2.0
"""One look for all figures: colour-blind-safe, quiet axes, names that stay text."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette and Tol's muted one, without what is too faint on white. Percentiles
# are shades of ReasonCache's blue, marked by their number.
_LOOKS = {
    "dense": ("#555555", "o"),
    "reasoncache": ("#0072B2", "s"),
    "random": ("#D55E00", "D"),
    "memshare": ("#009E73", "^"),
    "memshare-0.9": ("#44AA99", "2"),
    "cosine": ("#E69F00", "v"),
    "cosine-structure": ("#56B4E9", "P"),
    "p20": ("#6BAED6", "$20$"),
    "p50": ("#4292C6", "$50$"),
    "p80": ("#2171B5", "$80$"),
    "p100": ("#08306B", "$100$"),
    "embedding": ("#CC79A7", "X"),
    "sentence-bert": ("#882255", "h"),
    "cosine-distance": ("#8C6D31", "<"),
    "fixed-0.8": ("#999933", "p"),
    "fixed-0.9": ("#7570B3", ">"),
}
_OTHERS = ("#AA4499", "#117733", "#332288", "#661100", "#6699CC", "#888888")
_OTHER_MARKERS = "*Hd84"
GREY = "#555555"
FAINT = "#D0D0D0"
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
    """Write a PNG of a size that documents can show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=150)


def colour(method: str) -> str:
    """The same for a method in every figure."""
    return _look(method)[0]


def marker(method: str) -> str:
    """The same for a method in every figure, so that colour is not needed to tell them apart."""
    return _look(method)[1]


def _look(method: str) -> tuple[str, str]:
    name, options, _ = method.partition(":")
    # Random sharing always comes with its share as an option.
    if name in _LOOKS and (not options or name == "random"):
        return _LOOKS[name]
    number = zlib.crc32(method.encode(errors="replace"))
    return _OTHERS[number % len(_OTHERS)], _OTHER_MARKERS[number % len(_OTHER_MARKERS)]


def text(name: str) -> str:
    """A name of any content in a figure: one short line, no formula."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    flat = flat if len(flat) <= _MAX_CHARS else flat[: _MAX_CHARS - 1] + "…"
    return flat.replace("$", r"\$")


def light_grid(axes: Axes, axis: str = "y") -> None:
    """Lines to read values by, behind everything."""
    axes.grid(axis=axis, color="#EBEBEB", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)

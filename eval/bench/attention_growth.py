# SPDX-License-Identifier: Apache-2.0
"""How the time of a decode step grows with tokens, requests and shared entries: points, picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from eval.bench.attention_rig import Shape

Axis = Literal["", "tokens", "requests", "shared_percent"]
#: Label of each axis, and what the settings of its panel have in common.
_AXES: dict[str, tuple[str, str]] = {
    "tokens": ("tokens a request", "{requests} requests"),
    "requests": ("requests", "{tokens:,} tokens"),
    "shared_percent": ("entries shared, %", "{requests} x {tokens:,} tokens"),
}
#: Colour and marker of ours, ours with shared entries, and the other side.
_LOOKS = {"ours": ("#0072B2", "s"), "ours, shared": ("#56B4E9", "P"), "": ("#555555", "o")}
#: Share of the entries in the second curve over tokens and requests.
TYPICAL_SHARE = 22


@dataclasses.dataclass(frozen=True)
class Setting:
    """A point to measure: on the curve over ``axis``, or a line of the table with ""."""

    axis: Axis
    shape: Shape
    shared_percent: int

    @property
    def curve(self) -> str:
        """The name of our curve that it lies on."""
        if self.axis == "shared_percent" or not self.shared_percent:
            return "ours"
        return f"ours, {self.shared_percent}% shared"


def settings(
    tokens: Sequence[Shape], requests: Sequence[Shape], shared: tuple[Shape, Sequence[int]]
) -> list[Setting]:
    """Curves over the tokens and the requests of the shapes, and over what one shape shares.

    Neighbours have the same shape where they can, so that a pool is made once for both.
    """
    found = [Setting("tokens", shape, p) for shape in tokens for p in (0, TYPICAL_SHARE)]
    found += [Setting("requests", shape, p) for shape in requests for p in (0, TYPICAL_SHARE)]
    return found + [Setting("shared_percent", shared[0], percent) for percent in shared[1]]


def curves(points: Sequence[Mapping[str, Any]], axis: str) -> pd.DataFrame:
    """``curve``, ``value`` on the axis, ``median``, ``low``, ``high`` and ``read_ms``, by value."""
    lines = []
    for one in points:
        setting = one["setting"]
        if setting["axis"] == axis:
            value = {**setting["shape"], **setting}[axis]
            lines += [
                {"curve": name, "value": value, "read_ms": one["read_ms"], **ms}
                for name, ms in one["ms"].items()
            ]
    return pd.DataFrame(lines).sort_values("value", kind="stable")


def draw(devices: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A row of pictures for each device, by its name; bands are quartiles."""
    figure = Figure(figsize=(12, 3.6 * len(devices)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(devices), len(_AXES), squeeze=False)
    for row, (device, points) in zip(axes, devices.items(), strict=True):
        for panel, axis in zip(row, _AXES, strict=True):
            shape = next(p["setting"]["shape"] for p in points if p["setting"]["axis"] == axis)
            label, title = _AXES[axis]
            heads = " heads, {heads}/{kv_heads} of {head_dim}"
            panel.set_title((title + "," + heads).format(**shape), fontsize=10)
            panel.set_xlabel(label)
            _panel(panel, curves(points, axis), logarithmic=axis != "shared_percent")
        row[0].set_ylabel(device.replace("$", r"\$") + "\nms a layer")
        row[0].legend(fontsize=8.5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(panel: Axes, points: pd.DataFrame, logarithmic: bool) -> None:
    for name, curve in points.groupby("curve", sort=False):
        kind = "ours, shared" if str(name).startswith("ours,") else str(name)
        colour, marker = _LOOKS.get(kind, _LOOKS[""])
        at = curve["value"]
        panel.plot(at, curve["median"], color=colour, marker=marker, markersize=5, label=name)
        panel.fill_between(at, curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
    least = points.groupby("value")["read_ms"].first()
    panel.plot(least.index, least, color="#555555", linestyle=":", label="reading K and V once")
    panel.grid(axis="y", color="#EBEBEB", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    if not logarithmic:
        panel.set_ylim(bottom=0)
        return
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(least.index)
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))

# SPDX-License-Identifier: Apache-2.0
"""Draws how the time of a decode step grows with tokens, requests and shared entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

#: Label of each axis, and what the settings of its panel have in common.
_AXES = {
    "tokens": ("tokens a request", "{requests} requests"),
    "requests": ("requests", "{tokens:,} tokens"),
    "shared_percent": ("entries shared, %", "{requests} x {tokens:,} tokens"),
}
#: Colour and marker of ours, ours with shared entries, and the other side.
_LOOKS = {"ours": ("#0072B2", "s"), "ours, 22% shared": ("#56B4E9", "P")}
_OTHER = ("#555555", "o")


def curves(points: Sequence[Mapping[str, Any]], axis: str) -> pd.DataFrame:
    """``curve``, ``value`` on the axis, ``median``, ``low``, ``high`` and ``read_ms``, by value."""
    lines = [
        {"curve": name, "value": {**setting["shape"], **setting}[axis]}
        | {"read_ms": one["read_ms"], **ms}
        for one in points
        for name, ms in one["ms"].items()
        if (setting := one["setting"])["axis"] == axis
    ]
    return pd.DataFrame(lines).sort_values("value", kind="stable")


def draw(devices: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A row of pictures for each device, by its name; bands are quartiles."""
    figure = Figure(figsize=(12, 3.6 * len(devices)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(devices), len(_AXES), squeeze=False)
    for row, (device, points) in zip(axes, devices.items(), strict=True):
        for panel, (axis, (label, title)) in zip(row, _AXES.items(), strict=True):
            shape = next(p["setting"]["shape"] for p in points if p["setting"]["axis"] == axis)
            title += ", heads {heads}/{kv_heads} of {head_dim}"
            panel.set_title(title.format(**shape), fontsize=10)
            panel.set_xlabel(label)
            _panel(panel, curves(points, axis), logarithmic=axis != "shared_percent")
        row[0].set_ylabel(device.replace("$", r"\$") + "\nms a layer")
        row[0].legend(fontsize=8.5, frameon=False)
    figure.savefig(path, dpi=150)


def _panel(panel: Axes, points: pd.DataFrame, logarithmic: bool) -> None:
    for name, curve in points.groupby("curve", sort=False):
        colour, marker = _LOOKS.get(str(name), _OTHER)
        at = curve["value"]
        panel.plot(at, curve["median"], color=colour, marker=marker, markersize=5, label=name)
        panel.fill_between(at, curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
    least = points.groupby("value")["read_ms"].first()
    panel.plot(least.index, least, color=_OTHER[0], linestyle=":", label="reading K and V once")
    panel.grid(axis="y", color="#EBEBEB", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    if logarithmic:
        panel.loglog()
        panel.set_xticks(least.index, [f"{value:,}" for value in least.index], minor=False)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        panel.set_ylim(bottom=0)

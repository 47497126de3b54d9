# SPDX-License-Identifier: Apache-2.0
"""How the time of a decode step grows with tokens, requests and shared entries: figures, picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from eval.bench.attention_rows import Shape
from eval.bench.quartiles import Quartiles
from eval.report import style

Axis = Literal["tokens", "requests", "shared_percent"]
_LABELS: dict[Axis, str] = {
    "tokens": "tokens a request",
    "requests": "requests",
    "shared_percent": "entries shared, %",
}
#: Whose look in other figures each curve takes.
_KINDS = {
    "ours": "reasoncache",
    "ours, 22% shared": "cosine-structure",
    "torch-native": "dense",
    "FlashInfer": "dense",
    "FlashInfer, shared rows as cached": "random",
}
#: Share of the entries in the second curve over tokens and requests.
TYPICAL_SHARE = 22


@dataclass(frozen=True)
class Setting:
    """A point to measure, on the curve over ``axis``."""

    axis: Axis
    shape: Shape
    shared_percent: int


@dataclass(frozen=True)
class Point:
    """A measured setting.

    Attributes:
        ms: Of one layer, by what computed it.
        read_ms: What reading each entry's K and V once takes, at the machine's bandwidth.
    """

    setting: Setting
    ms: dict[str, Quartiles]
    read_ms: float

    @property
    def value(self) -> int:
        """Of the axis."""
        if self.setting.axis == "shared_percent":
            return self.setting.shared_percent
        return int(getattr(self.setting.shape, self.setting.axis))


def load(points: Sequence[dict[str, Any]]) -> list[Point]:
    """Points that went through :func:`dataclasses.asdict` and JSON."""
    return [
        Point(
            Setting(**{**one["setting"], "shape": Shape(**one["setting"]["shape"])}),
            {name: Quartiles(**ms) for name, ms in one["ms"].items()},
            one["read_ms"],
        )
        for one in points
    ]


def settings(
    tokens: Sequence[Shape], requests: Sequence[Shape], shared: tuple[Shape, Sequence[int]]
) -> list[Setting]:
    """Curves over the tokens and the requests of the shapes, and over what one shape shares.

    Neighbours have the same shape where they can, so that a pool is made once for both.
    """
    found = [Setting("tokens", shape, p) for shape in tokens for p in (0, TYPICAL_SHARE)]
    found += [Setting("requests", shape, p) for shape in requests for p in (0, TYPICAL_SHARE)]
    return found + [Setting("shared_percent", shared[0], percent) for percent in shared[1]]


def curve_of(setting: Setting) -> str:
    """The name of our curve that a setting lies on."""
    if setting.axis == "shared_percent" or not setting.shared_percent:
        return "ours"
    return f"ours, {setting.shared_percent}% shared"


def curves(points: Sequence[Point], axis: Axis) -> dict[str, list[tuple[int, Quartiles]]]:
    """By name, in the order first seen, each by rising value."""
    found: dict[str, list[tuple[int, Quartiles]]] = {}
    for one in points:
        if one.setting.axis == axis:
            for name, ms in one.ms.items():
                found.setdefault(name, []).append((one.value, ms))
    return {name: sorted(curve, key=lambda pair: pair[0]) for name, curve in found.items()}


def draw(devices: Mapping[str, Sequence[Point]], path: Path) -> None:
    """A row of pictures for each device, by its name; bands are quartiles."""
    made, axes = style.figure(12, 3.6 * len(devices), len(devices), len(_LABELS))
    for row, (device, points) in zip(axes, devices.items(), strict=True):
        for panel, axis in zip(row, _LABELS, strict=True):
            _panel(panel, [one for one in points if one.setting.axis == axis], axis)
        row[0].set_ylabel(f"{style.text(device)}\nms a layer")
        row[0].legend(fontsize=style.LABEL_SIZE, frameon=False)
    style.save(made, path)


def _panel(panel: Axes, points: Sequence[Point], axis: Axis) -> None:
    for name, curve in curves(points, axis).items():
        at = [value for value, _ in curve]
        kind = _KINDS.get(name, name)
        colour, marker = style.colour(kind), style.marker(kind)
        middle = [ms.median for _, ms in curve]
        panel.plot(at, middle, color=colour, marker=marker, markersize=5, label=name)
        low, high = [ms.low for _, ms in curve], [ms.high for _, ms in curve]
        panel.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    limit = sorted({one.value: one.read_ms for one in points}.items())
    at, least = [value for value, _ in limit], [ms for _, ms in limit]
    panel.plot(at, least, color=style.GREY, linestyle=":", label="reading K and V once")
    panel.set_title(_fixed(points[0].setting), fontsize=10)
    panel.set_xlabel(_LABELS[axis])
    style.light_grid(panel)
    if axis == "shared_percent":
        panel.set_ylim(bottom=0)
        return
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(at)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _fixed(setting: Setting) -> str:
    """What a panel's settings have in common."""
    shape = setting.shape
    sizes = {
        "tokens": f"{shape.requests} requests",
        "requests": f"{shape.tokens:,} tokens",
        "shared_percent": f"{shape.requests} x {shape.tokens:,} tokens",
    }
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    return f"{sizes[setting.axis]}, {heads}"

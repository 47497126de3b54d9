# SPDX-License-Identifier: Apache-2.0
"""Figures of the responses themselves: how redundant they are, how close two of their steps."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np

from eval.redundancy.measure import Totals, measure
from eval.redundancy.report import as_json, as_markdown, draw
from eval.redundancy.spelling import WORDS, Speller, TokenizerSpeller, WordSpeller
from eval.report.bars import Data
from eval.report.data import Run
from eval.report.heatmap import Heatmap
from eval.report.markdown import plain
from eval.report.style import figure, save


def speller_of(run: Run) -> Speller:
    """The model's own tokens if it is at hand, else words."""
    if run.model_folder is not None:
        try:
            return TokenizerSpeller(str(run.model_folder))
        except ValueError:
            pass
    return WordSpeller()


def redundancy(run: Run, most: int, path: Path) -> tuple[str, Data] | None:
    """Of the dense responses, the first ``most`` of a task: tables, and the numbers; None if none."""
    speller = speller_of(run)
    groups: dict[str, Totals] = {}
    for task in run.tasks:
        total: Totals = Counter()
        for _, _, response in itertools.islice(run.dense_texts(task), most):
            total.update(measure(speller.spell(response)))
        if total["responses"]:
            groups[task] = total
    if not groups:
        return None
    draw(groups, path)
    shown = {name: as_json(totals) for name, totals in groups.items()}
    tokens = WORDS if speller.name == WORDS else f"those of {plain(run.model)}"
    named = {plain(task): totals for task, totals in groups.items()}
    return as_markdown(named, tokens, 0), {"tokens": tokens, **shown}


def heatmap(found: Heatmap, title: str, path: Path) -> Data:
    """One picture a layer (columns) and side (rows)."""
    rows, columns = len(found.sides), len(found.layers)
    made, axes = figure(2.3 * columns + 1.2, 2.05 * rows + 0.7, rows, columns)
    later, earlier = (np.array(s) for s in found.starts)
    # Keys keep one scale with and without the move, so that the two rows compare.
    top = {
        kind: max(float(v.max()) for k, v in found.sides.items() if k[0] == kind)
        for kind in ("K", "V")
    }
    marks = [
        (s - earlier[0], d - later[0]) for d, s in found.pair.aligned if d in later and s in earlier
    ]
    for row, (name, distances) in enumerate(found.sides.items()):
        for column, layer in enumerate(found.layers):
            one = axes[row, column]
            one.spines[["top", "right"]].set_visible(True)
            drawn = one.imshow(
                distances[column],
                cmap="viridis",
                vmin=0,
                vmax=top[name[0]],
                origin="lower",
                aspect="auto",
                extent=(-0.5, earlier[-1] - earlier[0] + 0.5, -0.5, later[-1] - later[0] + 0.5),
            )
            if marks:
                one.scatter(*zip(*marks, strict=True), s=22, facecolors="none", edgecolors="white")
            one.tick_params(labelsize=8, labelbottom=row == rows - 1, labelleft=column == 0)
            if row == 0:
                one.set_title(f"layer {layer + 1} of {found.num_layers}", fontsize=9)
            if row == rows - 1:
                one.set_xlabel("earlier step: token", fontsize=8.5)
            if column == 0:
                one.set_ylabel(f"{name}\nlater step: token", fontsize=8.5)
        bar = made.colorbar(drawn, ax=list(axes[row]), pad=0.01)
        bar.ax.tick_params(labelsize=8)
        bar.set_label("distance", fontsize=8.5)
    made.suptitle(title, fontsize=10, x=0.01, ha="left")
    save(made, path)
    pair = found.pair
    return {
        "later": pair.later,
        "earlier": pair.earlier,
        "block": pair.block,
        "similarity": pair.similarity,
        "aligned": pair.aligned,
        "prompt_tokens": found.prompt_tokens,
        "layers": found.layers,
        "distances": {
            name: {
                "aligned_mean": _mean_at(found, values, True),
                "other_mean": _mean_at(found, values, False),
            }
            for name, values in found.sides.items()
        },
    }


def _mean_at(found: Heatmap, values: np.ndarray, aligned: bool) -> list[float | None]:
    """Mean distance a layer, of aligned blocks or of all others."""
    mask = np.zeros(values.shape[1:], bool)
    later, earlier = found.starts
    for d, s in found.pair.aligned:
        if d in later and s in earlier:
            mask[later.index(d), earlier.index(s)] = True
    mask = mask if aligned else ~mask
    return [float(layer[mask].mean()) if mask.any() else None for layer in values]

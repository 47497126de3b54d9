# SPDX-License-Identifier: Apache-2.0
"""Scores of responses summed up: means with bootstrap intervals, and a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_RESAMPLES = 2000
_FORMS = dict(saved="{:.1%}", kl="{:.4f}", kl_per_saved="{:.4f}", nll="{:+.2%}", top1="{:.1%}")
_MEANS = ["saved", "kl", "nll", "top1", "dense"]


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each group and arm: means over responses, and of each, ``_95``, the ends of its 95%
    bootstrap interval over responses, null for fewer than two. ``nll`` is the relative change of
    the mean, ``kl_per_saved`` the ratio of the means."""
    scores = pd.DataFrame(
        {"group": record["group"], "arm": name, **score, "dense": record["arms"]["dense"]["nll"]}
        for record in records
        for name, score in record["arms"].items()
        if name != "dense"
    )
    found = []
    for (group, arm), part in scores.groupby(["group", "arm"], sort=False):
        data, count = part[_MEANS].to_numpy().T, len(part)
        drawn = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
        ends = np.percentile(_figures(data[:, drawn].mean(axis=-1)), (2.5, 97.5), axis=-1)
        row = {"arm": arm, "group": group, "responses": count}
        for name, value, pair in zip(_FORMS, _figures(data.mean(axis=-1)), ends.T, strict=True):
            row[name] = float(value) if np.isfinite(value) else None
            row[f"{name}_95"] = pair.tolist() if count > 1 and np.isfinite(pair).all() else None
        found.append(row)
    return found


def _figures(means: np.ndarray) -> np.ndarray:
    """In the order of ``_FORMS``."""
    saved, kl, nll, top1, dense = means
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack((saved, kl, kl / saved, nll / dense - 1, top1))


def table(summed: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in summed:
        line = {name: row[name] for name in ("group", "arm", "responses")}
        for name, form in _FORMS.items():
            ends = row[f"{name}_95"]
            line[name] = "-" if row[name] is None else form.format(row[name])
            line[name] += "" if ends is None else f" ({' to '.join(map(form.format, ends))})"
        lines.append(line)
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))

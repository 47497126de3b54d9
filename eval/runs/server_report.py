# SPDX-License-Identifier: Apache-2.0
"""``GET /reasoncache`` of a server, as one report whatever its number of schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Ratio -> what it is an average over.
_WEIGHTS = {
    "memory_saving_ratio": "looks",
    "mean_running": "looks",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}


def merge(schedulers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One report of all data-parallel schedulers: totals added up, ratios averaged by weight.

    Settings are the first scheduler's, which all share. {} where nothing shares.
    """
    reports = [dict(report) for report in schedulers if report]
    if len(reports) < 2:
        return reports[0] if reports else {}
    merged = reports[0]
    merged["totals"] = _add([report.get("totals", {}) for report in reports])
    merged["slots_saved_now"] = sum(report.get("slots_saved_now", 0) for report in reports)
    merged["recent"] = [row for report in reports for row in report.get("recent", [])]
    return merged


def has_restarted(report: Mapping[str, Any]) -> bool:
    """Whether the totals count from zero, as they must right after a flush."""
    totals = report.get("totals", {})
    return not any(totals.get(name, 0) for name in ("requests_finished", "looks", "blocks_shared"))


def _add(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, first in totals[0].items():
        values = [entry.get(name, type(first)()) for entry in totals]
        if isinstance(first, dict):
            keys = {key for value in values for key in value}
            out[name] = {key: sum(value.get(key, 0) for value in values) for key in sorted(keys)}
        elif name in _WEIGHTS:
            weights = [entry.get(_WEIGHTS[name], 0) for entry in totals]
            whole = sum(weights)
            pairs = zip(values, weights, strict=True)
            out[name] = sum(value * weight for value, weight in pairs) / whole if whole else 0.0
        else:
            out[name] = sum(values)
    return out

# SPDX-License-Identifier: Apache-2.0
"""What servers say of themselves: ``GET /reasoncache`` as one report, and their KV slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from eval.serving import ServerError

#: Ratio -> what it is an average over.
_WEIGHTS = {
    "memory_saving_ratio": "looks",
    "mean_running": "looks",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}


def fetch_report(get: Callable[[str], httpx.Response]) -> dict[str, Any]:
    """The merged report, {} of a server without the plugin.

    Raises:
        ServerError: it cannot be had.
    """
    try:
        response = get("/reasoncache")
        if response.status_code == 404:
            return {}
        response.raise_for_status()
        return merge(response.json()["schedulers"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"/reasoncache says {error!r}") from error


def fetch_kv_slots(get: Callable[[str], httpx.Response]) -> int | None:
    """KV slots of a scheduler as ``/server_info`` tells, None of a server that does not."""
    # A server that somebody else runs need not be SGLang.
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        return int(get("/server_info").json()["max_total_num_tokens"])
    return None


def merge(schedulers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One report of all data-parallel schedulers: totals added up, ratios averaged by weight.

    Settings are the first scheduler's, which all share. {} where nothing shares.
    """
    reports = [dict(report) for report in schedulers if report]
    if len(reports) < 2:
        return reports[0] if reports else {}
    merged = reports[0]
    merged["totals"] = _add([report.get("totals", {}) for report in reports])
    for name in ("slots_saved_now", "positions_dropped_now"):
        merged[name] = sum(report.get(name, 0) for report in reports)
    merged["recent"] = [row for report in reports for row in report.get("recent", [])]
    return merged


def has_restarted(report: Mapping[str, Any]) -> bool:
    """Whether the totals count from zero, as they must right after a flush."""
    totals = report.get("totals", {})
    return not any(totals.get(name, 0) for name in ("requests_finished", "looks", "blocks_shared"))


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What a server has counted between two reports; {} if it began anew in between."""
    if not now or not before:
        return dict(now) if not before else {}
    old, new = before.get("totals", {}), now.get("totals", {})
    totals = _subtract(old, new)
    counts = [totals.get(name, 0) for name in {*_WEIGHTS.values()}]
    if any(count < 0 for count in counts):
        return {}
    seen = {row.get("rid") for row in before.get("recent", [])}
    recent = [row for row in now.get("recent", []) if row.get("rid") not in seen]
    return {**now, "totals": totals, "recent": recent}


def _subtract(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in new.items():
        if isinstance(value, dict):
            earlier = old.get(name, {})
            out[name] = {key: count - earlier.get(key, 0) for key, count in value.items()}
        elif name in _WEIGHTS:
            weight, earlier = new.get(_WEIGHTS[name], 0), old.get(_WEIGHTS[name], 0)
            difference = value * weight - old.get(name, 0.0) * earlier
            out[name] = difference / (weight - earlier) if weight > earlier else 0.0
        elif isinstance(value, (int, float)):
            out[name] = value - old.get(name, 0)
    return out


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

# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of means over problems, some of which are asked several times.

Answers to one problem under several seeds resemble each other, so a problem is a
cluster. Zeros and ones get Wilson's interval at the effective sample size, the number of
answers over the design effect (variance of the mean by clusters over that without): with
one seed it is Wilson's own interval, and at 0 or 1, where a normal or bootstrap interval
has no width at all, it still has. Other values (F1, lengths) get the normal
cluster-robust interval with Student's t. Differences and ratios of two arms combine the
arms' limits with their correlation (MOVER; for zeros and ones that is Newcombe's
square-and-add interval, for other values the paired t interval and Fieller's).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

CONFIDENCE = 0.95
_Z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% confidence interval; an end is None where data give none."""

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of a few repetitions."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of the values that are there; None if none is."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(float(np.median(known)), min(known), max(known), len(known))


@dataclass(frozen=True)
class Paired:
    """Two arms on the same keys: difference ``x - y`` and ratio ``x / y`` of their means.

    ``ratio`` is None if the mean of y is 0.
    """

    difference: Estimate
    ratio: Estimate | None


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's score interval of a share of n answers; n may be an effective number."""
    square = _Z * _Z
    middle = share + square / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    scale = 1 + square / n
    # Exact at the ends, where rounding would leave a wrong sign.
    low = 0.0 if share == 0 else (middle - half) / scale
    high = 1.0 if share == 1 else (middle + half) / scale
    return low, high


def mean(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate | None:
    """Mean with interval; ``clusters[i]`` is the problem of ``values[i]``."""
    if not len(values):
        return None
    x = np.asarray(values, float)
    value = float(x.mean())
    if _binary(x):
        low, high = wilson(value, len(x) / _design_effect(x, clusters))
        return Estimate(value, low, high, len(x))
    half = _half_width(x, clusters)
    return Estimate(value, None, None, len(x)) if half is None else _around(value, half, len(x))


def paired(x: Sequence[float], y: Sequence[float], clusters: Sequence[Hashable]) -> Paired | None:
    """Difference and ratio of the means of paired values, with intervals."""
    if not len(x):
        return None
    a, b = np.asarray(x, float), np.asarray(y, float)
    means = float(a.mean()), float(b.mean())
    n = len(a)
    if _binary(a) and _binary(b):
        effective = n / _design_effect(a - b, clusters)
        limits = wilson(means[0], effective), wilson(means[1], effective)
        correlation = _phi(a, b, effective / n)
    else:
        halves = _half_width(a, clusters), _half_width(b, clusters)
        if halves[0] is None or halves[1] is None:
            difference = Estimate(means[0] - means[1], None, None, n)
            ratio = Estimate(means[0] / means[1], None, None, n) if means[1] else None
            return Paired(difference, ratio)
        limits = (
            (means[0] - halves[0], means[0] + halves[0]),
            (means[1] - halves[1], means[1] + halves[1]),
        )
        correlation = _correlation(a, b, clusters)
    return Paired(
        _difference(means, limits, correlation, n),
        _ratio(means, limits, correlation, n),
    )


_Two = tuple[float, float]


def _difference(means: _Two, limits: tuple[_Two, _Two], correlation: float, n: int) -> Estimate:
    (l1, u1), (l2, u2) = limits
    value = means[0] - means[1]
    down = _combine(means[0] - l1, u2 - means[1], correlation)
    up = _combine(u1 - means[0], means[1] - l2, correlation)
    return Estimate(value, value - down, value + up, n)


def _ratio(means: _Two, limits: tuple[_Two, _Two], correlation: float, n: int) -> Estimate | None:
    """The R for which 0 is inside the interval of ``x - R y``."""
    if not means[1]:
        return None
    (l1, u1), (l2, u2) = limits
    product = means[0] * means[1]
    b = product - correlation * (means[0] - l1) * (u2 - means[1])
    a, c = u2 * (2 * means[1] - u2), l1 * (2 * means[0] - l1)
    below = b + math.sqrt(max(0.0, b * b - a * c))
    low = max(0.0, c / below) if below > 0 else 0.0
    high = None
    if l2 > 0:
        b = product - correlation * (u1 - means[0]) * (means[1] - l2)
        a, c = l2 * (2 * means[1] - l2), u1 * (2 * means[0] - u1)
        high = (b + math.sqrt(max(0.0, b * b - a * c))) / a
    return Estimate(means[0] / means[1], low, high, n)


def _combine(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))


def _binary(x: Array) -> bool:
    return bool(np.isin(x, (0.0, 1.0)).all())


def _cluster_sums(x: Array, clusters: Sequence[Hashable]) -> Array:
    """Sums of deviations from the mean, one a cluster."""
    number: dict[Hashable, int] = {}
    index = [number.setdefault(cluster, len(number)) for cluster in clusters]
    return np.bincount(index, x - x.mean(), len(number)).astype(np.float64)


def _design_effect(x: Array, clusters: Sequence[Hashable]) -> float:
    """At least 1 and at most the largest cluster; equal values tell nothing, so the mean size."""
    sizes = np.array(list(collections.Counter(clusters).values()))
    groups = len(sizes)
    plain = float(((x - x.mean()) ** 2).sum())
    if plain <= 1e-12 * len(x) or groups < 2:
        return len(x) / groups
    clustered = float((_cluster_sums(x, clusters) ** 2).sum()) * groups / (groups - 1)
    return float(np.clip(clustered / (plain * len(x) / (len(x) - 1)), 1.0, sizes.max()))


def _half_width(x: Array, clusters: Sequence[Hashable]) -> float | None:
    sums = _cluster_sums(x, clusters)
    groups = len(sums)
    if groups < 2:
        return None
    error = math.sqrt(groups / (groups - 1) * float((sums**2).sum())) / len(x)
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, groups - 1)) * error


def _correlation(a: Array, b: Array, clusters: Sequence[Hashable]) -> float:
    u, v = _cluster_sums(a, clusters), _cluster_sums(b, clusters)
    scale = math.sqrt(float((u**2).sum() * (v**2).sum()))
    return float((u * v).sum()) / scale if scale else 0.0


def _phi(a: Array, b: Array, weight: float) -> float:
    """Newcombe's correlation of paired zeros and ones, with his correction towards 0."""
    both, neither = weight * float((a * b).sum()), weight * float(((1 - a) * (1 - b)).sum())
    only_a, only_b = weight * float((a * (1 - b)).sum()), weight * float(((1 - a) * b).sum())
    scale = math.sqrt((both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither))
    if not scale:
        return 0.0
    product = both * neither - only_a * only_b
    if product > 0:
        product = max(0.0, product - weight * len(a) / 2)
    return product / scale


def _around(value: float, half: float, n: int) -> Estimate:
    return Estimate(value, value - half, value + half, n)

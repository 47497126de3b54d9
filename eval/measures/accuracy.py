# SPDX-License-Identifier: Apache-2.0
"""Measures how many answers are right, and compares a method with dense (stock SGLang) on the same problems.

Answers to one problem form a cluster. Shares get Wilson intervals at the effective number of answers; means of
other values (F1, lengths) get Student's t intervals over problems. Differences of shares get Newcombe's
square-and-add (MOVER) intervals, other differences paired t intervals. Ratios treat dense's mean as exact."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from eval.runs.folder import Result

#: Problem and seed.
Key = tuple[str, int]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% confidence interval; an end is None if there are too few data."""

    value: float
    low: float | None
    high: float | None
    n: int

    def scaled(self, factor: float, shift: float = 0.0) -> "Estimate":
        """The estimate of ``factor * x + shift``, where ``self`` estimates x; ``factor`` must be positive."""
        low, high = (None if e is None else factor * e + shift for e in (self.low, self.high))
        return Estimate(factor * self.value + shift, low, high, self.n)


@dataclass(frozen=True)
class Comparison:
    """Compares a method with dense on the problems and seeds for which both have results."""

    pairs: int
    difference: Estimate  # the method's mean minus dense's mean
    kept: Estimate | None  # the method's mean / dense's mean; None if dense's mean is 0
    only_dense: int  # pairs that only dense has right, McNemar's b
    only_method: int  # pairs that only the method has right, McNemar's c
    p_value: float  # of McNemar's exact two-sided test, which assumes independent pairs


def keyed(results: Mapping[int, Sequence[Result]]) -> dict[Key, Result]:
    """Returns the results of all seeds by problem and seed."""
    return {(row.problem_id, seed): row for seed, rows in results.items() for row in rows}


def accuracy(results: Mapping[Key, Result]) -> Estimate | None:
    """The mean score; None if there are no results."""
    return mean({key: row.score for key, row in results.items()})


def mean(values: Mapping[Key, float]) -> Estimate | None:
    """The mean of ``values``, with its interval; None if there are no values."""
    if not values:
        return None
    series = _series(values)
    value = float(series.mean())
    if series.isin((0.0, 1.0)).all():
        return Estimate(value, *_wilson(value, _effective(series)), len(series))
    return _student(value, series)


def compare(method: Mapping[Key, Result], dense: Mapping[Key, Result]) -> Comparison | None:
    """Compare a method with dense; None if no problem was graded for both with the same seed."""
    keys = [key for key in dense if key in method]
    scores = [{key: side[key].score for key in keys} for side in (method, dense)]
    difference = differ(*scores)
    if difference is None:
        return None
    b = sum(dense[key].correct and not method[key].correct for key in keys)
    c = sum(method[key].correct and not dense[key].correct for key in keys)
    p_value = float(mcnemar([[0, b], [c, 0]], exact=True).pvalue) if b + c else 1.0
    base = float(np.mean(list(scores[1].values())))
    kept = difference.scaled(1 / base, 1.0) if base else None
    return Comparison(len(keys), difference, kept, b, c, p_value)


def differ(values: Mapping[Key, float], base: Mapping[Key, float]) -> Estimate | None:
    """The mean of ``values`` minus the mean of ``base``, with the same keys; None if there are no keys."""
    if not values:
        return None
    x = _series(values)
    y = _series(base)
    value = float(x.mean() - y.mean())
    n = len(x)
    if x.isin((0.0, 1.0)).all() and y.isin((0.0, 1.0)).all():
        effective = _effective(x - y)
        (l1, u1), (l2, u2) = (_wilson(float(side.mean()), effective) for side in (x, y))
        r = _phi(x, y, effective / n)
        down = _combine(float(x.mean()) - l1, u2 - float(y.mean()), r)
        up = _combine(u1 - float(x.mean()), float(y.mean()) - l2, r)
        return Estimate(value, max(value - down, -1.0), min(value + up, 1.0), n)
    return _student(value, x - y)


def _student(value: float, series: pd.Series) -> Estimate:
    problems = series.groupby(level=0).mean()
    if len(problems) < 2:
        return Estimate(value, None, None, len(series))
    low, high = stats.ttest_1samp(problems, 0).confidence_interval()
    return Estimate(value, float(low), float(high), len(series))


def _series(values: Mapping[Key, float]) -> pd.Series:
    return pd.Series(list(values.values()), index=[name for name, _ in values], dtype=float)


def _effective(series: pd.Series) -> float:
    """The number of independent answers whose mean varies like that of ``series``; at least one per problem."""
    problems = series.groupby(level=0).mean()
    error = float(problems.var()) / len(problems) if len(problems) > 1 else 0.0
    effective = float(series.var(ddof=0)) / error if error else 0.0
    return float(np.clip(effective, len(problems), len(series)))


def _wilson(share: float, n: float) -> tuple[float, float]:
    low, high = proportion_confint(share * n, n, method="wilson")
    return float(low), float(high)


def _phi(x: pd.Series, y: pd.Series, weight: float) -> float:
    """Newcombe's correlation of paired zeros and ones, reduced if > 0. A pair counts as ``weight`` pairs."""
    both = weight * (x * y).sum()
    neither = weight * ((1 - x) * (1 - y)).sum()
    only_x = weight * (x * (1 - y)).sum()
    only_y = weight * (y * (1 - x)).sum()
    scale = (both + only_x) * (only_y + neither) * (both + only_y) * (only_x + neither)
    product = both * neither - only_x * only_y
    if product > 0:
        product = max(0.0, product - weight * len(x) / 2)
    return float(product / math.sqrt(scale)) if scale else 0.0


def _combine(x: float, y: float, correlation: float) -> float:
    return math.sqrt(max(0.0, x * x + y * y - 2 * correlation * x * y))

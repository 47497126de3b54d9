# SPDX-License-Identifier: Apache-2.0
"""How many answers are right, and how that differs from dense on the same problems.

A problem is one observation, however many seeds it was asked under: its mean over seeds. Shares
of right answers get Wilson's interval, which has a width even at 0 and 1; other values (F1,
lengths) the interval of Student's t. The difference of two shares combines their Wilson limits
with the correlation of the pairs (MOVER, Newcombe's square-and-add), that of other values is the
paired t interval. Ratios take dense's mean as known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.proportion import proportion_confint

from eval.runs.records import Result

#: Problem and seed.
Key = tuple[str, int]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% confidence interval; an end is None where data give none."""

    value: float
    low: float | None
    high: float | None
    n: int

    def scaled(self, factor: float, shift: float = 0.0) -> Estimate:
        """``factor * x + shift`` of a positive factor."""
        ends = (None if end is None else factor * end + shift for end in (self.low, self.high))
        return Estimate(factor * self.value + shift, *ends, self.n)


@dataclass(frozen=True)
class Comparison:
    """A method against dense, over the problems and seeds that both have.

    Attributes:
        pairs: how many.
        difference: of means, method less dense.
        kept: mean of the method over dense's, None if dense's is 0.
        only_dense: pairs that dense alone has right (McNemar's b).
        only_method: pairs that the method alone has right (McNemar's c).
        p_value: exact McNemar test, two-sided; it takes pairs as independent.
    """

    pairs: int
    difference: Estimate
    kept: Estimate | None
    only_dense: int
    only_method: int
    p_value: float


def keyed(results: Mapping[int, Sequence[Result]]) -> dict[Key, Result]:
    """Results of all seeds by problem and seed."""
    return {(row.problem_id, seed): row for seed, rows in results.items() for row in rows}


def accuracy(results: Mapping[Key, Result]) -> Estimate | None:
    """Mean score; None without results."""
    return mean({key: row.score for key, row in results.items()})


def mean(values: Mapping[Key, float]) -> Estimate | None:
    """Mean of some values by problem and seed, with its interval; None without any."""
    if not values:
        return None
    problems = _by_problem(values)
    value, n = float(np.mean(list(values.values()))), len(problems)
    if _shares(values.values()):
        return Estimate(value, *_wilson(value, n), len(values))
    if n < 2:
        return Estimate(value, None, None, len(values))
    low, high = stats.ttest_1samp(problems, 0).confidence_interval()
    return Estimate(value, float(low), float(high), len(values))


def compare(method: Mapping[Key, Result], dense: Mapping[Key, Result]) -> Comparison | None:
    """None if no problem has been graded for both."""
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


def differ(one: Mapping[Key, float], other: Mapping[Key, float]) -> Estimate | None:
    """Difference of the means of two sides with the same keys; None without any."""
    if not one:
        return None
    x, y = _by_problem(one), _by_problem(other)
    value, n = float(np.mean(list(one.values())) - np.mean(list(other.values()))), len(x)
    if _shares(one.values()) and _shares(other.values()):
        means = float(np.mean(list(one.values()))), float(np.mean(list(other.values())))
        (l1, u1), (l2, u2) = (_wilson(share, n) for share in means)
        # Constant sides have none; identical ones are wholly correlated.
        varied = x.std() > 0 and y.std() > 0
        r = float(np.corrcoef(x, y)[0, 1]) if varied else 0.0
        down = _combine(means[0] - l1, u2 - means[1], r)
        up = _combine(u1 - means[0], means[1] - l2, r)
        return Estimate(value, value - down, value + up, len(one))
    if n < 2:
        return Estimate(value, None, None, len(one))
    low, high = stats.ttest_rel(x, y).confidence_interval()
    return Estimate(value, float(low), float(high), len(one))


def _by_problem(values: Mapping[Key, float]) -> pd.Series:
    series = pd.Series(list(values.values()), index=[problem for problem, _ in values], dtype=float)
    return series.groupby(level=0, sort=False).mean()


def _shares(values: Iterable[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _wilson(share: float, n: int) -> tuple[float, float]:
    low, high = proportion_confint(share * n, n, method="wilson")
    return float(low), float(high)


def _combine(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))

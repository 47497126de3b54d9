# SPDX-License-Identifier: Apache-2.0
"""How many answers are right, and how that differs from dense on the same problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from eval.measures.interval import Estimate, mean, paired
from eval.runs.records import Result

#: Problem and seed. Tasks that generate problems give one id to another problem under
#: another seed; then clusters join independent answers, which costs width but no validity.
Key = tuple[str, int]


@dataclass(frozen=True)
class Comparison:
    """A method against dense, over the problems and seeds that both have grades for.

    Attributes:
        pairs: how many.
        difference: of mean scores, method less dense.
        kept: mean score of the method over dense's, None if dense scores 0.
        only_dense: pairs that dense alone has right (McNemar's b).
        only_method: pairs that the method alone has right (McNemar's c).
        p_value: exact McNemar test, two-sided.
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
    """Mean score, problems as clusters; None without results."""
    return mean([row.score for row in results.values()], [problem for problem, _ in results])


def by_group(results: Mapping[Key, Result]) -> dict[str, Estimate]:
    """Mean score of each class of problems; classes without a name are left out."""
    found = {}
    for group in sorted({row.group for row in results.values() if row.group}):
        chosen = {key: row for key, row in results.items() if row.group == group}
        estimate = accuracy(chosen)
        assert estimate is not None
        found[group] = estimate
    return found


def compare(method: Mapping[Key, Result], dense: Mapping[Key, Result]) -> Comparison | None:
    """None if no problem has been graded for both.

    McNemar's test takes the pairs as independent. Where seeds hardly change the
    answers, its p-value is too small; the intervals know about that.
    """
    keys = [key for key in dense if key in method]
    both = paired(
        [method[key].score for key in keys],
        [dense[key].score for key in keys],
        [problem for problem, _ in keys],
    )
    if both is None:
        return None
    b = sum(dense[key].correct and not method[key].correct for key in keys)
    c = sum(method[key].correct and not dense[key].correct for key in keys)
    p_value = float(stats.binomtest(min(b, c), b + c).pvalue) if b + c else 1.0
    return Comparison(len(keys), both.difference, both.ratio, b, c, p_value)

# SPDX-License-Identifier: Apache-2.0
"""Lengths of responses, and whether a method buys its speed with longer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.measures.accuracy import Key
from eval.measures.interval import Estimate, mean, paired
from eval.runs.records import Response, Result


@dataclass(frozen=True)
class Lengths:
    """Output tokens of complete responses.

    Attributes:
        mean: with interval, problems as clusters.
        quartiles: 5th, 25th, 50th, 75th and 95th percentile.
    """

    mean: Estimate
    quartiles: tuple[float, float, float, float, float]


@dataclass(frozen=True)
class LengthComparison:
    """Output tokens of a method over dense's, on the same problems and seeds.

    Attributes:
        pairs: how many.
        difference: of mean lengths, in tokens.
        ratio: of mean lengths.
        longer: whether the whole interval of the ratio is above 1.
    """

    pairs: int
    difference: Estimate
    ratio: Estimate | None
    longer: bool


def keyed(responses: Mapping[int, Sequence[Response]]) -> dict[Key, Response]:
    """Complete responses of all seeds by problem and seed; the last one of repeats."""
    return {
        (row.problem_id, seed): row
        for seed, rows in responses.items()
        for row in rows
        if row.error is None
    }


def lengths(responses: Mapping[Key, Response]) -> Lengths | None:
    """None without complete responses."""
    tokens = [row.output_tokens for row in responses.values()]
    estimate = mean(tokens, [problem for problem, _ in responses])
    if estimate is None:
        return None
    p5, p25, p50, p75, p95 = (float(q) for q in np.percentile(tokens, (5, 25, 50, 75, 95)))
    return Lengths(estimate, (p5, p25, p50, p75, p95))


def cut(responses: Mapping[Key, Response], replayed: Mapping[Key, Result] | None = None) -> int:
    """Responses that ended by length.

    Args:
        responses: complete ones.
        replayed: grades of a replay, each response of which ends so: those that reproduce
            the record are not cut.
    """
    whole = {key for key, row in (replayed or {}).items() if row.correct}
    return sum(row.finish_reason == "length" and key not in whole for key, row in responses.items())


def compare(
    method: Mapping[Key, Response], dense: Mapping[Key, Response]
) -> LengthComparison | None:
    """None if no problem has a response of both."""
    keys = [key for key in dense if key in method]
    both = paired(
        [method[key].output_tokens for key in keys],
        [dense[key].output_tokens for key in keys],
        [problem for problem, _ in keys],
    )
    if both is None:
        return None
    low = both.ratio.low if both.ratio else None
    # Equal lengths leave an interval of 1 to 1, give or take a rounding.
    longer = low is not None and low > 1 + 1e-9
    return LengthComparison(len(keys), both.difference, both.ratio, longer)


def correct_only(
    responses: Mapping[Key, Response], *graded: Mapping[Key, Result]
) -> dict[Key, Response]:
    """The responses to problems that are right in every one of ``graded``."""
    return {
        key: row
        for key, row in responses.items()
        if all(key in results and results[key].correct for results in graded)
    }

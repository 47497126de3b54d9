# SPDX-License-Identifier: Apache-2.0
"""Median and quartiles of alternating rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quartiles:
    """Within the values seen, however few."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        several = [*values] * 2 if len(values) == 1 else values
        low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(middle, low, high)

    def text(self, digits: int) -> str:
        """``median (low to high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"

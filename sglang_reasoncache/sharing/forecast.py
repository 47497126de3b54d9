# SPDX-License-Identifier: Apache-2.0
"""Forecasts which fraction of output positions will need no slot. Admission reserves slots only for the
rest."""

#: The forecast ignores running requests while they have fewer output tokens than this number in total.
_LEAST_RUNNING = 512


class SharingForecast:
    """Forecasts which fraction of output positions will need no slot.

    The forecast is the higher of two fractions. The first is measured on finished requests; the weight of each
    fades exponentially over ``horizon`` later output tokens. The second is measured on running requests, to
    include long responses before they finish. ``limit``: the highest possible forecast, in [0, 1).
    """

    def __init__(self, limit: float, horizon: float = 20_000.0) -> None:
        self._limit, self._horizon = limit, horizon
        self._shared = self._tokens = self._running = 0.0

    def observe(self, shared: float, tokens: int) -> None:
        """Count a finished request: ``shared`` of its ``tokens`` output positions needed no slot, or would have
        needed none if its blocks had shared."""
        if tokens <= 0:
            return
        fade = max(0.0, 1.0 - tokens / self._horizon)
        self._shared = self._shared * fade + shared
        self._tokens = self._tokens * fade + tokens

    def poll(self, shared: float, tokens: int) -> None:
        """Set the fraction among running requests: ``shared`` of their ``tokens`` output positions need no
        slot, or would need none if their blocks shared."""
        self._running = shared / tokens if tokens >= _LEAST_RUNNING else 0.0

    @property
    def credit(self) -> float:
        """The fraction of future output for which admission need not reserve slots, in [0, ``limit``]."""
        finished = self._shared / self._tokens if self._tokens else 0.0
        return min(max(finished, self._running), self._limit)

# SPDX-License-Identifier: Apache-2.0
"""Bounds of the options of evicting and selecting policies."""


class OptionError(ValueError):
    """An option of a policy is out of bounds: ``<key> of a policy must be <bound>``."""

    def __init__(self, key: str, bound: str) -> None:
        super().__init__(f"{key} {bound}")
        self.key, self.bound = key, bound


def between(key: str, value: float, low: float, high: float) -> None:
    """Raises OptionError for a value out of bounds, or not a number."""
    if not low <= value <= high:
        raise OptionError(key, f"between {low} and {high}")

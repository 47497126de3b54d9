# SPDX-License-Identifier: Apache-2.0
"""Bounds of the options of evicting policies."""

import dataclasses
from typing import Any


class OptionError(ValueError):
    """An option of a policy is out of bounds: ``<key> of a policy must be <bound>``."""

    def __init__(self, key: str, bound: str) -> None:
        super().__init__(f"{key} {bound}")
        self.key, self.bound = key, bound


def bounded(default: float | None, low: float, high: float) -> Any:
    """A field of a policy whose value, if there is one, must lie in ``[low, high]``."""
    return dataclasses.field(default=default, metadata={"bounds": (low, high)})


def check(policy: Any) -> None:
    """Raises OptionError for a value that is out of bounds or NaN."""
    for option in dataclasses.fields(policy):
        value, bounds = getattr(policy, option.name), option.metadata.get("bounds")
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:
            raise OptionError(option.name, "between {} and {}".format(*bounds))

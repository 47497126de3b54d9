# SPDX-License-Identifier: Apache-2.0
"""The options of the policy that selects pages."""

from dataclasses import dataclass

from sglang_reasoncache.eviction.policies.evictor import bounded, check_bounds


@dataclass(frozen=True)
class Quest:
    """Quest (Tang et al., arXiv 2406.10774) reads the pages whose keys may fit the query best.

    Attributes:
        budget: How many positions of a row a layer reads, in whole pages, the newest page included. Shorter
            rows are read whole.
        whole_layers: How many layers, from the first on, read everything (section 4.1 of the paper: 2).

    Raises OptionError for an option whose value is not allowed.
    """

    budget: int = bounded(1024, 1, 10_000_000)
    whole_layers: int = bounded(2, 0, 1000)

    def __post_init__(self) -> None:
        check_bounds(self)

# SPDX-License-Identifier: Apache-2.0
"""The policy that selects pages."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_reasoncache.policy_options import bounded, check


@dataclass(frozen=True)
class Quest:
    """Quest (Tang et al., 2024, arXiv 2406.10774): reads the pages whose keys may fit the query best.

    Attributes:
        budget: Positions that a row reads in a layer, its newest page included. Shorter rows are read
            whole.
        whole_layers: How many layers, from the first one on, read everything; the paper has two.
    """

    name: ClassVar[str] = "quest"
    budget: int = bounded(1024, 1, 10_000_000)
    whole_layers: int = bounded(2, 0, 1000)

    def __post_init__(self) -> None:
        check(self)

# SPDX-License-Identifier: Apache-2.0
"""The policy that selects pages."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_reasoncache.policy_options import between


@dataclass(frozen=True)
class Quest:
    """Quest (Tang et al., 2024, arXiv 2406.10774): reads the pages whose keys may fit the query best.

    Attributes:
        budget: Positions that a row reads in a layer, its newest page included. Shorter rows are read
            whole.
        whole_layers: How many layers, from the first one on, read everything; the paper has two.
    """

    name: ClassVar[str] = "quest"
    budget: int = 1024
    whole_layers: int = 2

    def __post_init__(self) -> None:
        between("budget", self.budget, 1, 10_000_000)
        between("whole_layers", self.whole_layers, 0, 1000)

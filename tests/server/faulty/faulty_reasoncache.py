# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of a test: the last tensor-parallel rank runs out of memory once, under load."""

from collections.abc import Sequence
from typing import Any

#: Batches of block pairs that are measured before.
BATCHES = 5


def register() -> None:
    import torch

    from sglang_reasoncache.sharing.measure import BlockMeter

    measure, seen = BlockMeter.measure, []

    def measured(meter: Any, blocks: Sequence[Any]) -> Any:
        seen.append(len(blocks))
        last = torch.distributed.get_world_size() - 1
        if len(seen) == BATCHES and torch.distributed.get_rank() == last:
            raise torch.OutOfMemoryError("made up by a test")
        return measure(meter, blocks)

    BlockMeter.measure = measured  # type: ignore[assignment,method-assign]

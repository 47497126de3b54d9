# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of a test: the last tensor-parallel rank runs out of memory once, under load,
after a request whose id begins with :data:`ARMS`."""

from collections.abc import Sequence
from typing import Any

ARMS = "arm"


def register() -> None:
    import torch

    from sglang_reasoncache.sharing.measure import BlockMeter
    from sglang_reasoncache.sharing.tracker import RequestTracker

    measure, follow, armed = BlockMeter.measure, RequestTracker.follow, []

    def followed(tracker: Any, req: Any) -> Any:
        if req.rid.startswith(ARMS):
            armed.append(req.rid)
        return follow(tracker, req)

    def measured(meter: Any, blocks: Sequence[Any]) -> Any:
        last = torch.distributed.get_world_size() - 1
        if armed and torch.distributed.get_rank() == last:
            armed.clear()
            raise torch.OutOfMemoryError("made up by a test")
        return measure(meter, blocks)

    BlockMeter.measure = measured  # type: ignore[assignment,method-assign]
    RequestTracker.follow = followed  # type: ignore[method-assign]

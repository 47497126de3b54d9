# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin for a test. A request with the id :data:`ARMS` switches it on. After :data:`BATCHES` or more
batches of block pairs, measuring a batch raises an OutOfMemoryError on the last rank. After that, the next
call of each *vital* function (one that SGLang cannot go on without) raises this error on that rank, too."""

from collections.abc import Sequence
from typing import Any

ARMS = "arm"
#: The least number of batches that are measured before the failure.
BATCHES = 10
#: SAID begins the log line of each vital call that fails. VITAL is the number of vital functions.
SAID = "faulty_reasoncache:"
VITAL = 5


def register() -> None:
    import torch

    from sglang_reasoncache.attention import paged
    from sglang_reasoncache.cache.allocator import SharedTokenAllocator
    from sglang_reasoncache.cache.tree import SharedRadixCache
    from sglang_reasoncache.sharing.meter import BlockMeter
    from sglang_reasoncache.sharing.records import Records

    measure = BlockMeter.measure
    born = Records.born
    left: list[int] = []
    prepare = SharedTokenAllocator.prepare
    allocators = list[Any]()
    names = "plan_rows", "decode_attention", "extend_attention"
    vital: list[tuple[Any, str]] = [(paged, name) for name in names]
    vital += [(SharedTokenAllocator, "prepare_known"), (SharedRadixCache, "_publishable")]
    due = set[str]()

    def failing(name: str, work: Any) -> Any:
        def failed(*arguments: Any, **named: Any) -> Any:
            if name in due:
                due.remove(name)
                print(SAID, name, flush=True)
                raise torch.OutOfMemoryError(f"{name}, made up by a test")
            return work(*arguments, **named)

        return failed

    for owner, name in vital:
        setattr(owner, name, failing(name, getattr(owner, name)))

    def seen(records: Records, req: Any) -> Any:
        if req.rid == ARMS:
            left[:] = range(BATCHES + 1)
        return born(records, req)

    def prepared(allocator: Any, *arguments: Any, **named: Any) -> Any:
        allocators[:] = [allocator]
        return prepare(allocator, *arguments, **named)

    def measured(meter: Any, blocks: Sequence[Any]) -> Any:
        last = torch.distributed.get_world_size() - 1
        if len(left) > 1:
            left.pop()
        elif (
            left and torch.distributed.get_rank() == last and any(a.references for a in allocators)
        ):
            # Some slots are shared now, so freeing slots calls the vital ``prepare_known``.
            left.clear()
            due.update(name for _, name in vital)
            raise torch.OutOfMemoryError("made up by a test")
        return measure(meter, blocks)

    SharedTokenAllocator.prepare = prepared  # type: ignore[assignment,method-assign]
    BlockMeter.measure = measured  # type: ignore[assignment,method-assign]
    Records.born = seen  # type: ignore[assignment,method-assign]

# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``PrefillAdder`` over a ``World``: one prefill pass of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder

from tests.property.world import World


class RunningBatch(ScheduleBatch):
    """SGLang's batch of running requests, without the tensors of a forward."""

    reqs: list[Req]

    def filter_batch(self, reqs_to_exclude: Any = None, keep_indices: Any = None) -> None:
        kept: list[Req] = [self.reqs[at] for at in keep_indices]
        self.reqs = kept


def adder_of(
    world: World,
    running: Sequence[Req],
    chunk: int,
    ratio: float = 0.1,
    mixed: bool = False,
) -> PrefillAdder:
    """What SGLang makes for a prefill pass. ``chunk``: tokens of the pass (``--chunked-prefill-size``).
    ``ratio``: the part of their ``max_new_tokens`` that running requests are expected to need. ``mixed``:
    whether the running requests decode in the same batch (``--enable-mixed-chunk``)."""
    batch = RunningBatch(
        reqs=list(running),
        req_to_token_pool=world.rows,
        token_to_kv_pool_allocator=world.allocator,
        tree_cache=world.tree,
    )
    return PrefillAdder(
        page_size=world.page,
        tree_cache=world.tree,
        token_to_kv_pool_allocator=world.allocator,
        running_batch=batch,
        new_token_ratio=ratio,
        rem_input_tokens=1 << 14,
        rem_chunk_tokens=chunk,
        num_mixed_decode_tokens=len(running) if mixed else 0,
    )

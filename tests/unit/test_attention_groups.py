# SPDX-License-Identifier: Apache-2.0
"""DP attention groups vote through SGLang on which decode graph to run, and whether to run a prefill graph."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_reasoncache.attention.paged_cuda import PLAIN, SHIFTED, GraphVote, SharedSlotReads
from sglang_reasoncache.attention.slots import StockSlots
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.plugin import attention, graph_votes
from tests.two_ranks import on_two_ranks
from tests.unit.attention_rig import requests_of

#: A group's next step: None (no batch), or a mode and whether keys are rotated to other positions (*shifted*).
IDLE = None
EXTEND = ForwardMode.EXTEND
DECODE = (ForwardMode.DECODE, False)
SHIFTED_DECODE = (ForwardMode.DECODE, True)
CASES: list[tuple[tuple[Any, Any], GraphVote]] = [
    ((DECODE, DECODE), GraphVote.PLAIN),
    ((DECODE, SHIFTED_DECODE), GraphVote.SHIFTED),
    ((SHIFTED_DECODE, IDLE), GraphVote.SHIFTED),
    ((IDLE, DECODE), GraphVote.PLAIN),
    ((SHIFTED_DECODE, (EXTEND, False)), GraphVote.EAGER),
]


def batch_of(kind: Any) -> Any:
    if kind is None:
        return None
    mode, shifted = kind
    return requests_of(shifted, [0], forward_mode=mode)


def backend_of() -> Any:
    backend: Any = SharedSlotReads.__new__(SharedSlotReads)
    backend.paged = SimpleNamespace(
        reads_shared=True, queries=None, selection=None, slots=StockSlots()
    )
    return backend


def _rank(rank: int, group: Any) -> list[Any]:
    backend = backend_of()
    found = []
    graph_votes.install(backend)
    ranks = SimpleNamespace(active_ranks_cpu=torch.ones(2, dtype=torch.int32))
    with (
        get_context().override_server_args(device="cpu", attention_backend="torch_native"),
        get_parallel().override(tp_group=ranks),
    ):
        for kinds, _ in CASES:
            batch = batch_of(kinds[rank])
            vote = dp_attn._local_decode_cuda_graph_vote(
                local_batch=batch, disable_cuda_graph=False
            )
            told: Any = dict.fromkeys(dp_attn.MLPSyncBatchInfo.__annotations__, 0)
            told |= dict(num_dp_ranks=2, tp_size=1, cp_size=1, can_run_decode_cuda_graph=vote)
            info = dp_attn.MLPSyncBatchInfo(**told)
            info.all_gather(device="cpu", group=group)
            ran = SimpleNamespace()
            dp_attn._update_gather_batch(ran, info, True)
            forward = SimpleNamespace(rids=["r"], forward_mode=ForwardMode.DECODE, **vars(ran))
            found.append((forward.can_run_decode_cuda_graph, backend.choose_graph(forward)))
    return found


def test_all_groups_run_the_same_decode_graph(tmp_path: Path) -> None:
    """Two processes vote through SGLang's own exchange. A group without shifted slots, or without
    a batch, runs the graph that the other group needs."""
    for found in on_two_ranks(_rank, tmp_path, 120):
        for (agreed, variant), (kinds, expected) in zip(found, CASES, strict=True):
            assert agreed is expected, kinds
            assert variant == (SHIFTED if expected is GraphVote.SHIFTED else PLAIN)


def _made(rank: int, group: Any) -> list[tuple[Any, int]]:
    """For nobody's failure and then for rank 1's: the backend or error message, and how often hooks went in."""
    found = []
    for failing in (None, 1):
        installed = list[Any]()

        def ready(*_: Any, failing: int | None = failing) -> Any:
            if rank == failing:
                raise torch.OutOfMemoryError("none left")
            return SimpleNamespace(paged=SimpleNamespace(latent=False))

        with (
            mock.patch.object(attention, "_ready_for_graphs", ready),
            mock.patch.object(graph_votes, "install", installed.append),
            get_context().override_server_args(device="cpu", attention_backend="torch_native"),
            get_parallel().override(
                tp_size=2, attn_tp_size=2, moe_tp_size=2, tp_group=SimpleNamespace(cpu_group=group)
            ),
        ):
            runner: Any = SimpleNamespace()
            try:
                made = attention.make_cuda(
                    runner, "triton", None, ReasonCacheConfig(), requested_by="--x y"
                )
            except ValueError as error:
                made = str(error)
            else:
                made = "ours" if installed == [made] else "another"
        found.append((made, len(installed)))
    return found


def test_all_ranks_get_our_backend_or_none_does(tmp_path: Path) -> None:
    """Ranks with different backends would capture different graphs, and wait for each other for ever."""
    first, second = on_two_ranks(_made, tmp_path, 120)
    assert first[0] == second[0] == ("ours", 1)
    over = "--x y over --attention-backend triton"
    assert first[1] == (
        f"{over} is not possible on another tensor-parallel rank, whose log says why",
        0,
    )
    assert second[1] == (f"{over} failed at the start: OutOfMemoryError: none left", 0)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("cause", ["", "shifted", "evicts", "queries"])
def test_a_group_votes_against_prefill_graphs(mode: ForwardMode, cause: str) -> None:
    """A group also votes if its next batch is a decode step, because SGLang may run that step as a prefill."""
    backend = backend_of()
    batch = batch_of((mode, cause == "shifted"))
    batch.tree_cache.owner.evicts_prompts = cause == "evicts"
    backend.paged.queries = object() if cause == "queries" else None
    vote = graph_votes._after_prefill_vote(backend, True, local_batch=batch)
    assert vote is (False if cause else None)
    assert graph_votes._after_prefill_vote(backend, False, local_batch=batch) is None
    # An idle group has no vote.
    assert graph_votes._after_prefill_vote(backend, True, local_batch=None) is None

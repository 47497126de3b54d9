# SPDX-License-Identifier: Apache-2.0
"""Runs a function on tensor-parallel ranks of one gloo group. The ranks are processes, or two threads."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests import forked


def _run(rank: int, count: int, meet: str, answers: Any, work: Callable[[int, Any], Any]) -> None:
    torch.set_num_threads(1)
    where: dict[str, Any] = dict(init_method=f"file://{meet}", rank=rank, world_size=count)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    answers.put((rank, work(rank, torch.distributed.group.WORLD)))
    torch.distributed.destroy_process_group()


def on_two_ranks(work: Callable[[int, Any], Any], folder: Path, seconds: float) -> list[Any]:
    """:func:`on_ranks` with two ranks."""
    return on_ranks(2, work, folder, seconds)


def on_ranks(
    count: int, work: Callable[[int, Any], Any], folder: Path, seconds: float
) -> list[Any]:
    """Results of the module-level ``work(rank, group)`` in a process for each of ``count`` ranks. Each may take
    up to ``seconds``."""
    forked.start()
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    arguments = count, str(folder / "meet"), answers, work
    processes = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=seconds) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found[rank] for rank in range(count)]


def in_two_threads(work: Callable[[int, Any], Any]) -> list[Any]:
    """Results of ``work(rank, group)`` in two threads, one for each rank."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> Any:
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        return work(rank, group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))

# SPDX-License-Identifier: Apache-2.0
"""Runs a function on two tensor-parallel ranks of one gloo group. The ranks are processes or threads."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests import forked


def _run(rank: int, meet: str, answers: Any, work: Callable[[int, Any], Any]) -> None:
    torch.set_num_threads(1)
    where: dict[str, Any] = dict(init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    answers.put((rank, work(rank, torch.distributed.group.WORLD)))
    torch.distributed.destroy_process_group()


def on_two_ranks(work: Callable[[int, Any], Any], folder: Path, seconds: float) -> list[Any]:
    """Results of the module-level ``work(rank, group)`` in two processes. Each may take up to ``seconds``."""
    forked.start()
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    arguments = str(folder / "meet"), answers, work
    processes = [context.Process(target=_run, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=seconds) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found[0], found[1]]


def in_two_threads(work: Callable[[int, Any], Any]) -> list[Any]:
    """Results of ``work(rank, group)`` in two threads, one for each rank."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> Any:
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        return work(rank, group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))

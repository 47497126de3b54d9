# SPDX-License-Identifier: Apache-2.0
"""``make bench-serve``: throughput, saving and accuracy of some workloads in twenty minutes on two cores.

Stock SGLang and ours take turns, with the same KV budget, backend and flags; the embedded reasoner
also with random sharing that saves as much. ``noise`` tells what sharing costs where there is nothing to
share. Writes ``serve.json``, and a run folder a workload."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval import command
from eval.bench import AIME, sides
from eval.command import option
from eval.jsonl import texts_of
from eval.methods import DENSE
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.runs.folder import write_json, write_whole
from eval.tasks.documents import replay
from eval.tokenizers import load_tokenizer

_STEP = re.compile(r".*?\n\n|.+\Z", re.DOTALL)
_MATH = "math500_sky_t1_27b.jsonl"
#: Responses of the AIME file that are longer go round in circles up to the limit of the model
#: that wrote them; the next shorter one has 14,406 tokens.
LOOPING = 20_000


class Workload(NamedTuple):
    """``limit`` are the problems of one round, ``kv_budget`` the KV slots of each server; ``traces``
    is a file of recorded responses, "" for the embedded reasoner; ``pieces``: replay pieces of so many
    tokens of its looping responses, which are shorter, but repeat themselves nearly as much."""

    methods: tuple[str, ...]
    limit: int
    rounds: int
    kv_budget: int
    traces: str = ""
    pieces: int = 0


_OURS = (DENSE, "newest")
WORKLOADS = {
    "tiny_reasoner": Workload((*_OURS, "random:random_ratio=0.4"), 32, rounds=2, kv_budget=4000),
    # Equal lengths run in waves, 2 at a time where nothing is shared, up to 4 with sharing: 8 fill
    # the last wave of either.
    "aime24_replay": Workload(_OURS, 8, rounds=2, kv_budget=8000, traces=AIME, pieces=3000),
    "math500_replay": Workload(_OURS, 8, rounds=1, kv_budget=4000, traces=_MATH),
    # Short rounds: what else the machine does changes within seconds.
    "noise": Workload(_OURS, 32, rounds=9, kv_budget=16_384),
}


@dataclass(frozen=True)
class Options:
    traces: Path = option(text="folder of recorded responses, JSONL")
    out: Path = option(Path("build/bench"), "folder of results")
    workloads: tuple[str, ...] = option(tuple(WORKLOADS), "tasks", choices=WORKLOADS)


def cut(response: str, tokenizer: Any, tokens: int) -> list[str]:
    """Whole steps of a response in pieces of about ``tokens`` tokens; the remainder is left out. A
    piece ends with the step that reaches so many."""
    pieces: list[str] = []
    begun: list[str] = []
    length = 0
    for step in _STEP.findall(response):
        begun.append(step)
        length += len(tokenizer.encode(step, add_special_tokens=False, verbose=False))
        if length >= tokens:
            pieces.append("".join(begun))
            begun, length = [], 0
    return pieces


def write_pieces(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, tokens: int, path: Path
) -> None:
    """Write the pieces of all rows of :data:`LOOPING` tokens or more as JSONL."""
    lines = [
        {"id": f"{row['id']}.{at}", "question": row["prompt"], "response": piece}
        for row in rows
        if row["max_tokens"] >= LOOPING
        for at, piece in enumerate(cut(row["target"], tokenizer, tokens))
    ]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


def measure(task: str, options: Options, model: str) -> dict[str, Any]:
    """A row for each method but stock; ``model`` replays records."""
    methods, limit, rounds, kv_budget, file, pieces = WORKLOADS[task]
    asked: dict[str, Any] = {"warm_up": 8}
    if file:
        path = options.traces / file
        if pieces:
            rows = list(replay(str(path), model)["test"])
            path = options.out / "serve" / f"{task}-pieces.jsonl"
            write_pieces(rows, load_tokenizer(model), pieces, path)
        # Greedy, though every token is forced: a server that draws is started anew for each seed.
        asked = {"model": model, "data": {task: str(path)}, "temperature": 0.0, "warm_up": 2}
    asked |= {"limit": limit, "kv_budget": kv_budget, "server_flags": sides.SERVER_FLAGS}
    out = sides.fresh(options.out / "serve", task)
    cells = sides.in_turns(task, methods, rounds, out, **asked)
    return {name: sides.row_of(row, cells[DENSE]) for name, row in cells.items()}


def work(options: Options) -> None:
    model, found = "", {}
    if any(WORKLOADS[task].traces for task in options.workloads):
        model = str(build(MODELS, texts_of([options.traces / name for name in (AIME, _MATH)])))
    for task in options.workloads:
        found[task] = measure(task, options, model)
        write_json(options.out / "serve.json", found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    command.run(Options, work)

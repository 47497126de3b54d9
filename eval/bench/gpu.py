# SPDX-License-Identifier: Apache-2.0
"""``make bench-gpu``: recorded responses on stock and sharing servers of one GPU, in turns.

The model has the shape of an 8B Qwen3 (``--device cpu``: its heads, in four narrow layers) and dummy
weights. Each next token is forced, so weights decide nothing but K and V; memory, step times and
scheduling are real. The reference, stock SGLang, stays up beside one other side at a time. Writes
``gpu.json`` after every workload. Needs no lm-eval."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval import command
from eval.bench import AIME, LOOPING, looping_pieces
from eval.bench.turns import as_text
from eval.command import commas, option
from eval.jsonl import texts_of
from eval.measures.figures import speeds_of
from eval.replay.forcing import FORCED, forced_request
from eval.replay.model import build, replay_config
from eval.runs import cells
from eval.runs.client import Request
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import Cell, write_json
from eval.runs.servers import Servers
from eval.tokenizers import load_tokenizer

SHARING = ("--enable-reasoncache",)
#: Flags of a side; ``NAME:BACKEND`` also names its attention, which is SGLang's choice or ours else.
SIDES = {
    "stock": (),
    "ours": SHARING,
    "as-cached": (*SHARING, "--reasoncache-when", "always", "--reasoncache-positions", "as-cached"),
    "nothing-shared": (*SHARING, "--reasoncache-percentile", "0"),
}
_OTHERS = ("ours", "stock:flashinfer", "nothing-shared:flashinfer")
#: The same pool, admission and log on every side.
_LOG_INTERVAL = 20
_COMMON = (
    f"--max-running-requests 96 --enable-custom-logit-processor --stream-interval 16 "
    f"--decode-log-interval {_LOG_INTERVAL} --schedule-conservativeness 0.3 --load-format dummy "
    "--sleep-on-idle"
)
#: Decode graphs alone: those of prefills take minutes to capture, and these loads hardly prefill.
_ON_CUDA = "--mem-fraction-static 0.8 --cuda-graph-max-bs-decode 96 --disable-prefill-cuda-graph"


def _side(text: str) -> str:
    name, colon, backend = text.partition(":")
    if name not in SIDES or bool(colon) != bool(backend):
        known = ", ".join(SIDES)
        raise argparse.ArgumentTypeError(f"must be one of {known}, or NAME:BACKEND, got {text}")
    return text


@dataclass(frozen=True)
class Options:
    """Sizes in tokens."""

    traces: Path = option(text=f"folder of recorded responses with {AIME}")
    out: Path = option(Path("build/bench"), "folder of results")
    device: str = option("cuda", "cpu: a narrow shape", choices=("cuda", "cpu"))
    reference: str = option("stock", "what others are compared with", read=_side)
    sides: tuple[str, ...] = option(_OTHERS, "that take turns with it", read=commas(_side))
    rounds: int = option(1, "of each side", least=1)
    slots: int = option(60_000, "of the KV pool", least=1)
    piece: int = option(4000, "length of a looping request", least=1)
    looping: int = option(LOOPING, "responses that are longer loop", least=1)
    whole: int = option(8000, "longest response that is sent whole", least=1)
    requests: int = option(48, "of a workload, at most", least=1)

    def workloads(self, responses: Sequence[list[int]]) -> dict[str, list[list[int]]]:
        """``loops``: pieces of looping responses; ``finished``: whole ones, three times;
        ``together``: as many loops as run at once on either side. Raises ValueError: a workload has
        no request."""
        loops = [
            [*piece] for ids in responses for piece in looping_pieces(ids, self.piece, self.looping)
        ]
        finished = [ids for ids in responses if 0 < len(ids) <= self.whole] * 3
        fitting = self.slots * 8 // 10 // (self.piece + 64)
        chosen = {"loops": loops, "finished": finished, "together": loops[:fitting]}
        for name, found in chosen.items():
            if not found:
                raise ValueError(f"{name}: no response of the traces is long or short enough")
        return {name: found[: self.requests] for name, found in chosen.items()}

    def flags(self, side: str) -> list[str]:
        name, _, backend = side.partition(":")
        words = f"--max-total-tokens {self.slots} {_COMMON}"
        words += f" {_ON_CUDA}" if self.device == "cuda" else ""
        words += f" --attention-backend {backend}" if backend else ""
        return [*words.split(), *SIDES[name]]


def shape(device: str) -> Any:
    """The shape of Qwen3-8B with the vocabulary of :mod:`eval.replay.model`; on a CPU its heads in a
    narrow model of four layers, so that attention is most of a step, as in long contexts."""
    sizes: dict[str, Any] = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
    if device == "cpu":
        sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, dtype="bfloat16")
    sizes |= dict(max_position_embeddings=40960, tie_word_embeddings=False)
    return replay_config(**sizes, architectures=["Qwen3ForCausalLM"])


def requests_of(responses: Sequence[list[int]], tokenizer: Any) -> list[Request]:
    """Requests whose responses are these tokens. No prompt is the beginning of another."""
    return [
        Request(
            str(number),
            f"{number}. {tokenizer.decode(ids[:60])}",
            {**forced_request(ids), "max_tokens": len(ids)},
        )
        for number, ids in enumerate(responses)
    ]


def exact(cells: Sequence[Cell], requests: Sequence[Request], tokenizer: Any) -> str:
    """How many of the responses are as recorded."""
    recorded = {
        request.problem_id: tokenizer.decode(request.body["custom_params"][FORCED]).strip()
        for request in requests
    }
    answers = [one for cell in cells for one in cell.answered().items()]
    same = sum(one.text.strip() == recorded[name] for name, one in answers)
    return f"{same} of {len(cells) * len(requests)}"


def table(rows: Sequence[Mapping[str, Any]], reference: str) -> str:
    """A line a side and workload; the reference's in brackets."""
    lines = [
        {
            "side": row["side"],
            "workload": row["workload"],
            f"tokens/s of {reference}'s": as_text(row["throughput_ratio"]),
            "running": "{} ({})".format(*map(as_text, (row["running"], row["dense_running"]))),
            "step, ms": "{} ({})".format(*map(as_text, (row["step_ms"], row["dense_step_ms"]))),
            "exact": row["exact"],
        }
        for row in rows
    ]
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def work(options: Options) -> None:
    texts = texts_of([options.traces / AIME])
    model = build(options.out / "gpu", texts, shape=shape(options.device))
    tokenizer = load_tokenizer(str(model))
    responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    workloads = options.workloads(responses)
    for name, chosen in workloads.items():
        print(f"{name}: {len(chosen)} requests, {sum(map(len, chosen)):,} tokens")
    asked = {name: requests_of(chosen, tokenizer) for name, chosen in workloads.items()}
    found: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions()}
    found |= {"options": {name: str(value) for name, value in vars(options).items()}, "rows": []}
    home = options.out / "gpu" / time.strftime("%Y%m%d-%H%M%S")
    with Servers(home, model, options.device, keep=2) as servers:
        for side in (name for name in options.sides if name != options.reference):
            for row in rows_of(options, side, servers, asked, home):
                row["exact"] = exact(row.pop("cells"), asked[row["workload"]], tokenizer)
                found["rows"].append(row)
                write_json(options.out / "gpu.json", found)
                print(json.dumps(row), flush=True)
    print(table(found["rows"], options.reference))


def rows_of(
    options: Options, side: str, servers: Servers, asked: Mapping[str, list[Request]], home: Path
) -> Iterator[dict[str, Any]]:
    """A side beside the reference, which take turns: for each workload the side's ``cells``, and
    :func:`speeds_of` them."""
    pair = (options.reference, side)
    up = {name: servers.get(name.replace(":", "-"), options.flags(name)) for name in pair}
    how: Any = dict(log_interval=_LOG_INTERVAL, timeout_s=3600.0)
    # The first forwards of a kind compile kernels.
    for server in up.values():
        cells.warm_up(server, [one for requests in asked.values() for one in requests[:1]], 3600.0)
    for workload, requests in asked.items():
        done: dict[str, list[Cell]] = {name: [] for name in pair}
        for number in range(options.rounds):
            for name in pair[:: -1 if number % 2 else 1]:
                cell = Cell(home / side.replace(":", "-"), workload, name, number)
                cells.measure(cell, requests, up[name], lambda: None, **how)
                done[name].append(cell)
        about = {"side": side, "workload": workload, "attention_backend": up[side].attention()}
        yield {**about, **speeds_of(done[side], done[options.reference]), "cells": done[side]}


if __name__ == "__main__":
    command.run(Options, work)

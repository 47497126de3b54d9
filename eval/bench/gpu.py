# SPDX-License-Identifier: Apache-2.0
"""``make bench-gpu``: recorded responses on stock and sharing servers of one GPU, in turns.

The model has the shape of an 8B Qwen3 (``--device cpu``: its heads, in four narrow layers) and dummy
weights. Each next token is forced, so weights decide nothing but K and V; memory, step times and
scheduling are real. The reference, stock SGLang, stays up beside one other side at a time. Writes
``gpu.json`` after every run. Needs no lm-eval."""

import argparse
import asyncio
import json
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
from transformers import Qwen3Config

from eval import command
from eval.bench import AIME
from eval.bench.turns import as_text, spread
from eval.command import option
from eval.jsonl import texts_of
from eval.measures.figures import matched_step_ms
from eval.replay.forcing import forced_request
from eval.replay.model import VOCABULARY_SIZE, build
from eval.runs.cells import moments, retractions
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import Moment, write_whole
from eval.serving import ServerProcess, several
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
_COMMON = (
    "--max-running-requests 96 --enable-custom-logit-processor --decode-log-interval 20 "
    "--schedule-conservativeness 0.3 --load-format dummy --sleep-on-idle"
)
#: Decode graphs alone: those of prefills take minutes to capture, and these loads hardly prefill.
_ON_CUDA = [
    "--mem-fraction-static",
    "0.8",
    "--cuda-graph-max-bs-decode",
    "96",
    "--disable-prefill-cuda-graph",
]
#: Token ids of a request's prompt and of its response.
Pair = tuple[list[int], list[int]]
#: JSON of one workload on one side, and what the server's log says of its decode steps.
Run = tuple[dict[str, Any], list[Moment]]


def _side(text: str) -> str:
    name, colon, backend = text.partition(":")
    if name not in SIDES or bool(colon) != bool(backend):
        known = ", ".join(SIDES)
        raise argparse.ArgumentTypeError(f"must be one of {known}, or NAME:BACKEND, got {text}")
    return text


def _reference(text: str) -> str:
    if not re.fullmatch("stock(:[^:]+)?", text):
        raise argparse.ArgumentTypeError(f"must be stock, or stock:BACKEND, got {text}")
    return text


@dataclass(frozen=True)
class Options:
    """Sizes in tokens."""

    traces: Path = option(text=f"folder of recorded responses with {AIME}")
    out: Path = option(Path("build/bench"), "folder of results")
    device: str = option("cuda", "cpu: a narrow shape", choices=("cuda", "cpu"))
    reference: str = option("stock", "what others are compared with", read=_reference)
    sides: tuple[str, ...] = option((), f"default: {' '.join(_OTHERS)}", type=_side)
    rounds: int = option(1, "of each side", least=1)
    slots: int = option(60_000, "of the KV pool", least=1)
    piece: int = option(4000, "length of a looping request", least=1)
    looping: int = option(20_000, "responses that are longer loop", least=1)
    whole: int = option(8000, "longest response that is sent whole", least=1)
    requests: int = option(48, "of a workload, at most", least=1)
    plan: bool = option(False, "say what would run, and run nothing")

    def __post_init__(self) -> None:
        others = tuple(side for side in _OTHERS if side != self.reference)
        object.__setattr__(self, "sides", self.sides or others)
        if self.reference in self.sides:
            told = f"--sides: {self.reference} is the reference, which others are compared with"
            raise ValueError(told)

    def workloads(self, responses: Sequence[list[int]]) -> dict[str, list[Pair]]:
        """``loops``: pieces of looping responses; ``finished``: whole ones, three times under other
        prompts; ``together``: as many loops as run at once on either side. No prompt is the
        beginning of another. Raises ValueError: a workload has no request."""
        loops = [
            ids[at : at + self.piece]
            for ids in responses
            if len(ids) > self.looping
            for at in range(self.piece, self.looping - self.piece + 1, self.piece)
        ]
        finished = [ids for ids in responses if 0 < len(ids) <= self.whole] * 3
        fitting = self.slots * 8 // 10 // (self.piece + 64)
        chosen = {"loops": loops, "finished": finished, "together": loops[:fitting]}
        for name, found in chosen.items():
            if not found:
                raise ValueError(f"{name}: no response of the traces is long or short enough")
        return {
            name: [([100 + n] * 3 + ids[:60], ids) for n, ids in enumerate(found[: self.requests])]
            for name, found in chosen.items()
        }

    def flags(self, side: str) -> list[str]:
        name, _, backend = side.partition(":")
        found = ["--max-total-tokens", str(self.slots), *_COMMON.split()]
        found += _ON_CUDA if self.device == "cuda" else []
        return [*found, *(("--attention-backend", backend) if backend else ()), *SIDES[name]]


def shape(device: str) -> Any:
    """The shape of Qwen3-8B with the vocabulary of :mod:`eval.replay.model`; on a CPU its heads in a
    narrow model of four layers, so that attention is most of a step, as in long contexts."""
    config: Any = Qwen3Config
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, head_dim=128)
    if device == "cpu":
        sizes |= dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=40960)
    tokens = dict(vocab_size=VOCABULARY_SIZE, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    more = dict(rope_theta=1e6, tie_word_embeddings=False, dtype="bfloat16")
    return config(**sizes, **heads, **tokens, **more, architectures=["Qwen3ForCausalLM"])


async def _send(url: str, pairs: Sequence[Pair]) -> list[list[int]]:
    """All at once; token ids of the answers."""
    limits = httpx.Limits(max_connections=None)

    async def one(prompt: list[int], ids: list[int]) -> list[int]:
        body = forced_request(ids)
        processor = body.pop("custom_logit_processor")
        sampling = {**body, "max_new_tokens": len(ids)}
        ask = dict(input_ids=prompt, sampling_params=sampling, custom_logit_processor=processor)
        answer = await client.post("/generate", json=ask)
        found: list[int] = answer.raise_for_status().json()["output_ids"]
        return found

    how: Any = dict(base_url=url, timeout=3600, trust_env=False, limits=limits)
    async with httpx.AsyncClient(**how) as client:
        return await asyncio.gather(*(one(*pair) for pair in pairs))


def measure(server: ServerProcess, pairs: Sequence[Pair]) -> Run:
    """On an empty cache. ``exact``: responses as recorded; ``waiting``: means of the log's lines while
    requests waited for memory."""
    server.post("/flush_cache", params={"timeout": 60}).raise_for_status()
    begin, started = server.log_size(), time.perf_counter()
    answers = asyncio.run(_send(server.url, pairs))
    seconds, log = time.perf_counter() - started, server.log_text(begin)
    timeline, tokens = moments(log, 0), sum(map(len, answers))
    told: dict[str, Any] = {"requests": len(pairs), "tokens": tokens, "seconds": seconds}
    told["exact"] = sum(ids == pair[1] for ids, pair in zip(answers, pairs, strict=True))
    told |= {"retractions": retractions(log), "tokens_per_s": tokens / seconds}
    return {**told, "waiting": waiting(timeline)}, timeline


def waiting(timeline: Sequence[Moment]) -> dict[str, float]:
    """Means over the lines in which requests waited, {} without any."""
    full = pd.DataFrame([vars(moment) for moment in timeline if moment.queued])
    if full.empty:
        return {}
    means = full[["running", "used", "saved", "tokens_per_s"]].mean()
    return {str(name): float(value) for name, value in means.items()}


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """Two sides of one workload, round by round; ``step_ms``: ours and theirs at equal running
    requests."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [mine["tokens_per_s"] / other["tokens_per_s"] for (mine, _), (other, _) in pairs]
    lines = [[moment for _, timeline in runs for moment in timeline] for runs in (ours, theirs)]
    exact, asked = (sum(told[name] for told, _ in ours) for name in ("exact", "requests"))
    return {
        "throughput_ratio": spread(ratios),
        "running": [runs[-1][0]["waiting"].get("running") for runs in (ours, theirs)],
        "exact": f"{exact} of {asked}",
        "step_ms": matched_step_ms(*lines) or [None, None],
    }


def table(compared: dict[str, dict[str, Any]], reference: str) -> str:
    """A line a side and workload; the reference's in brackets."""
    lines = [
        {
            "side": side,
            "workload": name,
            f"tokens/s of {reference}'s": as_text(found["throughput_ratio"]),
            "running, others waiting": "{} ({})".format(*map(as_text, found["running"])),
            "step, ms": "{} ({})".format(*map(as_text, found["step_ms"])),
            "exact": found["exact"],
        }
        for side, row in compared.items()
        for name, found in row["compared"].items()
    ]
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def work(options: Options) -> None:
    texts = texts_of([options.traces / AIME])
    model = build(options.out / "gpu", texts, shape=shape(options.device))
    tokenizer = load_tokenizer(str(model))
    responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    workloads = options.workloads(responses)
    for name, pairs in workloads.items():
        print(f"{name}: {len(pairs)} requests, {sum(len(ids) for _, ids in pairs):,} tokens")
    if options.plan:
        for side in (options.reference, *options.sides):
            print(f"{side}: {shlex.join(options.flags(side))}")
        return
    sizes = ("slots", "piece", "looping", "whole", "requests", "device")
    found: dict[str, Any] = {"load": {name: getattr(options, name) for name in sizes}}
    found |= {"machine": describe_machine(), "versions": describe_versions(), "sides": {}}
    found["reference"] = options.reference
    how: dict[str, Any] = {"logs": options.out / "gpu", "device": options.device}
    reference = {options.reference: options.flags(options.reference)}
    with several(model, reference, **how) as stock:
        for side in options.sides:
            with several(model, {side: options.flags(side)}, **how) as other:
                for row in rows_of({**stock, **other}, workloads, options.rounds):
                    found["sides"][side] = row
                    write_whole(options.out / "gpu.json", json.dumps(found, indent=1) + "\n")
    print(table(found["sides"], options.reference))


def rows_of(
    servers: dict[str, ServerProcess], workloads: dict[str, list[Pair]], rounds: int
) -> Any:
    """The second server beside the first, after every run."""
    reference, side = servers
    attention = servers[side].get("/server_info").json()["attention_backend"]
    row: dict[str, Any] = {"attention_backend": attention, "runs": [], "compared": {}}
    # The first forwards of a kind compile kernels.
    for server in servers.values():
        measure(server, [pair for pairs in workloads.values() for pair in pairs[:1]])
    for workload, pairs in workloads.items():
        runs: dict[str, list[Run]] = {name: [] for name in servers}
        for number in range(rounds):
            for name in list(servers)[:: -1 if number % 2 else 1]:
                runs[name].append(measure(servers[name], pairs))
                row["runs"].append({"side": name, "workload": workload, **runs[name][-1][0]})
                print(json.dumps(row["runs"][-1]), flush=True)
                yield row
        row["compared"][workload] = compare(runs[side], runs[reference])
        yield row


if __name__ == "__main__":
    command.run(Options, work)

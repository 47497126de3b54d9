# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.servers BENCH`` makes all runs of a bench with ``eval.run``, then a report on them.

Stock SGLang and SGLang with reasoncache take turns on the same problems. After an interruption, the same
command on the same commit continues the bench."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from eval import command
from eval.command import flags_of, option
from eval.jsonl import read_rows, text_of, texts_of
from eval.replay.__main__ import MODELS
from eval.replay.model import build, replay_config
from eval.report.__main__ import write
from eval.report.tables import load
from eval.runs.config import describe_versions, digest_of
from eval.runs.folder import write_whole
from eval.runs.options import parse
from eval.runs.session import run
from eval.small_reasoner import ADAPTER, MODEL
from eval.tokenizers import load_tokenizer

#: Maps the name of each run in a bench to the flags that ``eval.run`` gets for this run.
Runs = dict[str, str]
#: SGLang's documents advise conservativeness 0.3, which fills the pool, if requests queue while slots are free.
_ALL = "--device cpu --server-flags '--schedule-conservativeness 0.3' "
_IN_TURNS = "--keep-servers 4 --methods"
#: Files in the folder of traces: recorded responses to AIME 2024 and to MATH-500.
AIME = "aime24_sky_t1_32b.jsonl"
MATH = "math500_sky_t1_27b.jsonl"
#: Four responses to each question of AIME 2024, by successive checkpoints of one model.
SAMPLES = "siblings_aime24_32b.jsonl"
#: AIME responses with more tokens than this repeat themselves in a loop. The others have at most 14,406 tokens.
LOOPING = 20_000


def serve(traces: Path | None) -> Runs:
    """Two workloads of the tiny reasoner (``noise`` is random text: nothing repeats), and replays of two files
    of ``traces`` on a model with random weights. A replay has three times as many requests as run at a time."""
    runs = {
        "tiny_reasoner": f"--tasks tiny_reasoner {_IN_TURNS} dense,tuned,newest,random:random_ratio=0.4 "
        "--limit 32 --seeds 0,1 --kv-budget 4000",
        # Many short rounds, one per seed, because the load from other programs changes within seconds.
        "noise": f"--tasks noise {_IN_TURNS} dense,newest --limit 32 "
        "--seeds 0,1,2,3,4,5,6,7,8 --kv-budget 16384",
    }
    if traces is None:
        return runs
    model = build(MODELS, texts_of([traces / AIME, traces / MATH]))
    responses, tokenizer = _tokens(traces / AIME, model)
    pieces = _records(model / "pieces.jsonl", looping_pieces(responses, 3000), tokenizer)
    replay = (
        f"--model {model} --temperature 0 --warm-up 2 --limit 24 {_IN_TURNS} dense,tuned,newest "
        "--tasks"
    )
    aime = f"aime24_replay --data aime24_replay={pieces} --seeds 0,1 --kv-budget 8000"
    math = f"math500_replay --data math500_replay={quote(str(traces / MATH))} --kv-budget 4000"
    return {**runs, "aime24_replay": f"{replay} {aime}", "math500_replay": f"{replay} {math}"}


def gpu(traces: Path | None, piece: int = 4000, longest: int = LOOPING, whole: int = 8000) -> Runs:
    """Replays of ``traces`` on a model with dummy weights and the shape of Qwen3-8B. Without a GPU, the model
    has only four narrow layers. Replays force every token, so the weights affect neither memory nor step times
    nor scheduling. ``waiting`` replays pieces of looping responses, and three copies of each short response:
    more requests than can run at once. ``together`` replays 11 pieces, which run all at once and fill three
    quarters of the slots. Both use SGLang's default attention backend, and are repeated with FlashInfer."""
    if traces is None:
        raise ValueError("--traces FOLDER is needed, got none")
    sizes: dict[str, Any] = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
    if not torch.cuda.is_available():
        sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, dtype="bfloat16")
    sizes |= dict(max_position_embeddings=40_960, tie_word_embeddings=False)
    shape = replay_config(**sizes, architectures=["Qwen3ForCausalLM"])
    model = build(MODELS, texts_of([traces / AIME]), shape=shape)
    responses, tokenizer = _tokens(traces / AIME, model)
    finished = [ids for ids in responses if len(ids) <= whole] * 3
    files = {
        "loops": _records(
            model / "loops.jsonl", looping_pieces(responses, piece, longest), tokenizer
        ),
        "finished": _records(model / "finished.jsonl", finished, tokenizer),
    }
    server = "--max-running-requests 96 --schedule-conservativeness 0.3 --load-format dummy"
    # Prefill CUDA graphs are off, because their capture takes minutes and the prompts here are short.
    cuda = "--mem-fraction-static 0.8 --cuda-graph-max-bs-decode 96 --disable-prefill-cuda-graph"
    server += f" {cuda}" if torch.cuda.is_available() else ""
    runs = {}
    for name, tasks, limit in (("waiting", files, 48), ("together", ["loops"], 11)):
        data = " ".join(f"--data {task}_replay={files[task]}" for task in tasks)
        workload = f"--tasks {','.join(f'{task}_replay' for task in tasks)} {data} --limit {limit}"
        for suffix, more in (("", ""), ("-flashinfer", " --attention-backend flashinfer")):
            runs[name + suffix] = (
                f"--model {model} --device auto {workload} --methods dense,newest,newest:percentile=0 "
                f"--kv-budget 60000 --decode-log-interval 20 --server-flags '{server}{more}'"
            )
    return runs


def _tokens(path: Path, model: Path) -> tuple[list[list[int]], Any]:
    """The tokens of each response in a file, and the tokenizer."""
    tokenizer = load_tokenizer(str(model))
    encode: dict[str, Any] = dict(add_special_tokens=False, verbose=False)
    return [tokenizer.encode(text, **encode) for text in texts_of([path])], tokenizer


def looping_pieces(
    responses: Sequence[list[int]], size: int, longest: int = LOOPING
) -> list[list[int]]:
    """Takes the first ``longest`` tokens of each response that has more tokens, and cuts them into pieces of
    ``size`` tokens; leaves out the first piece. Pieces repeat themselves nearly as much as whole responses."""
    starts = range(size, longest - size + 1, size)
    return [ids[at : at + size] for ids in responses if len(ids) > longest for at in starts]


def _records(path: Path, responses: Sequence[list[int]], tokenizer: Any) -> Path:
    """Write a JSONL file of responses to replay. Each prompt begins with a different number, so copies of a
    response share almost no cached prefix."""
    rows = [
        {"question": f"{number}. {tokenizer.decode(ids[:60])}", "response": tokenizer.decode(ids)}
        for number, ids in enumerate(responses)
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def short(_: Path | None) -> Runs:
    """Sends all problems at once. The largest KV pool has room for all requests, the smallest for two."""
    workloads = {
        "small_reasoner": (f"--model {MODEL} --limit 24", (30_000, 12_000, 6_000, 2_500)),
        "tiny_reasoner": ("--limit 48", (30_000, 12_000, 6_000, 1_500)),
    }
    sides = (
        f"{_IN_TURNS} dense,tuned,newest:when=always,newest --temperature 0 --seeds 0,1 --warm-up 4"
    )
    return {
        f"{task}-{pool}": f"--tasks {task} {flags} {sides} --kv-budget {pool}"
        for task, (flags, pools) in workloads.items()
        for pool in pools
    }


def siblings(traces: Path | None, size: int = 3000, questions: int = 12) -> Runs:
    """Samples 1, 4 or 16 responses to each of 100 problems. Methods share within or also across responses.
    ``replay`` forces the first ``size`` tokens of each recorded response to a question of ``traces``, for the
    first ``questions`` that have only longer responses."""
    sides = "--methods dense,tuned,newest,newest:scope=prompt"
    runs = {
        f"x{n}": f"--model {MODEL} --tasks small_reasoner_x{n} --limit {100 * n} {sides} "
        "--temperature 0.8 --warm-up 4 --kv-budget 12000"
        for n in (1, 4, 16)
    }
    if traces is None:
        return runs
    model = build(MODELS, texts_of([traces / SAMPLES]))
    pieces = model / f"samples-{size}-{questions}.jsonl"
    groups: dict[str, list[list[int]]] = {}
    responses, tokenizer = _tokens(traces / SAMPLES, model)
    prompts = read_rows(traces / SAMPLES, lambda row: text_of(row, "question"))
    for (_, question), response in zip(prompts, responses, strict=True):
        groups.setdefault(question, []).append(response)
    long = [group for group in groups.items() if min(map(len, group[1])) > size][:questions]
    rows = [
        {
            "id": f"{number}-{sample}",
            "question": question,
            "response": tokenizer.decode(response[:size]),
        }
        for number, (question, group) in enumerate(long)
        for sample, response in enumerate(group)
    ]
    if not rows:
        raise ValueError(
            f"{traces / SAMPLES}: no question has only responses of over {size} tokens"
        )
    write_whole(pieces, "".join(json.dumps(row) + "\n" for row in rows))
    replay = f"--model {model} --tasks aime24_replay --data aime24_replay={pieces} {sides}"
    settings = f"--limit {len(rows)} --temperature 0 --warm-up 2 --kv-budget 16000"
    return {**runs, "replay": f"{replay} {settings}"}


#: Summed over the decode steps of a request that grows from 45 to 580 positions, these budgets leave out 10,
#: 20, 40 and 60% of the positions.
BUDGETS = (397, 321, 214, 132)
_EVICTORS = "streamingllm h2o keydiff rkv triattention l2norm random reasoncache+rkv"


def policies(_: Path | None) -> Runs:
    """Compares eviction policies with random sharing and the ReasonCache paper's rule, which saves 10% of the
    slots at percentile 30, 22% at 80, little more at 100. SnapKV evicts only from the prompt, so one setting
    is enough. The pool holds all requests in flight, so lack of slots does not affect the answers."""
    methods = ["dense", "reasoncache:percentile=30", "reasoncache:percentile=80"]
    methods += ["reasoncache:policy=snapkv:share=0.5"]
    methods += [f"random:random_ratio={ratio}" for ratio in (0.12, 0.24, 0.48, 0.72)]
    methods += [
        f"reasoncache:policy={name}:budget={budget}:slack=8"
        for budget in BUDGETS
        for name in _EVICTORS.split()
    ]
    return {
        "tiny_reasoner": f"--tasks tiny_reasoner --methods {','.join(methods)} --limit 60 "
        # Eviction needs a backend that skips evicted positions. Stock SGLang runs with the same backend.
        "--server-flags '--attention-backend reasoncache_cpu' "
        "--in-flight 48 --max-tokens 1000 --kv-budget 56000"
    }


#: The tokens per block that the papers' ablations go through. The embedded model's steps are short: it shares
#: little beyond 16.
BLOCKS = (4, 8, 16, 32, 64, 128)


def _ablations(axes: dict[str, str]) -> Runs:
    """A run for each axis, all with stock SGLang beside the axis' methods."""
    common = "--tasks tiny_reasoner --limit 60 --in-flight 24 --kv-budget 30000 --max-tokens 1000"
    return {axis: f"{common} --methods dense,{methods}" for axis, methods in axes.items()}


def _of_blocks(preset: str) -> str:
    return ",".join(f"{preset}:block={block}" for block in BLOCKS)


def reasoncache(_: Path | None) -> Runs:
    """Ablations of the ReasonCache paper's rule. ``stages``: lexical similarity alone, then with the structure
    check, then with the KV distance; random sharing. ``percentile``: of accepted distances. In both, blocks are
    paired by index, because the distances of blocks of equal tokens say less. ``tau``: dynamic and fixed
    lexical thresholds. ``structure``: with and without the check, and with a tolerance."""
    stages = ",".join(
        f"{stage}:align=index" for stage in ("cosine", "cosine-structure", "reasoncache")
    )
    percentiles = ",".join(f"p{percentile}:align=index" for percentile in (20, 50, 80, 100))
    soft = ",".join(f"reasoncache:tau_strict=0.9,tau_soft={tau}" for tau in (0.5, 0.7, 0.9))
    strict = ",".join(f"reasoncache:tau_strict={tau},tau_soft=0.7" for tau in (0.8, 0.95))
    return _ablations({
        "stages": f"{stages},random:random_ratio=0.2",
        "percentile": percentiles,
        "tau": f"fixed-0.8,fixed-0.9,{soft},{strict}",
        "structure": "reasoncache,reasoncache:use_structure=false,reasoncache:structure_tolerance=2",
        "block": _of_blocks("reasoncache"),
        "align": "reasoncache,reasoncache:align=index,reasoncache:align=nearest",
        "positions": "reasoncache,reasoncache:positions=as-cached",
    })  # fmt: skip


def memshare(_: Path | None) -> Runs:
    """Ablations of the MemShare paper's rule, the same way. ``tau``: its two fixed thresholds, a lower one, and
    ReasonCache's dynamic one."""
    return _ablations({
        "tau": "memshare,memshare-0.9,memshare:fixed_tau=0.7,cosine:align=nearest",
        "percentile": ",".join(f"memshare:percentile={p},warmup=128" for p in (20, 50, 80, 100)),
        "structure": "memshare,memshare:use_structure=true,memshare:length_factor=true",
        "block": _of_blocks("memshare"),
        "align": "memshare,memshare:align=index,memshare:align=tokens,random:random_ratio=0.3",
        "positions": "memshare,memshare:positions=as-cached",
    })  # fmt: skip


def answers(_: Path | None) -> Runs:
    """The small reasoner answers its problems with stock SGLang, with sharing and with eviction."""
    return {"small_reasoner": f"@{quote(str(ADAPTER.with_name('answers.flags')))}"}


BENCHES: dict[str, Callable[[Path | None], Runs]] = {
    bench.__name__: bench
    for bench in (serve, gpu, short, siblings, policies, reasoncache, memshare, answers)
}


@dataclass(frozen=True)
class Options:
    bench: str = option(
        text=f"comparison to make: {', '.join(BENCHES)}", choices=BENCHES, metavar="BENCH"
    )
    traces: Path | None = option(
        None, "folder of recorded responses, which serve, siblings and gpu replay"
    )
    only: tuple[str, ...] = option((), "make only these runs of the comparison", metavar="RUN,...")
    flags: tuple[str, ...] = option((), "flags of eval.run, for each run", read=flags_of)
    out: Path = option(Path("build/bench"), "folder of results")


def work(options: Options) -> None:
    """Make the runs that have no results yet, and a report on all runs. Raises ValueError if options are wrong
    or nothing could be measured."""
    runs = BENCHES[options.bench](options.traces)
    commit = describe_versions()["commit"]
    if unknown := set(options.only) - runs.keys():
        raise ValueError(f"--only must be of {', '.join(runs)}, got {', '.join(unknown)}")
    home = options.out / options.bench / digest_of([commit, options.flags])
    folders = []
    is_whole = True
    for name in options.only or runs:
        folders.append(home / name)
        words = [*flags_of(_ALL + runs[name]), *options.flags]
        is_whole &= run(parse(words)[0], folders[-1])
        data = load(folders)
        if data.cells.empty:
            raise ValueError(f"{folders[-1]}: nothing could be measured")
        write(data, home)
    print((home / "REPORT.md").read_text(), home / "REPORT.md", sep="\n")
    if not is_whole:
        sys.exit(1)


if __name__ == "__main__":
    command.run(Options, work)

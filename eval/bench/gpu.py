# SPDX-License-Identifier: Apache-2.0
"""``make bench-gpu``: recorded responses on stock and sharing servers of one GPU, in turns.

The model has the shape of an 8B Qwen3 (``--device cpu``: its heads, in four narrow layers) and dummy
weights. Each next token is forced, so weights decide nothing but K and V; memory, step times and
scheduling are real. The reference, stock SGLang, stays up beside one other side at a time. Writes
``gpu.json`` after every run."""

import argparse
import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import httpx
from transformers import Qwen3Config

from eval.bench import AIME, at_least
from eval.bench.turns import as_text, spread
from eval.jsonl import texts_of
from eval.measures.figures import matched_step_ms
from eval.replay.forcing import forced_request
from eval.replay.model import VOCABULARY_SIZE, build
from eval.runs.cells import moments, retractions
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import Moment, write_whole
from eval.serving import ServerError, ServerProcess
from eval.tokenizers import load_tokenizer

SHARING = ("--enable-reasoncache",)
#: Flags of a side; ``NAME:BACKEND`` also names its attention, which is SGLang's choice or ours else.
SIDES = {
    "stock": (),
    "ours": SHARING,
    "as-cached": (*SHARING, "--reasoncache-when", "always", "--reasoncache-positions", "as-cached"),
    "nothing-shared": (*SHARING, "--reasoncache-percentile", "0"),
}
#: Token ids of a request's prompt and of its response.
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Load:
    """Sizes in tokens. ``slots``: of the KV pool. Workloads: ``loops``, pieces of responses longer
    than ``looping``, which go round in circles; ``finished``, whole ones of at most ``whole``, three
    times under different prompts; ``together``, as many loops as run at once on either side."""

    slots: int = 60_000
    piece: int = 4000
    looping: int = 20_000
    whole: int = 8000
    requests: int = 48
    device: Literal["cuda", "cpu"] = "cuda"

    def workloads(self, responses: Sequence[list[int]]) -> dict[str, list[Pair]]:
        """Requests of each, ``requests`` at most; no prompt is the beginning of another. Raises
        ValueError: a workload has none."""
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
        """Of a server: the same pool, admission and log on every side. On CUDA decode graphs alone:
        those of prefills take minutes to capture, and these loads hardly prefill."""
        name, _, backend = side.partition(":")
        common = f"--max-total-tokens {self.slots} --max-running-requests 96"
        common += " --enable-custom-logit-processor --decode-log-interval 20"
        common += " --schedule-conservativeness 0.3 --load-format dummy --sleep-on-idle"
        if self.device == "cuda":
            common += " --mem-fraction-static 0.8"
            common += " --cuda-graph-max-bs-decode 96 --disable-prefill-cuda-graph"
        attention = f"--attention-backend {backend}" if backend else ""
        return [*common.split(), *attention.split(), *SIDES[name]]


_SIZES = {name: size for name, size in asdict(Load()).items() if name != "device"}


def shape(device: str) -> Any:
    """Of Qwen3-8B, but for the vocabulary of :mod:`eval.replay.model`; on a CPU with its heads in a
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


@dataclass(frozen=True)
class Run:
    """One on an empty cache. ``waiting``: means over the log while requests waited for memory;
    ``exact``: responses as recorded."""

    requests: int
    exact: int
    tokens: int
    seconds: float
    retractions: int
    timeline: list[Moment] = field(repr=False)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def told(self) -> dict[str, Any]:
        """JSON."""
        full = [moment for moment in self.timeline if moment.queued]
        names = ("running", "used", "saved", "tokens_per_s") if full else ()
        waiting = {name: fmean(getattr(one, name) for one in full) for name in names}
        plain = {name: value for name, value in vars(self).items() if name != "timeline"}
        return {**plain, "tokens_per_s": self.rate, "waiting": waiting}


def measure(server: ServerProcess, pairs: Sequence[Pair]) -> Run:
    server.post("/flush_cache", params={"timeout": 60}).raise_for_status()
    begin, started = server.log_size(), time.perf_counter()
    answers = asyncio.run(_send(server.url, pairs))
    seconds, log = time.perf_counter() - started, server.log_text(begin)
    exact = sum(ids == pair[1] for ids, pair in zip(answers, pairs, strict=True))
    tokens = sum(len(ids) for ids in answers)
    return Run(len(pairs), exact, tokens, seconds, retractions(log), moments(log, 0))


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> dict[str, Any]:
    """Of one workload, round by round; ``step_ms``: ours and theirs at equal running requests."""
    ratios = [mine.rate / other.rate for mine, other in zip(ours, theirs, strict=True)]
    lines = [[moment for run in runs for moment in run.timeline] for runs in (ours, theirs)]
    running = [run.told()["waiting"].get("running") for run in (ours[-1], theirs[-1])]
    exact = f"{sum(run.exact for run in ours)} of {sum(run.requests for run in ours)}"
    row = {"throughput_ratio": spread(ratios), "running": running, "exact": exact}
    return {**row, "step_ms": matched_step_ms(*lines) or [None, None]}


def table(sides: Mapping[str, Any], reference: str) -> list[str]:
    """A line a side and workload; the reference's in brackets."""
    head = (
        f"side | workload | tokens/s of {reference}'s | running, others waiting | step, ms | exact"
    )
    lines = [f"| {head} |", "| --- " * 6 + "|"]
    for side, row in sides.items():
        for name, found in row["compared"].items():
            pairs = ("{} ({})".format(*map(as_text, found[key])) for key in ("running", "step_ms"))
            cells = side, name, as_text(found["throughput_ratio"]), *pairs, found["exact"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


_OTHERS = ("ours", "stock:flashinfer", "nothing-shared:flashinfer")


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


def _arguments() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m eval.bench.gpu", description=summary)
    add = parser.add_argument
    add("traces", type=Path, help=f"folder of recorded responses with {AIME}")
    add("--out", type=Path, default=Path("build/bench"))
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a narrow shape")
    told = "the server that others are compared with, stock:BACKEND too (default: %(default)s)"
    add("--reference", type=_reference, default="stock", metavar="SIDE", help=told)
    told = f"default: {' '.join(_OTHERS)}, without the reference"
    add("--sides", nargs="+", type=_side, metavar="SIDE", help=told)
    for name, default in {"rounds": 1, **_SIZES}.items():
        add(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    add("--plan", action="store_true", help="say what would run, and run nothing")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _arguments()
    args = parser.parse_args(argv)
    if args.sides is None:
        args.sides = [side for side in _OTHERS if side != args.reference]
    if args.reference in args.sides:
        parser.error(f"--sides: {args.reference} is the reference, which others are compared with")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    load = Load(**{name: getattr(args, name) for name in ("device", *_SIZES)})
    try:
        texts = texts_of([args.traces / AIME])
        model = build(args.out / "gpu", texts, shape=shape(load.device))
        tokenizer = load_tokenizer(str(model))
        responses = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        workloads = load.workloads(responses)
        for name, pairs in workloads.items():
            print(f"{name}: {len(pairs)} requests, {sum(len(ids) for _, ids in pairs):,} tokens")
        if args.plan:
            for side in (args.reference, *args.sides):
                print(f"{side}: {shlex.join(load.flags(side))}")
            return
        _run(load, args, model, workloads)
    except (OSError, ValueError, ServerError, httpx.HTTPError) as error:
        sys.exit(f"bench-gpu: {error}")


def _run(load: Load, args: Any, model: Path, workloads: Mapping[str, Sequence[Pair]]) -> None:
    about = {"load": asdict(load), "machine": describe_machine(), "versions": describe_versions()}
    reference, sides = args.reference, dict[str, Any]()

    def keep() -> None:
        found = {**about, "reference": reference, "sides": sides}
        write_whole(args.out / "gpu.json", json.dumps(found, indent=1) + "\n")

    def server(side: str) -> ServerProcess:
        log, flags = args.out / "gpu" / f"{side.replace(':', '-')}.log", load.flags(side)
        return ServerProcess(model, flags=flags, device=load.device, log_path=log)

    with server(reference) as stock:
        for side in args.sides:
            with server(side) as other:
                attention = other.get("/server_info").json()["attention_backend"]
                row = sides[side] = {"attention_backend": attention, "runs": [], "compared": {}}
                both = {reference: stock, side: other}
                # The first forwards of a kind compile kernels.
                for one in both.values():
                    measure(one, [pair for pairs in workloads.values() for pair in pairs[:1]])
                for workload, pairs in workloads.items():
                    runs: dict[str, list[Run]] = {name: [] for name in both}
                    for number in range(args.rounds):
                        for name in list(both)[:: -1 if number % 2 else 1]:
                            runs[name].append(measure(both[name], pairs))
                            told = {"side": name, "workload": workload, **runs[name][-1].told()}
                            row["runs"].append(told)
                            print(json.dumps(told), flush=True)
                            keep()
                    row["compared"][workload] = compare(runs[side], runs[reference])
                    keep()
    print("\n".join(table(sides, reference)))


if __name__ == "__main__":
    main()

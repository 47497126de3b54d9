# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity MODEL RESPONSES``: what sharing costs a model on recorded responses."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eval.fidelity import summary
from eval.fidelity.arms import Arm, ArmError, default_name, default_names, parse_all
from eval.fidelity.cache import ModelError, Reader
from eval.fidelity.replay import Decisions, Replay
from eval.fidelity.responses import GROUPS, Response, ResponseError, read
from eval.tokenizers import TokenizerError, load_tokenizer
from sglang_reasoncache.filter.vocabulary import vocabulary_of


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.fidelity", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, help="Hugging Face folder of a causal model with rotary positions.")
    add("responses", type=Path, help="JSONL file of rows with question and response, or a folder.")
    add("--arms", help="Comma-separated; default: those of docs/fidelity.md.")
    add("--block", type=int, default=8, help="Tokens per block of the default arms (default 8).")
    add("--like", help="Arm whose saving evictors match; default: the shipped settings.")
    add(
        "--groups", default="right,loops", help="Of right, loops and wrong (default the first two)."
    )
    add("--limit", type=int, help="Responses of each group; default all.")
    add("--cap", type=int, default=2600, help="Tokens of question and response (default 2600).")
    add("--shortest", type=int, default=1000, help="Leave shorter responses out (default 1000).")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="Default: float32 on a CPU.")
    add("--threads", type=int, help="Of PyTorch on a CPU.")
    add("--out", type=Path, default=Path("build/bench/fidelity.json"))
    options = parser.parse_args(argv)
    options.groups = options.groups.split(",")
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"--groups must be of {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
    for name in ("cap", "shortest", "block", "limit", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    options.arms = options.arms.split(",") if options.arms else default_names(options.block)
    options.like = options.like or default_name()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def load(options: argparse.Namespace) -> Reader:
    """The model. Raises ModelError for one that cannot be measured."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, local_files_only=True, dtype=getattr(torch, options.dtype)
        )
    except (OSError, ValueError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{options.model}: {first}") from error
    longest = model.config.get_text_config().max_position_embeddings
    if longest < options.cap:
        raise ModelError(f"--cap must be at most the model's {longest} positions")
    return Reader(model.to(options.device))


def measure(
    options: argparse.Namespace, responses: Sequence[Response], arms: Sequence[Arm], path: Path
) -> Iterator[dict[str, Any]]:
    """A record for each response, those that ``path`` has from an earlier run as they are there.

    New ones are appended at once, so that a run that is cut goes on where it stopped.
    """
    known = {}
    if path.exists():
        known = {record["key"]: record for record in map(json.loads, path.open())}
    settings = [
        str(options.model.resolve()), options.dtype, *(repr(arm) for arm in arms), options.like,
    ]  # fmt: skip
    replay: Replay | None = None
    for response in responses:
        text = json.dumps([*settings, response.tokens, response.prompt])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key in known:
            yield known[key]
            continue
        if replay is None:
            vocabulary = vocabulary_of(load_tokenizer(str(options.model), local=True))
            replay = Replay(load(options), Decisions(vocabulary), arms, options.like)
        begun = time.monotonic()
        scores = replay.scores(response.tokens, response.prompt)
        record = {
            "key": key,
            "response": response.name,
            "group": response.group,
            "tokens": len(response.tokens),
            "seconds": round(time.monotonic() - begun, 1),
            "arms": {name: dataclasses.asdict(score) for name, score in scores.items()},
        }
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        yield record


def sum_up(options: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> str:
    """Write JSON and picture of the records so far; the table."""
    summed = summary.rows(summary.frame(records))
    settings = {name: getattr(options, name) for name in ("cap", "shortest", "dtype", "like")}
    result = {
        "rows": summed,
        "default": default_name(),
        "model": str(options.model),
        "responses": str(options.responses),
        "settings": settings,
        "seconds": sum(record["seconds"] for record in records),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    summary.draw(summed, options.out.with_suffix(".png"))
    return summary.table(summed)


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 with a message where model, responses or arms cannot be used."""
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        arms = parse_all(options.arms, options.like)
        tokenizer = load_tokenizer(str(options.model), local=True)
        responses = read(
            options.responses,
            tokenizer,
            options.cap,
            options.shortest,
            options.groups,
            options.limit,
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        records = []
        for record in measure(options, responses, arms, options.out.with_suffix(".jsonl")):
            records.append(record)
            print(
                f"{len(records)} of {len(responses)}: {record['response']}, {record['group']}, "
                f"{record['tokens']} tokens, {record['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            shown = sum_up(options, records)
    except (ArmError, ModelError, ResponseError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(shown)
    print(f"\nwrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

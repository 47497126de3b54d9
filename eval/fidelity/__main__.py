# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.fidelity MODEL RESPONSES`` measures how KV sharing changes a model's predictions of recorded
responses. With ``--documents FILE``, it measures how composing prompts of cached documents changes answers."""

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval import command
from eval.command import option
from eval.fidelity import documents, summary
from eval.fidelity.arms import default_name, default_names, parse_all
from eval.fidelity.cache import Reader
from eval.fidelity.documents import Documents, Prompt
from eval.fidelity.replay import Replay
from eval.fidelity.responses import Response, device_option, dtype_option, load, read
from eval.jsonl import cut_unfinished
from eval.tokenizers import load_tokenizer
from sglang_reasoncache.filter.vocabulary import vocabulary_of

#: Takes a model; returns a function that scores a response or prompt under each arm (way to edit the KV).
Begin = Callable[[Reader], Callable[[Any], Mapping[str, Any]]]
GROUPS = ("right", "loops", "wrong")


#: The items to measure, the settings on which their scores depend, and a function that takes the model.
Job = tuple[Sequence[Response | Prompt], list[str], Begin]


@dataclass(frozen=True)
class Options:
    model: Path = option(text="Hugging Face folder of a causal model with rotary positions")
    responses: Path | None = option(
        None, "JSONL file of rows with question and response, or a folder", in_place=True
    )
    documents: Path | None = option(
        None, "JSONL file of rows with system, documents, question and answer", metavar="FILE"
    )
    arms: tuple[str, ...] = option(
        (),
        "ways to edit the KV cache; with --documents, repairs. By default those of docs/fidelity.md",
    )
    like: str = option(default_name(), "the arm that decides how many positions evictors save")
    groups: tuple[str, ...] = option(
        GROUPS[:2], "responses to measure: right, loops or wrong", choices=GROUPS
    )
    limit: int | None = option(None, "responses or rows of each group, by default all", least=1)
    cap: int = option(2600, "most tokens of question and response, or of a row", least=1)
    shortest: int = option(1000, "shorter responses are left out", least=1)
    device: str = device_option()
    dtype: str = dtype_option()
    threads: int = option(torch.get_num_threads(), "threads of PyTorch on a CPU", least=1)
    out: Path = option(
        Path("build/bench/fidelity.json"), "JSON file of the figures; records go beside it"
    )

    def __post_init__(self) -> None:
        if (self.responses is None) == (self.documents is None):
            raise ValueError("RESPONSES or --documents FILE is needed, and not both")


def chosen(options: Options, tokenizer: Any) -> list[Response]:
    """At most ``--limit`` responses of each group; groups alternate. Raises ValueError if there are none."""
    counts: Counter[str] = Counter()
    ranked = []
    assert options.responses is not None
    for response in read(options.responses, tokenizer, options.cap, options.shortest):
        rank = counts[response.group]
        if response.group in options.groups and rank < (options.limit or rank + 1):
            counts[response.group] += 1
            ranked.append((rank, options.groups.index(response.group), response))
    if not ranked:
        raise ValueError(f"{options.responses}: no response of --shortest and --groups")
    return [response for *_, response in sorted(ranked)]


def measure(
    options: Options, items: Sequence[Response | Prompt], settings: Sequence[str], begin: Begin
) -> Iterator[Mapping[str, Any]]:
    """Yields a record for each item, and appends each new record to a JSONL file at once. Items that
    have a record there with the same settings are not measured again, so an interrupted run can continue."""
    path = options.out.with_suffix(".jsonl")
    records = {}
    scores = None
    source = options.documents or options.responses
    if source is not None and path.resolve() in (source.resolve(), source.resolve() / path.name):
        raise ValueError(f"--out {options.out}: its records go to {path}, which is what is read")
    cut_unfinished(path)
    if path.exists():
        records = {record["key"]: record for record in map(json.loads, path.open())}
    settings = [str(options.model.resolve()), options.dtype, *settings]
    for item in items:
        key = hashlib.sha256(json.dumps([settings, item]).encode()).hexdigest()[:16]
        if key not in records:
            scores = scores or begin(
                load(options.model, options.dtype, options.device, options.cap)
            )
            begun = time.monotonic()
            record: dict[str, Any] = dict(key=key, response=item.name, group=item.group)
            record |= dict(tokens=len(item.tokens), arms=scores(item))
            records[key] = {**record, "seconds": round(time.monotonic() - begun, 1)}
            with path.open("a") as file:
                file.write(json.dumps(records[key]) + "\n")
        yield records[key]


def _responses(options: Options, tokenizer: Any) -> Job:
    arms = parse_all(options.arms or default_names(), options.like)

    def begin(reader: Reader) -> Callable[[Any], Mapping[str, Any]]:
        replay = Replay(reader, vocabulary_of(tokenizer), arms, options.like)
        return lambda response: replay.scores(response.tokens, response.prompt)

    return chosen(options, tokenizer), [options.like, *map(repr, arms)], begin


def _prompts(options: Options, tokenizer: Any) -> Job:
    repairs = {name: documents.parse(name) for name in options.arms or documents.ARMS}
    assert options.documents is not None
    items = documents.read(options.documents, tokenizer, options.cap, options.limit)
    return items, [*repairs], lambda reader: Documents(reader, repairs, items, tokenizer).scores


def work(options: Options) -> list[dict[str, Any]]:
    """Measure all items; print a table of the figures, write it to ``--out``, and return its rows."""
    torch.set_num_threads(options.threads)
    records = list[Mapping[str, Any]]()
    summed = list[dict[str, Any]]()
    settings = {name: str(value) for name, value in vars(options).items()}
    tokenizer = load_tokenizer(str(options.model), local=True)
    figures = summary.DOCUMENTS if options.documents else summary.RESPONSES
    items, arms, begin = (_prompts if options.documents else _responses)(options, tokenizer)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for record in measure(options, items, arms, begin):
        records.append(record)
        facts = "{response}, {group}, {tokens} tokens, {seconds:.0f} s".format(**record)
        print(f"{len(records)} of {len(items)}: {facts}", file=sys.stderr, flush=True)
        summed = summary.rows(records, figures)
        result = {"rows": summed, "default": default_name(), "settings": settings}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{summary.table(summed, figures)}\n\nwrote {options.out}")
    return summed


if __name__ == "__main__":
    command.run(Options, work)

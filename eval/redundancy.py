# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.redundancy`` measures how much recorded responses repeat themselves. No model runs, only the
filter with which servers find repeats. Writes redundancy.md."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from eval import command
from eval.command import option
from eval.jsonl import one_line, read_rows, text_of
from eval.runs.folder import write_whole
from eval.tokenizers import load_tokenizer
from sglang_reasoncache.config import ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.request_filter import Proposal, RequestFilter
from sglang_reasoncache.filter.segment import ReasoningSpan, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from sglang_reasoncache.sharing.blocks import Pages, Run

WORDS = "words"
# Pieces cover all text, even blank lines, which end reasoning steps. A space belongs to the next word or mark.
_PIECES = re.compile(r"[ ]?(?:\w+|[^\w\s])|\s", re.UNICODE)
_MAX_NAME_CHARS = 40
#: Page sizes at which the default rule is measured, besides 1.
PAGE_SIZES = (16, 32, 64)
#: Block sizes at which the ReasonCache paper's rule for sharing (``match=steps``) is measured.
BLOCKS = (4, 8, 16)
#: Thresholds of MemShare, which compares steps by the cosine of their token counts alone.
COSINES = (0.8, 0.9)
_NOTE = """Candidate: the share of steps, without the first, that are similar to an earlier step by the
ReasonCache paper's filter. Cosine above 0.8 or 0.9: the same by MemShare's filter; the ReasonCache paper
counts redundant steps like that. Default, pages of p, d: the share of tokens that the default rule, the same at
page size p, or ReasonCache's filter with blocks of d tokens could share, at the end of a response / averaged
over decode steps. No distance is measured."""


class Speller:
    r"""Splits responses into tokens. ``name`` is the folder of a Hugging Face tokenizer, or :data:`WORDS`,
    which makes each word and punctuation mark a token. Raises ValueError if the tokenizer cannot be read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tokenizer = None
        if name != WORDS:
            if not Path(name).is_dir():
                raise ValueError(f"--tokenizer must be {WORDS!r} or a folder, got {name!r}")
            self.name = Path(name).resolve().name
            self._tokenizer = load_tokenizer(name, local=True)
            self._vocabulary = vocabulary_of(self._tokenizer)

    def spell(self, text: str) -> tuple[list[int], Vocabulary]:
        if self._tokenizer is not None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
            return list(ids), self._vocabulary
        numbers: dict[str, int] = {}
        ids = [numbers.setdefault(piece, len(numbers)) for piece in _PIECES.findall(text)]
        return ids, Vocabulary([piece.encode() for piece in numbers])


def measure(ids: list[int], vocabulary: Vocabulary) -> dict[str, float]:
    """Counts of one response. ``steps``: reasoning steps, including a last step that no blank line ends.
    ``candidates``: steps similar to an earlier step; ``cosine_T``: steps whose cosine with an earlier step is
    above T. ``end_RULE``: tokens in all blocks that a rule proposes.
    ``held``, ``time_RULE``: tokens so far, and those in blocks proposed so far, summed over decode steps."""
    tokens = len(ids)
    default = ReasonCacheConfig()
    rules = {"default": filter_config(default)}
    rules |= {f"d={block}": FilterConfig(block=block) for block in BLOCKS}
    counts: dict[str, float] = {"tokens": tokens, "held": tokens * (tokens + 1) // 2}
    for name, rule in rules.items():
        proposals = propose(ids, vocabulary, rule)
        # For each proposal, the number of decode steps from the token that ends its step to the last token.
        left = [tokens - proposal.step.end + 1 for proposal in proposals]
        for page in (1, *PAGE_SIZES) if name == "default" else (1,):
            kind = name if page == 1 else _of_pages(page)
            sizes = shared(proposals, rule.block, page)
            counts[f"end_{kind}"] = sum(sizes)
            counts[f"time_{kind}"] = sum(
                size * rest for size, rest in zip(sizes, left, strict=True)
            )
        # Each rule overwrites these counts. The last rules, one per block size, all give the same counts.
        counts["candidates"] = sum(bool(proposal.counters.candidates) for proposal in proposals)
        counts["steps"] = len(proposals)
        counts["later_steps"] = max(0, len(proposals) - 1)
    for cosine in COSINES:
        rule = FilterConfig(fixed_tau=cosine, length_factor=False, use_structure=False)
        proposals = propose(ids, vocabulary, rule)
        counts[f"cosine_{cosine}"] = sum(
            bool(proposal.counters.candidates) for proposal in proposals
        )
    return counts


def shared(proposals: Sequence[Proposal], block: int, page: int) -> list[int]:
    """For each of ``proposals``, the number of tokens that can share with it at this page size."""
    if page == 1:
        return [block * len(proposal.pairs) for proposal in proposals]
    pages = Pages(page)
    return [
        page * sum(len(pages.add(Run(*pair, block))) for pair in proposal.pairs)
        for proposal in proposals
    ]


def _of_pages(page: int) -> str:
    return f"pages of {page}"


def propose(ids: list[int], vocabulary: Vocabulary, rule: FilterConfig) -> list[Proposal]:
    """Returns what the filter proposes for each finished step."""
    end = len(vocabulary.pieces)  # an id that no token has
    span = ReasoningSpan(frozenset(), frozenset({end}), inside=True)
    request = RequestFilter(rule, TokenClasses(vocabulary), vocabulary, 0, span)
    # The added id ends the reasoning, and thereby the last step.
    return [*request.push(ids), *request.push([end])]


@dataclass(frozen=True)
class Options:
    traces: tuple[Path, ...] = option(text="JSONL files of responses")
    tokenizer: str = option(
        WORDS, f"folder of a Hugging Face tokenizer, or {WORDS!r}: words and punctuation marks"
    )
    out: Path = option(Path(), "folder of the results")


def read(options: Options, left_out: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields a tuple per response: its dataset, its grade (``correct``, ``wrong`` or "" if unknown), its text.
    Adds ``file:line`` to ``left_out`` for each line that cannot be read."""

    def made(row: dict[str, Any]) -> tuple[str, str, str]:
        dataset = row.get("dataset")
        correct = row.get("correct")
        name = one_line(dataset, _MAX_NAME_CHARS) if isinstance(dataset, str) else ""
        right = ("correct" if correct else "wrong") if isinstance(correct, bool) else ""
        return name, right, text_of(row, "response")

    def complain(where: str, fault: str) -> None:
        left_out.append(where)
        print(f"{where}: left out: {fault}", file=sys.stderr)

    for path in options.traces:
        rows = read_rows(path, made, complain)
        for _, (name, right, text) in tqdm(rows, path.name, disable=None, unit=" responses"):
            yield name or one_line(path.stem, _MAX_NAME_CHARS), right, text


def shares(name: str, group: pd.DataFrame) -> dict[str, Any]:
    """Returns the table's row for the responses of ``group``."""
    sums = group.sum(numeric_only=True).astype(float)
    later, tokens, held = (max(sums[name], 1.0) for name in ("later_steps", "tokens", "held"))
    line = {"responses of": name.replace("|", "\\|"), "number": str(len(group))}
    line["tokens a step"] = f"{tokens / max(sums['steps'], 1.0):.1f}"
    line["candidate"] = f"{sums['candidates'] / later:.1%}"
    for rule in ("default", *map(_of_pages, PAGE_SIZES), *(f"d={block}" for block in BLOCKS)):
        line[rule] = f"{sums[f'end_{rule}'] / tokens:.1%} / {sums[f'time_{rule}'] / held:.1%}"
    for cosine in COSINES:
        line[f"cosine above {cosine}"] = f"{sums[f'cosine_{cosine}'] / later:.1%}"
    return line


def work(options: Options) -> None:
    """Measure all responses, print the table and write it. Raises ValueError if there is no response."""
    speller = Speller(options.tokenizer)
    left_out: list[str] = []
    rows = [
        {"dataset": dataset, "right": right, **measure(*speller.spell(text))}
        for dataset, right, text in read(options, left_out)
    ]
    if not rows:
        raise ValueError(f"no responses in {', '.join(map(str, options.traces))}")
    frame = pd.DataFrame(rows)
    lines = [shares("all of them", frame)]
    for name, part in frame.groupby("dataset", sort=False):
        lines.append(shares(str(name), part))
        judged = dict(list(part[part["right"] != ""].groupby("right")))
        if len(judged) == 2:
            lines += [shares(f"{name}, {right}", some) for right, some in judged.items()]
    head = f"Tokens: `{speller.name}`. {len(left_out)} lines left out.\n\n{_NOTE}\n\n"
    text = head + pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True) + "\n"
    write_whole(options.out / "redundancy.md", text)
    print(text)


if __name__ == "__main__":
    command.run(Options, work)

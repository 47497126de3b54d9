# SPDX-License-Identifier: Apache-2.0
"""Long recorded responses cut into shorter ones, for replays that have no hour to run.

Pieces repeat themselves nearly as much: of the looping AIME responses 54% of the tokens could share
memory over time, of their pieces of 4,000 tokens 48% (docs/benchmarks.md)."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.runs.folder import write_whole

_STEP = re.compile(r".*?\n\n|.+\Z", re.DOTALL)


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
    records: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    tokens: Sequence[int],
    least: int,
    path: Path,
) -> int:
    """Write the pieces of all records of at least ``least`` tokens as JSONL; return how many.
    ``tokens`` are lengths of pieces, in turn for each record."""
    long = [record for record in records if record["max_tokens"] >= least]
    lines = [
        {"id": f"{record['id']}.{at}", "question": record["prompt"], "response": piece}
        for number, record in enumerate(long)
        for at, piece in enumerate(cut(record["target"], tokenizer, tokens[number % len(tokens)]))
    ]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)

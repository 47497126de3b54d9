# SPDX-License-Identifier: Apache-2.0
"""Shows one response with the steps that share memory marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text
from tokenizers import Tokenizer

from eval.runs.records import Response


def marked_response(
    report: dict[str, Any], responses: Sequence[Response], checkpoint: Path
) -> Text:
    """The response among ``report["recent"]`` that shares most, shared tokens highlighted.

    Args:
        report: One scheduler's ``GET /reasoncache``.
        responses: To requests that it tells of.
        checkpoint: Folder of the tokenizer that the server used.
    """
    answers = {response.request_id: response for response in responses}
    known = [entry for entry in report.get("recent", ()) if entry["rid"] in answers]
    if not known:
        return Text("no finished request with shared steps to show")
    entry = max(known, key=lambda e: e["shared_positions"])
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(answers[entry["rid"]].text, add_special_tokens=False).ids
    return _render([tokenizer.decode([i]) for i in ids], entry)


def _render(words: Sequence[str], entry: dict[str, Any]) -> Text:
    start, block = entry["prompt_tokens"], entry["block"]
    shared = {at - start for dst, _ in entry["blocks"] for at in range(dst, dst + block)}
    out = Text()
    share = entry["shared_positions"] / (entry["prompt_tokens"] + entry["output_tokens"])
    out.append(
        f"\nRequest {entry['rid']}: {entry['shared_positions']} positions share earlier slots ({share:.0%}). "
    )
    out.append("Green text owns no memory.\n\n", style="green")
    for number, word in enumerate(words):
        blank = not word.strip()
        out.append("\n" if blank else word + " ", style="green" if number in shared else "")
    return out

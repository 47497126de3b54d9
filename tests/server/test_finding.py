# SPDX-License-Identifier: Apache-2.0
"""Tests ``documents=auto``: prompts that read the cached KV of documents that no client marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.cache import EditableCache, Reader
from eval.serving import ServerProcess
from tests.server import specs
from tests.server.problems import OPT_OUT, prompts, report

SYSTEM = list(range(3, 23))
AUTO = specs.CORRECTED.having("auto", "--reasoncache-set documents=auto")


@pytest.fixture(scope="module")
def texts(model_path: Path) -> list[list[int]]:
    """Documents of some 90 tokens. No two begin or end with the same token."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    problems = prompts(8, seed=5)
    pairs = zip(problems[::2], problems[1::2], strict=True)
    inner = [tokenizer(first + second)["input_ids"] for first, second in pairs]
    return [[30 + at, *text, 40 + at] for at, text in enumerate(inner)]


@pytest.fixture(scope="module")
def reader(model_path: Path) -> Reader:
    return Reader(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))


def _prompt(documents: Sequence[list[int]], question: int) -> list[int]:
    return [*SYSTEM, *itertools.chain(*documents), 50 + question, *range(30, 41)]


def _ask(server: ServerProcess, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    sampling |= options.pop("sampling", {})
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **options}
    response = server.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def _composed(reader: Reader, documents: Sequence[list[int]]) -> EditableCache:
    """A composed KV cache: each document is computed right after SYSTEM, then moved by rotating its keys."""
    whole = reader.cache(1, 2048)
    reader.forward(whole, SYSTEM)
    for document in documents:
        alone = reader.cache(1, 512)
        reader.forward(alone, [*SYSTEM, *document])
        reads = [(whole.length + at, len(SYSTEM) + at) for at in range(len(document))]
        whole.redirect(0, reads, reader.rotation, (alone, 0))
        whole.length += len(document)
    return whole


def _off(reader: Reader, cache: EditableCache, rest: Sequence[int], found: dict[str, Any]) -> float:
    """Largest difference of the response's log-probabilities from those of a model that reads ``cache`` before
    the prompt's ``rest``."""
    pairs = found["meta_info"]["output_token_logprobs"]
    tokens = [pair[1] for pair in pairs]
    length = cache.length
    logits = reader.forward(cache, [*rest, *tokens])[0]
    cache.length = length
    expected = logits[len(rest) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((expected - torch.tensor([pair[0] for pair in pairs])).abs().max())


@pytest.mark.parametrize("server", [AUTO], indirect=True)
def test_documents_are_found_and_read_from_their_own_copies(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    """Log-probabilities are those of a model that reads each document as computed alone, however often it was
    read before. Who opts out, or asks for exact figures of the prompt, gets those of a full prefill."""
    composed = 0
    for number, order in enumerate(itertools.permutations(range(len(texts)))):
        documents = [texts[at] for at in order]
        prompt = _prompt(documents, number)
        before = report(server)["totals"]
        found = _ask(server, prompt)
        documents_read = (
            report(server)["totals"]["documents_composed"] - before["documents_composed"]
        )
        rest = prompt[len(SYSTEM) + sum(map(len, documents)) :]
        if documents_read == len(documents):
            composed += 1
            assert _off(reader, _composed(reader, documents), rest, found) < 1e-4
    # All but the first orders, in which documents are seen for the first or second time.
    assert composed > 12
    full = reader.cache(1, 2048)
    reader.forward(full, prompt[: -len(rest)])
    assert _off(reader, full, rest, found) > 1e-3
    totals = report(server)["totals"]
    for options in (
        {"sampling": OPT_OUT},
        {"logprob_start_len": 0},
        {"sampling": {"max_new_tokens": 0}},
    ):
        told = _ask(server, prompt, **options)
        if not told["meta_info"]["output_token_logprobs"]:
            continue
        assert _off(reader, full, rest, told) < 1e-4
    assert _ask(server, prompt, extra_key="theirs")["meta_info"]["cached_tokens"] == 0
    assert report(server)["totals"]["prompts_composed"] == totals["prompts_composed"]


@pytest.mark.parametrize("server", [AUTO], indirect=True)
def test_hostile_prompts_are_answered(server: ServerProcess, texts: list[list[int]]) -> None:
    """Repetitive texts, equal prompts, prompts of text or messages, and prompts that SGLang refuses."""
    for number in range(4):
        _ask(server, [*SYSTEM, *[7] * 300, 40 + number, *[7] * 200, *range(30, 40)])
        _ask(server, [*SYSTEM, *[7] * 500])
    words = " ".join(["one two three four five six seven eight nine ten"] * 10)
    turns = [{"role": "user", "content": f"{at} {words}"} for at in range(4)]
    for order in itertools.islice(itertools.permutations(turns), 6):
        body = {"model": "any", "messages": order, "max_tokens": 4}
        assert server.post("/v1/chat/completions", json=body).status_code == 200
        text = "".join(turn["content"] for turn in order)
        body = {"text": text, "sampling_params": {"max_new_tokens": 4}}
        assert server.post("/generate", json=body).status_code == 200
    for wrong in ({"temperature": -1}, {"json_schema": "{"}, {"max_new_tokens": 10**6}):
        body = {"input_ids": _prompt(texts, 8), "sampling_params": wrong}
        told = server.post("/generate", json=body)
        assert told.status_code == 400, told.text
    body = {"input_ids": _prompt(texts * 1000, 8), "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", json=body).status_code == 400
    assert len(_ask(server, _prompt(texts, 9))["meta_info"]["output_token_logprobs"]) == 24

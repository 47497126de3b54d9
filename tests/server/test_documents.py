# SPDX-License-Identifier: Apache-2.0
"""Prompts composed of documents that were prefilled before."""

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
from tests.server.harness import assert_whole
from tests.server.problems import prompts, report

SYSTEM, QUESTION = list(range(3, 23)), list(range(30, 41))


@pytest.fixture(scope="module")
def texts(model_path: Path) -> list[list[int]]:
    """Documents of 20 to 60 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [tokenizer(text)["input_ids"] for text in prompts(8, seed=5)]


@pytest.fixture(scope="module")
def reader(model_path: Path) -> Reader:
    return Reader(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))


def _spans(documents: Sequence[Sequence[int]], start: int = len(SYSTEM)) -> list[list[int]]:
    bounds = itertools.accumulate(map(len, documents), initial=start)
    return [list(span) for span in itertools.pairwise(bounds)]


def _ask(
    server: ServerProcess,
    documents: Sequence[list[int]],
    marked: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """The body of a response to system prompt, documents and question."""
    prompt = [*SYSTEM, *itertools.chain(*documents), *QUESTION]
    custom = {"documents": _spans(documents) if marked is None else marked}
    custom |= options.pop("custom_params", {})
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, "custom_params": custom}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **options}
    response = server.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def _logprobs(found: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    pairs = found["meta_info"]["output_token_logprobs"]
    return [pair[1] for pair in pairs], torch.tensor([pair[0] for pair in pairs])


def _composed(reader: Reader, documents: Sequence[list[int]]) -> EditableCache:
    """Each document behind the system prompt, its keys rotated to its place."""
    whole = reader.cache(1, 2048)
    reader.forward(whole, SYSTEM)
    for document in documents:
        alone = reader.cache(1, 512)
        reader.forward(alone, [*SYSTEM, *document])
        reads = [(whole.length + at, len(SYSTEM) + at) for at in range(len(document))]
        whole.redirect(0, reads, reader.rotation, (alone, 0))
        whole.length += len(document)
    return whole


def _off(reader: Reader, cache: EditableCache, found: dict[str, Any]) -> float:
    """Largest distance of the response's log-probabilities from those behind a cached prefix."""
    tokens, logprobs = _logprobs(found)
    logits = reader.forward(cache, [*QUESTION, *tokens])[0]
    expected = logits[len(QUESTION) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((expected - logprobs).abs().max())


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_documents_are_read_in_any_order(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    """As a loop reads the same KV, and unlike a prompt that is computed in full."""
    orders = ([2, 0, 1], [3, 2, 0], [1, 3, 2, 0])
    for order in orders:
        documents = [texts[at] for at in order]
        found = _ask(server, documents)
        assert found["meta_info"]["cached_tokens"] == len(SYSTEM) + sum(map(len, documents))
        assert _off(reader, _composed(reader, documents), found) < 1e-4
        full = reader.cache(1, 2048)
        reader.forward(full, [*SYSTEM, *itertools.chain(*documents)])
        assert _off(reader, full, found) > 1e-3
    totals = report(server)["totals"]
    assert totals["prompts_composed"] == len(orders)
    assert totals["documents_composed"] == sum(map(len, orders))
    assert_whole(server)


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
@pytest.mark.parametrize("repair", ["first:6", "query:.2"])
def test_tokens_are_computed_again_at_their_places(
    server: ServerProcess, reader: Reader, texts: list[list[int]], repair: str
) -> None:
    for order in ([3, 1, 0], [2, 0, 1, 3]):
        documents = [texts[at] for at in order]
        before = report(server)["totals"]["tokens_repaired"]
        custom = {"documents_repair": repair}
        found = _ask(server, documents, custom_params=custom)
        again = report(server)["totals"]["tokens_repaired"] - before
        cached = len(SYSTEM) + sum(map(len, documents)) - again
        assert again > 10 and found["meta_info"]["cached_tokens"] == cached
        cache = _composed(reader, documents)
        off = _off(reader, _composed(reader, documents), found)
        print(repair, again, off)
        if repair.startswith("first"):
            positions = [a + at for a, b in _spans(documents)[1:] for at in range(min(6, b - a))]
            prompt = [*SYSTEM, *itertools.chain(*documents)]
            reader.again(cache, [prompt[at] for at in positions], positions)
            assert again == len(positions)
            assert _off(reader, cache, found) < 1e-4 < off

# SPDX-License-Identifier: Apache-2.0
"""Tests composed prompts: prompts that read the cached KV of documents prefilled before. Clients mark these
documents, or the server finds them (``documents=auto``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.cache import EditableCache, Reader
from eval.serving import ServerProcess
from tests.server import specs
from tests.server.problems import OPT_OUT, prompts, report

SYSTEM = list(range(3, 23))
QUESTION = list(range(30, 41))
#: Finds documents that are not marked.
AUTO = specs.CORRECTED.having("auto", "--reasoncache-set documents=auto")
ON_RANKS = [specs.CORRECTED, pytest.param(specs.TWO_RANKS, marks=specs.FEW_CORES)]


@pytest.fixture(scope="module")
def texts(model_path: Path) -> list[list[int]]:
    """Documents of 38 to 50 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [tokenizer(text)["input_ids"] for text in prompts(8, seed=5)]


@pytest.fixture(scope="module")
def reader(model_path: Path) -> Reader:
    return Reader(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))


def _spans(documents: Sequence[Sequence[int]], start: int = len(SYSTEM)) -> list[list[int]]:
    bounds = itertools.accumulate(map(len, documents), initial=start)
    return [list(span) for span in itertools.pairwise(bounds)]


def _ask(
    server: ServerProcess, documents: Sequence[list[int]], marked: Any = None, **options: Any
) -> dict[str, Any]:
    """Sends system prompt, documents and question. Returns the response's body."""
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


def _off(
    reader: Reader,
    cache: EditableCache,
    found: dict[str, Any],
    question: Sequence[int] = QUESTION,
) -> float:
    """Largest difference of the response's log-probabilities from those of a model that reads ``cache``."""
    tokens, logprobs = _logprobs(found)
    length = cache.length
    logits = reader.forward(cache, [*question, *tokens])[0]
    cache.length = length
    expected = logits[len(question) - 1 : -1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((expected - logprobs).abs().max())


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_documents_are_read_in_any_order(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    """Log-probabilities are those of a model that reads the composed KV, not those of a full prefill."""
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


@pytest.mark.parametrize("server", ON_RANKS, indirect=True)
def test_the_first_and_last_tokens_are_computed_again(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    """Tokens of moved documents are recomputed at their new positions, even in a chunked prefill."""
    for order, repair, most, last in (
        ([3, 1, 0], "first:6", 6, 0),
        ([2, 0, 1, 3], "first:40", 40, 0),
        ([1, 3, 2], "ends:3", 3, 6),
    ):
        documents = [texts[at] for at in order]
        spans = _spans(documents)[1:]
        again = [
            at
            for start, end in spans
            for at in range(start, end)
            if at - start < most or end - at <= last
        ]
        found = _ask(server, documents, custom_params={"documents_repair": repair})
        cached = len(SYSTEM) + sum(map(len, documents)) - len(again)
        assert found["meta_info"]["cached_tokens"] == cached
        cache = _composed(reader, documents)
        prompt = [*SYSTEM, *itertools.chain(*documents)]
        assert _off(reader, cache, found) > 1e-3
        reader.again(cache, [prompt[at] for at in again], again)
        assert _off(reader, cache, found) < 1e-4


@pytest.mark.parametrize("server", ON_RANKS, indirect=True)
def test_what_the_query_attends_to_is_computed_again(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    documents = [texts[at] for at in (3, 1, 2)]
    found = _ask(server, documents, custom_params={"documents_repair": "query:.2"})
    cache = _composed(reader, documents)
    prompt = [*SYSTEM, *itertools.chain(*documents)]
    received = torch.zeros(cache.length)
    reader.forward(
        cache, QUESTION, watch=lambda *seen: received.add_(seen[2].sum((0, 1, 2))[: len(received)])
    )
    cache.length -= len(QUESTION)
    moved = len(SYSTEM) + len(documents[0])
    count = round(0.2 * (len(prompt) - len(SYSTEM)))
    again = (received[moved : len(prompt)].topk(count).indices + moved).sort().values.tolist()
    assert found["meta_info"]["cached_tokens"] == len(prompt) - count
    assert _off(reader, cache, found) > 1e-3
    reader.again(cache, [prompt[at] for at in again], again)
    assert _off(reader, cache, found) < 1e-4


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_who_opts_out_or_has_one_document_reads_what_stock_reads(
    server: ServerProcess, reader: Reader, texts: list[list[int]]
) -> None:
    for documents, custom in ((texts[:1], {}), (texts[1:4], OPT_OUT["custom_params"])):
        _ask(server, documents)
        found = _ask(server, documents, custom_params=custom)
        full = reader.cache(1, 2048)
        reader.forward(full, [*SYSTEM, *itertools.chain(*documents)])
        assert _off(reader, full, found) < 1e-4


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_another_salt_has_documents_of_its_own(
    server: ServerProcess, texts: list[list[int]]
) -> None:
    documents = texts[4:7]
    body = {"input_ids": [*SYSTEM, *documents[1]], "sampling_params": {"max_new_tokens": 1}}
    server.post("/generate", json={**body, "cache_salt": "theirs"}).raise_for_status()
    prompt = [*SYSTEM, *itertools.chain(*documents), *QUESTION]
    # The server prefills each document under the request's salt, and reads none cached under another salt.
    sampling = {"max_new_tokens": 0, "custom_params": {"documents": _spans(documents)}}
    for salt, composed in (("theirs", 1), ("ours", 1)):
        before = report(server)["totals"]["prompts_composed"]
        body = {"input_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
        found = server.post("/generate", json=body).json()
        assert found["meta_info"]["cached_tokens"] == len(prompt) - len(QUESTION)
        assert report(server)["totals"]["prompts_composed"] == before + composed


WRONG = [
    ("messages", "a list of 1 to 256 spans, got 'messages'"),
    ([], "got 0 entries"),
    ([[20, 30]] * 1_000_000, "got 1000000 entries"),
    ([[20, 30], [31, 40]], "documents[1] must begin where the one before it ends, 30, got 31"),
    ([[20, 30], [25, 40]], "documents[1] must begin where the one before it ends, 30, got 25"),
    ([[20, 30], [30, 100_000]], "documents[1] must end before the last of"),
    ([[20, 20]], "documents[0] must hold a token"),
    ([[-1, 20]], "documents[0] must hold a token"),
    ([[1.5, 20]], "documents[0] must be [start, end]"),
    ([[True, 20]], "documents[0] must be [start, end]"),
    ([[1, 2, 3]], "documents[0] must be [start, end]"),
]


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_wrong_spans_are_refused_by_name(server: ServerProcess, texts: list[list[int]]) -> None:
    prompt = [*SYSTEM, *texts[0], *texts[1], *QUESTION]
    process = psutil.Process(server.pid)
    for spans, message in WRONG:
        sampling = {"max_new_tokens": 1, "custom_params": {"documents": spans}}
        start = sum(process.cpu_times()[:2])
        told = server.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        assert told.status_code == 400 and message in told.text, told.text
        assert sum(process.cpu_times()[:2]) - start < (3 if len(spans) > 1000 else 0.5)
    custom = {"documents": _spans(texts[:2]), "documents_repair": "query:2"}
    sampling = {"max_new_tokens": 1, "custom_params": custom}
    told = server.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert told.status_code == 400 and "query:SHARE" in told.text
    # If SGLang itself refuses a request, the request's documents are not prefilled.
    new = [texts[0][:15:-1], texts[1][:15:-1]]
    for wrong in ({"temperature": -1}, {"max_new_tokens": 1_000_000}, {"json_schema": "{"}):
        prompt = [*SYSTEM, *new[0], *new[1], *QUESTION]
        sampling = {**wrong, "custom_params": {"documents": _spans(new)}}
        told = server.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
        assert told.status_code == 400, told.text
    assert _ask(server, new, _spans(new[:1]))["meta_info"]["cached_tokens"] <= len(SYSTEM)


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
@pytest.mark.parametrize("abort", [{"abort_all": True}, {"rid": "mine"}], ids=["all", "rid"])
def test_an_abort_ends_one_whose_documents_are_prefilled(
    server: ServerProcess, abort: dict[str, Any]
) -> None:
    cached = list[int]()
    for attempt in range(5):
        documents = [[at % 90 + 5, 5 + attempt, *range(5, 39)] for at in range(40)]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_ask, server, documents, _spans(documents), rid="mine")
            while not asked.done():
                server.post("/abort_request", json=abort).raise_for_status()
                wait([asked], timeout=0.01)
        answer = asked.result()["meta_info"]
        assert (answer["id"], answer["finish_reason"]["type"]) == ("mine", "abort")
        # The id is free again.
        again = _ask(server, documents[-1:], rid="mine")["meta_info"]
        assert again["finish_reason"]["type"] == "length"
        cached.append(again["cached_tokens"])
        if cached[-1] <= len(SYSTEM):
            return
    # On a busy machine an abort may come when all documents are prefilled, but not each time.
    pytest.fail(f"the last document was prefilled each time: {cached}")


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_an_id_in_use_is_refused_while_documents_are_prefilled(
    server: ServerProcess, texts: list[list[int]], stream: bool
) -> None:
    """Of two requests with one id, one is refused, as by stock SGLang. The other can be aborted, even while
    generation is paused, so that no prefill ends."""
    prompt = [*SYSTEM, *itertools.chain(*texts[:3]), *QUESTION]
    custom = {"documents": _spans(texts[:3])}
    sampling = {"max_new_tokens": 4, "custom_params": custom}
    body = {"input_ids": prompt, "sampling_params": sampling, "rid": "mine", "stream": stream}
    refused = "Duplicate request ID detected: mine"
    server.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = {pool.submit(server.post, "/generate", json=body) for _ in range(2)}
            [first], others = wait(asked, timeout=60, return_when=FIRST_COMPLETED)
            assert refused in first.result().text and len(others) == 1
            server.post("/abort_request", json={"rid": "mine"}).raise_for_status()
            [answered], _ = wait(others, timeout=60)
    finally:
        server.post("/continue_generation", json={}).raise_for_status()
    text = answered.result().text
    assert '"type":"abort"' in text and refused not in text, text
    again = server.post("/generate", json={**body, "stream": False})
    assert again.json()["meta_info"]["finish_reason"]["type"] == "length", again.text


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_a_client_marks_messages(server: ServerProcess, texts: list[list[int]]) -> None:
    words = ["one two three four five six", "seven eight nine ten", "eleven twelve thirteen"]
    turns = [{"role": "user", "content": text} for text in ("be brief", *words, "which is last")]

    def ask(**custom: Any) -> Any:
        body = {"model": "any", "messages": turns, "max_tokens": 4, "custom_params": custom}
        return server.post("/v1/chat/completions", json=body)

    for documents in ([0, 1, 2], "messages", [2, 3]):
        before = report(server)["totals"]
        assert ask(documents=documents).status_code == 200
        totals = report(server)["totals"]
        count = 2 if documents == [2, 3] else 3
        assert totals["documents_composed"] == before["documents_composed"] + count
    for documents, message in (([3, 2], "follow one another"), ([3, 4], "before the last of 5")):
        told = ask(documents=documents)
        assert told.status_code == 400 and message in told.text, told.text


@pytest.mark.parametrize("server", [specs.EXACT], indirect=True)
def test_documents_in_a_server_that_is_short(server: ServerProcess, texts: list[list[int]]) -> None:
    """Many requests arrive at once, some with two samples, but the KV pool has room for only a few. All
    requests are answered, except those whose client leaves, and no slot is lost."""
    orders = list(itertools.permutations(range(6), 4))[::9]

    def ask(number: int) -> int:
        documents = [texts[at] for at in orders[number % len(orders)]]
        custom = {"documents_repair": ("none", "first:8", "query:.1")[number % 3]}
        sampling = {
            "temperature": 1,
            "max_new_tokens": 200,
            "ignore_eos": True,
            "n": 1 + number % 2,
        }
        prompt = [*SYSTEM, *itertools.chain(*documents), *QUESTION]
        marks = {"custom_params": {"documents": _spans(documents), **custom}}
        body = {"input_ids": prompt, "sampling_params": {**sampling, **marks}}
        if number % 4 == 3:
            with pytest.raises(httpx.TimeoutException):
                server.post("/generate", json={**body, "stream": number % 8 == 3}, timeout=0.1)
            return 0
        told = server.post("/generate", json=body)
        assert told.status_code == 200, told.text
        bodies = told.json() if isinstance(told.json(), list) else [told.json()]
        return sum(body["meta_info"]["completion_tokens"] for body in bodies)

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(ask, range(48))) == 200 * (24 + 2 * 12)
    totals = report(server)["totals"]
    assert totals["prompts_composed"] > 36 and totals["tokens_repaired"] > 0


@pytest.fixture(scope="module")
def unmarked(texts: list[list[int]]) -> list[list[int]]:
    """Documents of some 90 tokens. No two begin or end with the same token."""
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [[30 + at, *one, *other, 40 + at] for at, (one, other) in enumerate(pairs)]


def _ask_unmarked(
    server: ServerProcess, documents: Sequence[list[int]], question: Sequence[int], **more: Any
) -> dict[str, Any]:
    """Sends system prompt, documents and question without marks. Returns the response's body."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    sampling |= more.pop("sampling", {})
    prompt = [*SYSTEM, *itertools.chain(*documents), *question]
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
    response = server.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("server", [AUTO], indirect=True)
def test_documents_that_nobody_marked(
    server: ServerProcess, reader: Reader, unmarked: list[list[int]]
) -> None:
    """Log-probabilities are those of a model that reads each document as computed alone, however often it was
    read before. Who opts out, has another key, or asks for figures of the prompt reads a full prefill."""
    composed = 0
    for number, order in enumerate(itertools.permutations(range(len(unmarked)))):
        documents = [unmarked[at] for at in order]
        question = [50 + number, *QUESTION]
        before = report(server)["totals"]["documents_composed"]
        found = _ask_unmarked(server, documents, question)
        if report(server)["totals"]["documents_composed"] - before == len(documents):
            composed += 1
            assert _off(reader, _composed(reader, documents), found, question) < 1e-4
    # All but the first orders, which show documents for the first or second time.
    assert composed > 12
    full = reader.cache(1, 2048)
    reader.forward(full, [*SYSTEM, *itertools.chain(*documents)])
    assert _off(reader, full, found, question) > 1e-3
    totals = report(server)["totals"]
    for options in ({"sampling": OPT_OUT}, {"logprob_start_len": 0}, {"extra_key": "theirs"}):
        exact = _ask_unmarked(server, documents, question, **options)
        assert _off(reader, full, exact, question) < 1e-4
    assert report(server)["totals"]["prompts_composed"] == totals["prompts_composed"]


@pytest.mark.parametrize("server", [AUTO], indirect=True)
def test_hostile_prompts_without_marks(server: ServerProcess, unmarked: list[list[int]]) -> None:
    """Repetitive texts, equal prompts, prompts of text or messages, and prompts that SGLang refuses."""
    for number in range(4):
        _ask_unmarked(server, [[7] * 300, [40 + number], [7] * 200], QUESTION)
        _ask_unmarked(server, [[7] * 500], [7])
    words = " ".join(["one two three four five six seven eight nine ten"] * 10)
    turns = [{"role": "user", "content": f"{at} {words}"} for at in range(4)]
    for order in itertools.islice(itertools.permutations(turns), 6):
        body = {"model": "any", "messages": order, "max_tokens": 4}
        assert server.post("/v1/chat/completions", json=body).status_code == 200
        text = "".join(turn["content"] for turn in order)
        body = {"text": text, "sampling_params": {"max_new_tokens": 4}}
        assert server.post("/generate", json=body).status_code == 200
    long = [*SYSTEM, *itertools.chain(*unmarked * 1000)]
    prompt = long[:400]
    for ids, wrong in (
        (prompt, {"temperature": -1}),
        (prompt, {"json_schema": "{"}),
        (prompt, {"max_new_tokens": 10**6}),
        (long, {}),
    ):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, **wrong}}
        told = server.post("/generate", json=body)
        assert told.status_code == 400, told.text
    answer = _ask_unmarked(server, unmarked, QUESTION)["meta_info"]
    assert len(answer["output_token_logprobs"]) == 24

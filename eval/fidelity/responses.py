# SPDX-License-Identifier: Apache-2.0
"""Recorded responses and the model that reads them, as all programs of ``eval.fidelity`` take them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from eval.command import option
from eval.fidelity.cache import Reader
from eval.jsonl import read_rows, text_of
from sglang_reasoncache.config import ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary

#: A response counts as looping if at least a tenth of its sequences of 32 tokens also occur earlier in it.
_RUN = 32
_LOOPS = 0.1


def device_option() -> Any:
    """A dataclass field (``eval.command.option``) of programs that load a model: the device."""
    return option(
        "cuda" if torch.cuda.is_available() else "cpu", "device of the model, as PyTorch names it"
    )


def dtype_option() -> Any:
    """A dataclass field (``eval.command.option``) of programs that load a model: the data type."""
    return option(
        "float32",
        "data type of weights and KV: float32, bfloat16 or float16",
        choices=("float32", "bfloat16", "float16"),
    )


@dataclass(frozen=True)
class OnResponses:
    """Options of a program that reads responses with a model. A program sets its own defaults."""

    model: Path = option(text="Hugging Face folder of a causal model with rotary positions")
    responses: Path = option(text="JSONL file of rows with question and response")
    cap: int = option(1500, "most tokens of question and response", least=1)
    shortest: int = option(100, "shorter responses are left out", least=1)
    device: str = device_option()
    dtype: str = dtype_option()

    def reader(self) -> Reader:
        """The model. See :func:`load`."""
        return load(self.model, self.dtype, self.device, self.cap)

    def read(self, tokenizer: Any) -> Iterator["Response"]:
        """The responses. See :func:`read`."""
        return read(self.responses, tokenizer, self.cap, self.shortest)


class Response(NamedTuple):
    """A question and its response, at most ``--cap`` tokens. The first ``prompt`` tokens are the question."""

    name: str
    group: str
    tokens: tuple[int, ...]
    prompt: int


def read(path: Path, tokenizer: Any, cap: int, shortest: int) -> Iterator[Response]:
    """Yields responses, cut so that question and response have at most ``cap`` tokens. Skips responses below
    ``shortest`` tokens. Rows have ``question``, ``response``, perhaps ``id``, ``correct``. A folder yields the
    first response to each question. Raises OSError if a file cannot be read, ValueError if a line is bad."""
    questions: set[str] = set()
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, row in read_rows(file, _texts):
            if path.is_dir() and row["question"] in questions:
                continue
            questions.add(row["question"])
            response = _tokenized({"id": f"{file.stem}:{number}", **row}, tokenizer, cap)
            if len(response.tokens) - response.prompt >= shortest:
                yield response


def loops(tokens: Sequence[int]) -> bool:
    """Whether at least a tenth of the sequences of 32 tokens also occur earlier in the response."""
    runs = [tuple(tokens[i : i + _RUN]) for i in range(len(tokens) - _RUN + 1)]
    return bool(runs) and 1 - len(set(runs)) / len(runs) >= _LOOPS


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: text_of(row, name) for name in ("question", "response")}}


def _tokenized(row: dict[str, Any], tokenizer: Any, cap: int) -> Response:
    question = row["question"] + "\n\n"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": row["question"]}]
        question = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt, response = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (question, row["response"])
    )
    response = response[: max(0, cap - len(prompt))]
    group = "right" if row.get("correct") is True else "loops" if loops(response) else "wrong"
    return Response(str(row["id"]), group, (*prompt, *response), len(prompt))


def load(folder: Path, dtype: str, device: str, cap: int) -> Reader:
    """Load the model. Raises OSError or ValueError if that fails or ``cap`` exceeds the model's positions."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=getattr(torch, dtype)
    )
    longest = model.config.get_text_config().max_position_embeddings
    if longest < cap:
        raise ValueError(f"--cap must be at most the model's {longest} positions")
    return Reader(model.to(device))


def pairs_of(response: Response, vocabulary: Vocabulary, block: int) -> list[BlockPair]:
    """The k-th blocks of each step and of the most similar step before it, by the paper's filter."""
    config = ReasonCacheConfig.from_mapping(
        {"preset": "reasoncache", "align": "index", "block": block, "percentile": 100}
    )
    request = RequestFilter(
        filter_config(config), TokenClasses(vocabulary), vocabulary, response.prompt
    )
    proposals = request.push(response.tokens[response.prompt :])
    return [pair for proposal in proposals for pair in proposal.pairs]

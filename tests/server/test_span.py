# SPDX-License-Identifier: Apache-2.0
"""With a reasoning parser, only the part it marks may share."""

from __future__ import annotations

from typing import Any

import pytest

from eval.serving import ServerProcess
from sglang_reasoncache.native import NativeUnavailable, library
from tests.server.harness import generate
from tests.server.problems import MAX_TOKENS, problems, report
from tests.server.specs import CORRECTED

THINK, END_OF_THINKING = "<think>", "</think>"
THINK_ID = "4"
SERVER = pytest.mark.parametrize("server", [CORRECTED], indirect=True)


def _respond(server: ServerProcess, prompt: str, **sampling: object) -> tuple[str, Any]:
    """Output text, and what the endpoint tells of the request."""
    sampling = {"skip_special_tokens": False, **sampling}
    body = generate(server, prompt, MAX_TOKENS, sampling_params=sampling)
    recent = {entry["rid"]: entry for entry in report(server)["recent"]}
    return body["text"], recent[body["meta_info"]["id"]]


def _prompts(count: int) -> list[str]:
    return [f"<|user|> {p.prompt} <|assistant|>" for p in problems(count, seed=31)]


@SERVER
def test_blocks_end_before_the_reasoning_does(server: ServerProcess) -> None:
    found = 0
    for prompt in _prompts(4):
        text, entry = _respond(server, prompt)
        reasoning, end, _answer = text.partition(END_OF_THINKING)
        assert end, "the embedded model closes its reasoning"
        # One token a word: the tokenizer of the embedded model splits at white space.
        tokens = server.post("/tokenize", json={"prompt": reasoning}).json()["count"]
        last = max((dst + 8 for dst, _src in entry["blocks"]), default=0)
        assert last <= entry["prompt_tokens"] + tokens
        found += len(entry["blocks"])
    assert found > 0


@SERVER
def test_a_response_without_reasoning_shares_nothing(server: ServerProcess) -> None:
    """The prompt opens and closes the reasoning, as templates do where the client wants none."""
    for prompt in _prompts(2):
        # The model would open it again by itself.
        text, entry = _respond(
            server, f"{prompt} {THINK} {END_OF_THINKING}", logit_bias={THINK_ID: -100.0}
        )
        assert THINK not in text and text.count("\n\n") > 4
        assert entry["blocks"] == []


@SERVER
def test_distances_are_native(server: ServerProcess) -> None:
    try:
        library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    seen = report(server)
    assert seen["distances"] == "native"
    assert seen["threshold"]["observations"] > 0

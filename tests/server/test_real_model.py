# SPDX-License-Identifier: Apache-2.0
"""A language model: a server with sharing computes what the fidelity harness computes for the same
redirections, within a response and across samples of one prompt. ``make real-model`` makes the
model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.cache import Reader
from eval.serving import ServerProcess
from eval.small_reasoner import MODEL
from eval.small_reasoner.task import make_problem
from eval.tiny_reasoner.task import generate
from tests.server.harness import STRICT_CHECKS, assert_whole
from tests.server.problems import respond
from tests.server.reference import Replayed, assert_computed

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no {MODEL}: make real-model makes it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (
        "--enable-reasoncache --reasoncache-scope prompt --dtype float32 --max-total-tokens 8000"
    )
    log = tmp_path_factory.mktemp("real") / "server.log"
    process = ServerProcess(MODEL, flags=flags.split(), env=STRICT_CHECKS, log_path=log)
    process.start()
    yield process
    process.close()


def test_a_server_computes_what_the_harness_computes(server: ServerProcess) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    todo: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for problem in generate(3, 4, make=make_problem)
    ]
    reader = Reader(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    shared = 0
    for text in todo:
        found: dict[str, Any] = respond(server, [text], 1400)[0]
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        assert_computed(found, Replayed(reader, tokens, found).log_probs())
        shared += len(found["blocks"])
    assert shared > 40
    # Samples of one prompt.
    sampling = {"temperature": 1.0, "ignore_eos": True}
    samples = respond(server, todo[:1] * 4, 900, sampling_params=sampling)
    prompt = tokenizer(todo[0])["input_ids"]
    replayed = {
        found["rid"]: Replayed(reader, prompt + found["tokens"], found, number)
        for number, found in enumerate(samples)
    }
    for found in samples:
        assert_computed(found, replayed[found["rid"]].log_probs(replayed))
    assert sum(len(found["blocks_across"]) for found in samples) > 20
    assert_whole(server)

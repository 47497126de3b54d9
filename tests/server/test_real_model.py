# SPDX-License-Identifier: Apache-2.0
"""A language model: a server with sharing computes what the fidelity harness computes for the same
redirections. ``make real-model`` makes the model."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.fidelity.arms import default_name, parse
from eval.fidelity.cache import Reader
from eval.fidelity.replay import ArmCache
from eval.serving import ServerProcess
from eval.small_reasoner import MODEL
from eval.small_reasoner.task import generate
from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.server.harness import STRICT_CHECKS, assert_whole
from tests.server.problems import respond

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no {MODEL}: make real-model makes it"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--enable-reasoncache", "--dtype", "float32", "--max-total-tokens", "8000")
    log = tmp_path_factory.mktemp("real") / "server.log"
    process = ServerProcess(MODEL, flags=flags, env=STRICT_CHECKS, log_path=log)
    process.start()
    yield process
    process.close()


def log_probs(
    reader: Reader, tokens: list[int], prompt: int, blocks: list[list[int]]
) -> torch.Tensor:
    """fp32 ``[2, len(tokens) - prompt]``: of the response's tokens, dense and with ``blocks``."""
    cache = reader.cache(2, len(tokens))
    arm = ArmCache(parse(default_name()), reader, cache, prompt)
    shares = defaultdict(list)
    for written, dst, src in blocks:
        # The forward in flight has read the old slots.
        shares[written + 1].append(BlockPair(dst, src))
    found = []
    for end in sorted({*shares, prompt, len(tokens)}):
        start = cache.length
        logits = reader.forward(cache, tokens[start:end])[[0, arm.row]].log_softmax(-1)
        targets = torch.tensor(tokens[start + 1 : end + 1])
        found.append(logits[:, torch.arange(len(targets)), targets])
        arm.share(shares[end], AdaptiveThreshold(100, 0))
    return torch.cat(found, dim=1)[:, prompt - 1 :]


def test_a_server_computes_what_the_harness_computes(server: ServerProcess) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    todo: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for problem in generate(3, 4)
    ]
    reader = Reader(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    shared = 0
    for text in todo:
        found: dict[str, Any] = respond(server, [text], 1400)[0]
        tokens = tokenizer(text)["input_ids"] + found["tokens"]
        dense, ours = log_probs(reader, tokens, found["prompt_tokens"], found["blocks"])
        served = torch.tensor(found["logprobs"])
        assert (ours - served).abs().mean() < 1e-4
        assert (ours - served).abs().max() < 1e-2
        assert (dense - served).abs().mean() > 20 * (ours - served).abs().mean()
        shared += len(found["blocks"])
    assert shared > 40
    assert_whole(server)

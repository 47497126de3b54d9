# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang on the CPU platform: the ground every comparison stands on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from eval.serving import MODEL_NAME, ServerProcess
from tests.server.harness import (
    STOCK,
    STOCK_PAGE16,
    ServerPool,
    ServerSpec,
    generate,
    loads,
    wait_until_idle,
)

PROMPTS = ["1 + 2 =", "3 + 4 = 7 , so 7 + 5 =", "9", "a b c d e f g h i j k l m n o p q r s t"]
NEW_TOKENS = 40


def outputs(server: ServerProcess) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = pool.map(
            lambda text: generate(server, text, NEW_TOKENS, sampling_params={"ignore_eos": True}),
            PROMPTS,
        )
        return [reply["output_ids"] for reply in replies]


@pytest.mark.parametrize("server", [STOCK, STOCK_PAGE16], indirect=True)
def test_serves_and_caches_prefixes(server: ServerProcess) -> None:
    first, again = outputs(server), outputs(server)
    assert first == again
    assert all(len(tokens) == NEW_TOKENS for tokens in first)
    repeated = generate(server, PROMPTS[-1] + " u v w x y z", 1)
    assert repeated["meta_info"]["cached_tokens"] > 0


@pytest.mark.parametrize("server", [STOCK], indirect=True)
def test_openai_client_streams(server: ServerProcess) -> None:
    stream = server.openai().completions.create(
        model=MODEL_NAME, prompt=PROMPTS[0], max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.parametrize("server", [STOCK], indirect=True)
def test_idle_server_holds_nothing(server: ServerProcess) -> None:
    generate(server, PROMPTS[0], NEW_TOKENS)
    wait_until_idle(server)
    assert loads(server)["max_total_num_tokens"] > 0


@pytest.mark.parametrize("spec", [STOCK_PAGE16])
def test_page_size_does_not_change_outputs(servers: ServerPool, spec: ServerSpec) -> None:
    assert outputs(servers.get(spec)) == outputs(servers.get(STOCK))

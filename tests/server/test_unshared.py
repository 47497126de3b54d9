# SPDX-License-Identifier: Apache-2.0
"""Tests a server whose model's KV cannot be shared: it starts, and only its admission differs from SGLang's."""

import pytest

from tests.server import specs
from tests.server.harness import ServerPool, assert_whole, generate
from tests.server.problems import TO_THE_END, letters, report, series, told
from tests.server.reference import ROUNDING, Loop


@pytest.mark.long
def test_only_admission_learns(servers: ServerPool) -> None:
    """Requests that are retracted while slots are short have the log-probabilities of a plain :class:`Loop`."""
    server = servers.get(specs.UNSHARED)
    loop = Loop(servers.model(specs.UNSHARED.model))
    log = server.log_size()
    texts = letters(12)
    bodies = generate(server, texts, 400, return_logprob=True, **TO_THE_END)
    for text, found in zip(texts, told(server, bodies), strict=True):
        ids = loop.tokenizer(text)["input_ids"]
        assert loop.compare(ids, found).off.max() < ROUNDING
    seen = report(server)
    assert "this server uses OwnPool" in seen["uncorrected"]
    assert seen["disabled"] is None
    assert seen["totals"]["blocks_shared"] == 0
    # Each retraction raises the reserve, each token that is decoded while requests wait lowers it.
    assert seen["reserved_per_request"] != 64.0
    assert series(server)["uncorrected"] == 1
    text = server.log_text(log)
    assert "#retracted_reqs" in text and "#reserved per request" in text
    assert server.get("/reasoncache/response", params={"rid": "none"}).json()["parts"] is None
    assert_whole(server, log)

# SPDX-License-Identifier: Apache-2.0
"""Tests sharing with SGLang's hierarchical cache, which moves prefixes to the host, then into other slots."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole
from tests.server.problems import OPT_OUT, TO_THE_END, follow_up, prompts, report, respond
from tests.server.reference import ROUNDING, Beside, Loop, Selecting


def _evict_all(server: ServerProcess, on_disk: bool) -> None:
    """Makes SGLang evict all cached prefixes and reuse the slots for other positions. With ``on_disk`` also
    from the host."""
    for text in prompts(3, seed=22, each=24):
        respond(server, [text], 5, sampling_params=OPT_OUT)
    if on_disk:
        assert server.post("/flush_cache", params={"timeout": 30}).status_code == 200


@pytest.mark.parametrize("spec", specs.HOST_TIERS)
def test_a_prefix_that_was_on_the_host_is_read_as_before(
    servers: ServerPool, spec: specs.ServerSpec, tmp_path: Path
) -> None:
    """When SGLang loads a prefix from the host into new slots, the plugin must record for which position each
    key was computed, because a response that shares rotates keys from these positions. What shared is read by
    the next turn while it is in the pool; only the exact part is on the host."""
    on_disk = spec is specs.ON_DISK
    server = servers.get(spec.having("", f"--file-storage-path {tmp_path}") if on_disk else spec)
    log = server.log_size()
    server.post("/flush_cache")
    todo = prompts(4, seed=21, each=2)
    # 600 decode steps (601 tokens) are whole poll intervals, so polls fall on the same steps of each response.
    # So are those of all other requests.
    first = [respond(server, [text], 601, **TO_THE_END)[0] for text in todo]
    tokenizer = AutoTokenizer.from_pretrained(servers.model(spec.model))
    whole = tokenizer(todo[-1])["input_ids"] + first[-1]["tokens"]
    assert follow_up(server, whole, opts_out=False, most=17)["cached"] == len(whole) - 1
    _evict_all(server, on_disk)
    came = follow_up(server, whole, opts_out=False, most=17)
    exact = min(dst for _, dst, *_ in first[-1]["blocks"])
    if spec.model in specs.WINDOW_POOL:
        # The last window of the exact part was given up when the response had passed it.
        exact = first[-1]["prompt_tokens"]
    assert came["cached"] == exact
    # The first tokens are those of other prompts.
    assert came["cached_from"]["storage" if on_disk else "host"] >= came["cached"] - 8
    _evict_all(server, on_disk)
    again = [respond(server, [text], 601, **TO_THE_END)[0] for text in reversed(todo)]
    lost = []
    for one, other in zip(first, reversed(again), strict=True):
        came = other["cached_from"]
        if came.get("storage" if on_disk else "host", 0) < one["prompt_tokens"] - 8:
            lost.append(came)
        assert one["blocks"] == other["blocks"] and one["blocks"]
        assert one["tokens"] == other["tokens"]
        off = torch.tensor(one["logprobs"]) - torch.tensor(other["logprobs"])
        assert float(off.abs().max()) < 1e-3
    # Where windows have a pool of their own, stock SGLang computes one of these prompts again, too.
    assert len(lost) <= (spec.model in specs.WINDOW_POOL), lost
    if spec.long:
        respond(server, prompts(16, seed=23), 601)
        assert "#retracted_reqs" in server.log_text(log)
    assert report(server)["totals"]["blocks_missed"] == 0
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.DRAFTS_HOST_TIER], indirect=True)
def test_a_draft_model_finds_its_own_kv_of_a_prefix_that_was_on_the_host(
    server: ServerProcess, model_path: Path
) -> None:
    """As many drafted tokens are accepted as before, and log-probabilities are those of a loop that redirects
    the same blocks. The draft model is the served model, so it drafts well if its KV came back, too."""
    log = server.log_size()
    todo = prompts(4, seed=21, each=2)
    beside = Beside(Loop(model_path), server)
    steps = []
    for turn in range(2):
        before = report(server)["totals"]["decode_steps"]
        for text in todo:
            [found] = respond(server, [text], 400, **TO_THE_END)
            beside.add(text, found)
            assert found["blocks"]
            if turn:
                assert found["cached_from"].get("host", 0) >= found["prompt_tokens"] - 8
        steps.append(report(server)["totals"]["decode_steps"] - before)
        _evict_all(server, on_disk=False)
    assert steps[1] <= 1.05 * steps[0] < 0.5 * 400 * len(todo)
    beside.check("nothing shared", "keys rotated otherwise")
    assert report(server)["totals"]["blocks_missed"] == 0
    assert_whole(server, log)


@pytest.mark.parametrize("server", [specs.QUEST_HOST_TIER], indirect=True)
def test_pages_that_were_on_the_host_are_selected_as_before(
    server: ServerProcess, model_path: Path
) -> None:
    log = server.log_size()
    todo = prompts(2, seed=21, each=24)
    selecting = Selecting(model_path)
    for turn in range(2):
        for text in todo:
            [found] = respond(server, [text], 100, **TO_THE_END)
            if turn:
                assert found["cached_from"].get("host", 0) >= found["prompt_tokens"] - 32
            off = selecting.compare(selecting.tokenizer(text)["input_ids"], found).off
            assert len(off) == 100 and off.max() < ROUNDING
        _evict_all(server, on_disk=False)
    assert_whole(server, log)

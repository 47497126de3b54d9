# SPDX-License-Identifier: Apache-2.0
"""Tests on a GPU, with thirteen servers, each with FlashInfer or Triton; two have no CUDA graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.serving import ServerProcess
from tests.server import specs
from tests.server.harness import ServerPool, assert_whole
from tests.server.problems import (
    OPT_OUT,
    TO_THE_END,
    answers,
    assert_equal_but_for_rounding,
    letters,
    problems,
    prompts,
    report,
    solve,
)
from tests.server.reference import (
    Loop,
    assert_reads_less,
    assert_rkv_decides,
    assert_within_rounding,
    off_from_selecting,
)
from tests.server.specs import EAGER, EAGER_CIRCLES, PAGE16, POLICY, ServerSpec

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(torch.version.hip is not None, reason="needs an NVIDIA GPU, this is ROCm"),
]

#: KV pools are small, so that several servers fit on a GPU. CUDA graphs are few: capturing one takes time.
_SIZES = "--max-running-requests 16 --max-total-tokens 16384 --mem-fraction-static 0.3"
_DECODE = "--cuda-graph-bs-decode 1 4 8"
GRAPHS = f"{_DECODE} --disable-prefill-cuda-graph"
NO_GRAPHS = "--disable-cuda-graph"
FLASHINFER = "--attention-backend flashinfer"
TRITON = "--attention-backend triton"
AS_CACHED = "--reasoncache-positions as-cached"
ON_CUDA = ServerSpec(
    *("cuda", ("--enable-reasoncache", *_SIZES.split(), *EAGER)),
    env=tuple({**specs.WAITING, "PYTHONPATH": specs.PLUGINS}.items()),
    device="cuda",
)
#: fp16 rounds less than the model's bf16.
FP16 = "--dtype float16"
#: Leaves the attention backend and ``positions`` at their defaults. Captures prefill graphs of two sizes.
ALONE = ON_CUDA.having("alone", FP16, _DECODE, "--cuda-graph-bs-prefill 64 256")
ON_TRITON = ON_CUDA.having("triton", FP16, TRITON, GRAPHS)
#: Share whole pages, under the overlap schedule and with CUDA graphs, like the two above.
PAGES = [
    replace(ON_CUDA, model="qwen3").having(
        f"pages-{name}", FP16, PAGE16, GRAPHS, backend, *EAGER_CIRCLES
    )
    for name, backend in (("flashinfer", FLASHINFER), ("triton", TRITON))
]
#: The same with sinks and with windows in a pool of their own.
WINDOW_PAGES = replace(ON_CUDA, model="gpt_oss").having(
    *("windows", FP16, PAGE16, GRAPHS, TRITON, *EAGER_CIRCLES),
    "--moe-runner-backend triton",
    SGLANG_SWA_EVICTION_INTERVAL="1",
)
#: ALIAS shares KV slots. COPIES copies KV into each request's own slots. The overlap schedule is off in both,
#: because a copy would race with the forward in flight.
ALIAS = ON_CUDA.having("alias", FLASHINFER, GRAPHS, "--disable-overlap-schedule")
COPIES = ON_CUDA.having("copy", FLASHINFER, NO_GRAPHS, "--disable-overlap-schedule", **specs.COPY)
EVICTS = f"{POLICY} streamingllm:budget=96:slack=8:recent=16:prompt=true --chunked-prefill-size 64"
EVICTING = ON_CUDA.having("evicting", FP16, FLASHINFER, GRAPHS, EVICTS)
EVICTING_AS_CACHED = ON_CUDA.having(
    "evicting-as-cached", FP16, TRITON, NO_GRAPHS, EVICTS, AS_CACHED
)
RKV = ON_CUDA.having("rkv", FLASHINFER, GRAPHS, POLICY, specs.RKV_POLICY)
BOTH = ON_CUDA.having("both", TRITON, GRAPHS, PAGE16, POLICY, f"reasoncache+{specs.RKV_POLICY}")

QUEST = ON_CUDA.having("quest", FP16, FLASHINFER, GRAPHS, PAGE16, POLICY, specs.QUEST_POLICY)
QUEST_AND_SHARING = ON_CUDA.having(
    "quest-sharing", TRITON, GRAPHS, PAGE16, POLICY, f"reasoncache+{specs.QUEST_POLICY}"
)

SHARING = pytest.mark.parametrize("server", [ALONE, ON_TRITON], indirect=True)


@SHARING
def test_batches_with_and_without_shared_blocks(server: ServerProcess) -> None:
    """Sends 12 requests, more than the largest graph holds, then 3. All are answered; all slots are freed."""
    for count in (12, 3):
        assert all(answer.text for answer in solve(server, problems(count, seed=3)))
    seen = report(server)
    assert seen["totals"]["blocks_shared"] > 0 and seen["config"]["positions"] == "corrected"
    attention = server.get("/server_info").json()["attention_backend"]
    assert attention == ("triton" if "triton" in server.command else "flashinfer")


@SHARING
def test_opted_out_requests_stay_exact(server: ServerProcess) -> None:
    """Requests that opted out give the same tokens before and after other requests shared slots."""
    server.post("/flush_cache")
    before = answers(server, **OPT_OUT)
    # Without a flush, SGLang's own kernels run a batch only if the host marks its rows as sharing nothing.
    answers(server)
    after = answers(server, **OPT_OUT)
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]


def loop_of(servers: ServerPool, spec: ServerSpec) -> Loop:
    return Loop(servers.model(spec.model), spec.model)


@pytest.mark.parametrize("spec", [ALONE, ON_TRITON])
def test_sharing_computes_what_a_loop_computes(servers: ServerPool, spec: ServerSpec) -> None:
    """Log-probabilities are those of a Hugging Face model that redirects the same blocks (page size 1)."""
    server = servers.get(spec)
    todo = prompts(6, seed=21)
    others = ("nothing shared", "keys rotated otherwise")
    assert_within_rounding(server, loop_of(servers, spec), todo, *others, rounding=specs.OF_FP16)
    assert_whole(server)


@pytest.mark.parametrize("spec", [*PAGES, WINDOW_PAGES])
def test_shared_pages_compute_what_a_loop_computes(servers: ServerPool, spec: ServerSpec) -> None:
    server = servers.get(spec)
    loop = loop_of(servers, spec)
    how: dict[str, Any] = dict(rounding=specs.OF_FP16, tokens=500, options=TO_THE_END)
    assert_within_rounding(server, loop, letters(6), "keys rotated otherwise", **how)
    seen = report(server)
    assert seen["block"] == 16 and seen["totals"]["blocks_shared"] > 40
    assert_whole(server)


@pytest.mark.parametrize("spec", [ALIAS])
def test_sharing_equals_copying(servers: ServerPool, spec: ServerSpec) -> None:
    """Sharing slots, with CUDA graphs, gives the same answers as copying V and rotated K, without graphs."""
    found = []
    for each in (spec, COPIES):
        server = servers.get(each)
        found.append(answers(server))
        assert report(server)["totals"]["blocks_shared"] > 0
        assert_whole(server)
    assert_equal_but_for_rounding(*found)


@pytest.mark.parametrize("spec", [EVICTING, EVICTING_AS_CACHED])
def test_evicting_equals_skipping(servers: ServerPool, spec: ServerSpec) -> None:
    """Log-probabilities are those of a model that skips evicted positions."""
    server = servers.get(spec)
    todo = prompts(4, seed=11, each=5)
    # Sent one by one, so that the forward in flight during an eviction is the same request's.
    how: dict[str, Any] = dict(
        rounding=specs.OF_FP16, tokens=300, together=False, options=TO_THE_END
    )
    others = ("nothing evicted", "evicted at another query")
    assert_within_rounding(server, loop_of(servers, spec), todo, *others, **how)
    assert report(server)["totals"]["positions_evicted"] > 4 * 300
    assert_whole(server)


@pytest.mark.parametrize("server", [RKV], indirect=True)
def test_rkv_decides_by_queries_kept_on_the_device(server: ServerProcess, reference: Any) -> None:
    assert_rkv_decides(server, reference)
    solve(server, problems(12, seed=3))
    assert report(server)["disabled"] is None


@pytest.mark.parametrize("server", [BOTH], indirect=True)
def test_shared_pages_and_evicted_ones(server: ServerProcess) -> None:
    for count in (12, 3):
        assert all(answer.text for answer in solve(server, problems(count, seed=5)))
    assert report(server)["totals"]["positions_evicted"] > 0


@pytest.mark.parametrize("spec", [QUEST])
def test_selecting_equals_masking_in_every_layer(servers: ServerPool, spec: ServerSpec) -> None:
    """Where two pages matter alike, rounding may choose the other one."""
    server = servers.get(spec)
    selecting, dense = off_from_selecting(server, servers.model(spec.model))
    assert selecting.mean() < dense.mean() / 5
    assert_reads_less(report(server))
    assert_whole(server)


@pytest.mark.parametrize("server", [QUEST_AND_SHARING], indirect=True)
def test_shared_pages_and_selected_ones(server: ServerProcess) -> None:
    for count in (12, 3):
        assert all(answer.text for answer in solve(server, problems(count, seed=5)))
    assert_reads_less(report(server))
    assert report(server)["totals"]["blocks_shared"] > 0

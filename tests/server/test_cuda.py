# SPDX-License-Identifier: Apache-2.0
"""Corrected positions over SGLang's own attention backends, on a GPU."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.serving import ServerError, ServerProcess
from tests.server.harness import STRICT_CHECKS, assert_whole
from tests.server.problems import (
    OPT_OUT,
    TO_THE_END,
    answers,
    assert_equal_but_for_rounding,
    problems,
    prompts,
    report,
    respond,
    solve,
)
from tests.server.reference import (
    assert_masked,
    assert_quest_decides,
    assert_reads_less,
    assert_rkv_decides,
)
from tests.server.specs import EAGER, POLICY, QUEST_POLICY, RKV_POLICY, WAITING

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(torch.version.hip is not None, reason="needs an NVIDIA GPU, this is ROCm"),
]

PAGE16 = ("--page-size", "16")
POSITIONS = "--reasoncache-positions"


Serve = Callable[..., ServerProcess]
GRAPHS = {"graphs": ("--cuda-graph-max-bs-decode", "8"), "eager": ("--disable-cuda-graph",)}


@pytest.fixture(scope="module", params=[*itertools.product(("flashinfer", "triton"), GRAPHS)])
def serve(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    attention, graphs = request.param

    def made(*more: str) -> ServerProcess:
        flags = ("--enable-reasoncache", "--attention-backend", attention, *GRAPHS[graphs], *EAGER)
        return ServerProcess(
            model_path,
            flags=(*flags, "--mem-fraction-static", "0.3", "--max-running-requests", "16", *more),
            env={**STRICT_CHECKS, **WAITING},
            log_path=tmp_path_factory.mktemp("cuda") / f"{attention}.log",
            device="cuda",
        )

    return made


@pytest.fixture(scope="module")
def shared(serve: Serve) -> Iterator[ServerProcess]:
    with serve(POSITIONS, "corrected") as server:
        yield server


def test_sharing_equals_copying(serve: Serve) -> None:
    """The same answers as a server that writes rotated K and V into the requests' own slots; both
    without the overlap schedule, where copies would race with the forward in flight."""
    found = {}
    for apply in ("alias", "copy"):
        flags = (POSITIONS, "corrected", "--reasoncache-set", f"apply={apply}")
        with serve(*flags, "--disable-overlap-schedule") as server:
            found[apply] = answers(server)
            assert report(server)["config"]["positions"] == "corrected"
            assert report(server)["totals"]["blocks_shared"] > 0
            assert_whole(server)
    assert_equal_but_for_rounding(found["alias"], found["copy"])


def test_batches_with_and_without_shared_blocks(shared: ServerProcess) -> None:
    """More requests than the largest graph, then few: every one is answered, every slot comes back."""
    for count in (12, 3):
        assert all(answer.text for answer in solve(shared, problems(count, seed=3)))
    assert report(shared)["totals"]["blocks_shared"] > 0
    assert_whole(shared)


def test_opted_out_requests_stay_exact(shared: ServerProcess) -> None:
    """Unshared requests run SGLang's kernels, alone or after others shared."""
    shared.post("/flush_cache")
    before = answers(shared, **OPT_OUT)
    # No flush after it: slots stay shifted, and the batch decides which kernels run.
    answers(shared)
    after = answers(shared, **OPT_OUT)
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]


@pytest.mark.parametrize("positions", ["corrected", "as-cached"])
def test_evicting_equals_masking(serve: Serve, positions: str, reference: Any) -> None:
    """As on the CPU: log-probabilities are those of a loop that does not see what was evicted."""
    policy = (POLICY, "streamingllm:budget=96:slack=8:recent=16:prompt=true")
    todo = prompts(4, seed=11, each=5)
    with serve(*policy, POSITIONS, positions, "--chunked-prefill-size", "64") as server:
        found = respond(server, todo, 300, **TO_THE_END)
        assert_whole(server)
    assert all(one["evicted_positions"] > 300 for one in found)
    unbounded = float("inf"), float("inf")
    assert_masked(reference, todo, found, 0, 10, unbounded)


def test_rkv_decides_by_weights_noted_on_the_device(serve: Serve, reference: Any) -> None:
    with serve(POLICY, RKV_POLICY) as server:
        assert_rkv_decides(server, reference)
        solve(server, problems(12, seed=3))
        assert report(server)["totals"]["eviction_refusals"] == {}
        assert_whole(server)


@pytest.mark.parametrize("positions", ["corrected", "as-cached"])
def test_quest_reads_what_its_rule_says(serve: Serve, positions: str, reference: Any) -> None:
    with serve(*PAGE16, POLICY, QUEST_POLICY, POSITIONS, positions) as server:
        assert_quest_decides(server, reference)
        solve(server, problems(12, seed=42))
        assert_reads_less(server, 0.8)
        assert_whole(server)


def test_shared_pages_evicted_ones_and_selected_ones(serve: Serve) -> None:
    policy = "reasoncache+quest:budget=96+rkv:budget=110:slack=24:recent=16"
    with serve(*PAGE16, POLICY, policy, POSITIONS, "corrected") as server:
        for count in (12, 3):
            assert all(answer.text for answer in solve(server, problems(count, seed=5)))
        assert_reads_less(server, 1.0)
        assert report(server)["totals"]["positions_evicted"] > 0
        assert_whole(server)


@pytest.mark.parametrize("serve", [("flashinfer", "eager")], indirect=True)
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--enable-torch-compile",), "--enable-torch-compile"),
        (("--prefill-attention-backend", "triton"), "flashinfer"),
    ],
)
def test_what_cannot_be_corrected_is_refused(
    serve: Serve, flags: tuple[str, ...], named: str
) -> None:
    server = serve(POSITIONS, "corrected", *flags)
    with pytest.raises(ServerError, match=named):
        server.start()
    server.close()

# SPDX-License-Identifier: Apache-2.0
"""Corrected positions over SGLang's own attention backends, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eval.serving import ServerError, ServerProcess
from tests.server import masking, quest_rule, rkv_rule
from tests.server.harness import STRICT_CHECKS, assert_whole
from tests.server.problems import OPT_OUT, chat_once, problems, report, solve, tokens_and_logprobs
from tests.server.specs import EAGER, WAITING

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(torch.version.hip is not None, reason="needs an NVIDIA GPU, this is ROCm"),
]

_PROMPTS = [problem.prompt for problem in problems(4, seed=11)]
#: Both lists of tokens come from bf16 attention, one with keys rotated before they are rounded.
_LOGPROB_ERROR = 0.05


@pytest.fixture(scope="module", params=["flashinfer", "triton"])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["graphs", "eager"])
def graphs(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (
        ("--cuda-graph-max-bs-decode", "8")
        if request.param == "graphs"
        else ("--disable-cuda-graph",)
    )


Serve = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def serve(
    model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    attention: str,
    graphs: tuple[str, ...],
) -> Serve:
    """Makes a server that has more flags."""

    def made(*more: str) -> ServerProcess:
        flags = ("--enable-reasoncache", "--attention-backend", attention, *graphs, *EAGER)
        return ServerProcess(
            model_path,
            flags=(*flags, "--mem-fraction-static", "0.3", "--max-running-requests", "16", *more),
            env={**STRICT_CHECKS, **WAITING},
            log_path=tmp_path_factory.mktemp("cuda") / f"{attention}.log",
            device="cuda",
        )

    return made


def _answers(server: ServerProcess, **options: object) -> list[tuple[list[str], list[float]]]:
    chats = ([{"role": "user", "content": prompt}] for prompt in _PROMPTS)
    return [tokens_and_logprobs(chat_once(server, chat, **options)) for chat in chats]


@pytest.fixture(scope="module")
def shared(serve: Serve) -> Iterator[ServerProcess]:
    with serve("--reasoncache-positions", "corrected") as server:
        yield server


def test_sharing_equals_copying(serve: Serve) -> None:
    """The same answers as a server that writes rotated K and V into the requests' own slots.

    Both without the overlap schedule: copies would race with the forward in flight, and
    a block would be shared a token later.
    """
    answers = {}
    for apply in ("alias", "copy"):
        flags = ("--reasoncache-positions", "corrected", "--reasoncache-set", f"apply={apply}")
        with serve(*flags, "--disable-overlap-schedule") as server:
            answers[apply] = _answers(server)
            assert report(server)["config"]["positions"] == "corrected"
            assert report(server)["totals"]["blocks_shared"] > 0
            assert_whole(server)
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(
        answers["alias"], answers["copy"], strict=True
    ):
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=_LOGPROB_ERROR)


def test_batches_with_and_without_shared_blocks(shared: ServerProcess) -> None:
    """More requests than the largest graph, then few: every one is answered, every slot comes back."""
    for count in (12, 3):
        answers = solve(shared, problems(count, seed=3))
        assert all(answer.text for answer in answers)
    assert report(shared)["totals"]["blocks_shared"] > 0
    assert_whole(shared)


def test_opted_out_requests_stay_exact(shared: ServerProcess) -> None:
    """Unshared requests run SGLang's kernels, alone or after others shared."""
    shared.post("/flush_cache")
    before = _answers(shared, extra_body=OPT_OUT)
    # No flush after it: slots stay shifted, and the batch decides which kernels run.
    _answers(shared)
    after = _answers(shared, extra_body=OPT_OUT)
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]


@pytest.mark.parametrize("positions", ["corrected", "as-cached"])
def test_evicting_equals_masking(model_path: Path, serve: Serve, positions: str) -> None:
    """As on the CPU: log-probabilities are those of a loop that does not see what was evicted."""
    policy = ("--reasoncache-policy", "streamingllm:budget=96:slack=8:recent=16:prompt=true")
    flags = (*policy, "--reasoncache-positions", positions, "--chunked-prefill-size", "64")
    reference = masking.load(model_path)
    prompts = [f"<|user|> {' '.join(_PROMPTS)} {text} <|assistant|>" for text in _PROMPTS]
    right = dense = 0.0
    with serve(*flags) as server:
        found = masking.respond(server, prompts, 300, sampling_params={"ignore_eos": True})
        assert_whole(server)
    for text, response in zip(prompts, found, strict=True):
        assert response["evicted_positions"] > 300
        right += float(masking.differences(reference, text, response).sum())
        dense += float(masking.differences(reference, text, response, None).sum())
    assert right < dense / 10


def test_rkv_decides_by_weights_noted_on_the_device(model_path: Path, serve: Serve) -> None:
    with serve(*rkv_rule.POLICY) as server:
        rkv_rule.assert_rkv_decides(server, masking.load(model_path))
        solve(server, problems(12, seed=3))
        assert report(server)["totals"]["eviction_refusals"] == {}
        assert_whole(server)


@pytest.mark.parametrize("positions", ["corrected", "as-cached"])
def test_quest_reads_what_its_rule_says(model_path: Path, serve: Serve, positions: str) -> None:
    flags = (*quest_rule.POLICY, "--reasoncache-positions", positions)
    with serve(*flags) as server:
        quest_rule.assert_quest_decides(server, masking.load(model_path))
        quest_rule.assert_reads_less(server)
        assert_whole(server)


def test_shared_pages_evicted_ones_and_selected_ones(serve: Serve) -> None:
    """All three on the same rows: every request is answered, every slot comes back."""
    policy = "reasoncache+quest:budget=96+rkv:budget=110:slack=24:recent=16"
    asked = ("--reasoncache-policy", policy, "--reasoncache-positions", "corrected")
    flags = ("--page-size", "16", *asked)
    with serve(*flags) as server:
        for count in (12, 3):
            answers = solve(server, problems(count, seed=5))
            assert all(answer.text for answer in answers)
        seen = report(server)
        assert seen["selection"]["refusals"] == {}
        assert 0 < seen["selection"]["positions_read"] < seen["selection"]["positions_held"]
        assert seen["totals"]["positions_evicted"] > 0
        assert_whole(server)


@pytest.mark.parametrize(("attention", "graphs"), [("flashinfer", "eager")], indirect=True)
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
    server = serve("--reasoncache-positions", "corrected", *flags)
    with pytest.raises(ServerError, match=named):
        server.start()
    server.close()

# SPDX-License-Identifier: Apache-2.0
"""Tests by which values a client opts out of sharing, and that wrong values are refused. Also tests which
tokens mark the start and end of reasoning (such as ``<think>``) for SGLang's reasoning parsers."""

import asyncio
import gc
import logging
import re
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.aio_rwlock import RWLock
from transformers import AutoTokenizer

from eval.tiny_reasoner import CHECKPOINT
from sglang_reasoncache import compat, custom_params
from sglang_reasoncache.compat.carriers import CONFIG
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import OPT_OUT_KEY, Asked, asked_by, asked_of, documents_of
from sglang_reasoncache.plugin import documents, hooks
from sglang_reasoncache.plugin.reasoning import reasoning_markers
from tests.filter.other_tokenizers import tekken

#: Whether the request may share (None: the values are refused) -> values of ``OPT_OUT_KEY``.
SPELLINGS = {
    False: (False, 0, "false", "False", "off", "no", "NO", "0", {"share": "no", "record": True}),
    True: (True, 1, "true", "TRUE", "on", "yes", "1", None, {}, {"record": 0}),
    None: ("maybe", "", 2, -1, 0.0, [False]),
}


@pytest.fixture(autouse=True)
def _hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(**{CONFIG: ReasonCacheConfig()})
    monkeypatch.setattr(compat, "get_server_args", lambda: serving)
    monkeypatch.setattr(SamplingParams, "verify", SamplingParams.verify)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "_hooks", {})
    target = compat.HOOK_TARGETS["verify"]
    HookRegistry._hooks[target] = [(HookType.AFTER, hooks._after_verify, None)]
    HookRegistry.apply_hooks()


def test_media_keep_a_request_out_even_once_they_are_gone() -> None:
    """SGLang drops them when the session of a running request is closed."""
    req = Req("r", "", array("q", [1]), SamplingParams())
    assert custom_params.takes_part(req)
    media: Any = object()
    req.multimodal_inputs = media
    assert not custom_params.takes_part(req)
    req.multimodal_inputs = None
    assert not custom_params.takes_part(req)


def test_messages_beside_an_image_are_not_documents() -> None:
    adapted = SimpleNamespace(image_data=["..."], video_data=None, audio_data=None, input_ids=None)
    adapted.sampling_params = {"custom_params": {"documents": "messages"}}
    request = SimpleNamespace(messages=[None] * 3)
    with pytest.raises(ValueError, match="cannot be marked beside images"):
        documents.after_chat((adapted, None), None, request)


@pytest.mark.parametrize("ends", ["failure", "abort", "well"])
def test_prefills_of_documents_leave_no_lock(ends: str) -> None:
    """Each holds SGLang's lock against updates of weights until its generator is closed."""

    async def run() -> int:
        lock = RWLock()
        ready = asyncio.Event()

        async def prefill(number: int) -> AsyncGenerator[int, None]:
            async with lock.reader_lock:
                if number == 2 and ends != "well":
                    await ready.wait()
                    raise ValueError("the client left")
                yield number

        prefills = asyncio.ensure_future(documents.first_answers([prefill(n) for n in range(3)]))
        for _ in range(5):
            await asyncio.sleep(0)
        if ends == "abort":
            prefills.cancel()
        ready.set()
        result = await asyncio.gather(prefills, return_exceptions=True)
        expected = {"failure": ValueError, "abort": asyncio.CancelledError, "well": list}
        assert isinstance(result[0], expected[ends])
        return lock._readers

    gc.disable()
    try:
        assert asyncio.run(run()) == 0
    finally:
        gc.enable()


def test_a_server_without_the_plugin_takes_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier server in the process has installed the hooks; the key may mean something else there."""
    monkeypatch.setattr(compat, "get_server_args", SimpleNamespace)
    SamplingParams(custom_params={OPT_OUT_KEY: "maybe", "documents": ["a"]}).verify(10)


@pytest.mark.parametrize(
    ("shares", "value"), [(shares, value) for shares in SPELLINGS for value in SPELLINGS[shares]]
)
def test_spellings_of_yes_and_no(shares: bool | None, value: object) -> None:
    """The frontend refuses values that mean neither yes nor no. A scheduler takes such values as opt-outs."""
    params = SamplingParams(custom_params={OPT_OUT_KEY: value})
    assert asked_by(Req("r", "", array("q", [1]), params)).share == bool(shares)
    if shares is not None:
        params.verify(10)
        return
    told = f"custom_params: reasoncache must be true or false, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(told)):
        params.verify(10)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"off": 1}, "reasoncache has the keys share, record, got ['off']"),
        ({"record": "maybe"}, "reasoncache.record must be true or false, got 'maybe'"),
        ({"share": None}, "reasoncache.share must be true or false, got None"),
    ],
)
def test_a_wrong_object_is_refused_by_key(value: object, told: str) -> None:
    params = SamplingParams(custom_params={OPT_OUT_KEY: value})
    with pytest.raises(ValueError, match=re.escape(f"custom_params: {told}")):
        params.verify(10)
    assert asked_by(Req("r", "", array("q", [1]), params)) == Asked(share=False)


def test_a_wrong_value_costs_a_scheduler_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size, and however often SGLang looks the request up."""
    params = SamplingParams(custom_params={OPT_OUT_KEY: [0] * 1_000_000})
    req = Req("r", "", array("q", [1]), params)
    assert asked_by(req) == Asked(share=False)
    monkeypatch.setattr(custom_params, "asked_of", None)
    assert asked_by(req) == Asked(share=False)
    told = "custom_params: reasoncache must be true or false, got [0, 0, 0, 0, ...]"
    monkeypatch.undo()
    with pytest.raises(ValueError, match=re.escape(told)):
        asked_of(params.custom_params)


@pytest.mark.parametrize("params", [None, {}, {"thinking_budget": 7}])
def test_a_request_that_says_nothing_shares(params: object) -> None:
    given = SamplingParams(custom_params=params)
    given.verify(10)
    assert asked_by(Req("r", "", array("q", [1]), given)) == Asked()


@pytest.mark.parametrize(
    ("parser", "force"), [("deepseek-r1", True), ("qwen3", False), ("qwen3-thinking", True)]
)
@pytest.mark.parametrize("added", [[], ["<tool_call>"]], ids=["", "tools"])
def test_single_tokens(parser: str, force: bool, added: list[str]) -> None:
    """``<tool_call>`` is an end marker only with parsers for which a tool call ends the reasoning."""
    tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.add_tokens(added, special_tokens=True)
    start, *ends = tokenizer.convert_tokens_to_ids(["<think>", "</think>", *added])
    if parser == "deepseek-r1":
        ends = ends[:1]
    assert reasoning_markers(parser, tokenizer) == ({start}, set(ends), force)


@pytest.mark.parametrize("parser", ["gpt-oss", "mistral", "no-such-parser", "k2_horizon"])
def test_what_cannot_be_followed_is_said(parser: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a usable parser or tokenizer all output counts as reasoning. Only unusable parsers are logged."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for known in ((None, tokenizer), ("", tokenizer), ("qwen3", None)):
        assert reasoning_markers(*known) is None
    assert not caplog.text
    with caplog.at_level(logging.WARNING, "sglang_reasoncache"):
        assert reasoning_markers(parser, tokenizer) is None
    assert f"--reasoning-parser {parser}" in caplog.text
    assert "the whole response counts as reasoning" in caplog.text


def test_markers_that_are_never_encoded_from_text(tmp_path: Path) -> None:
    """As in mistral-common. A Mistral model that does not reason lacks the markers."""
    for added, found in (
        (("[THINK]", "[/THINK]"), ({19}, {20}, False)),
        (("[THINK]",), None),
        ((), None),
    ):
        tokenizer = tekken(tmp_path, added)
        assert len(tokenizer.encode("[THINK]", add_special_tokens=False)) == 7
        assert reasoning_markers("mistral", tokenizer) == found


@pytest.mark.parametrize("one", [7, None, []], ids=str)
def test_a_text_that_is_no_token_is_no_marker(one: object) -> None:
    """What ``convert_tokens_to_ids`` returns for it differs between tokenizers."""
    tokenizer = SimpleNamespace(
        encode=lambda _text, **_: [1, 2],
        convert_tokens_to_ids=lambda _text: one,
        decode=lambda _token_ids: "<unk>",
    )
    assert reasoning_markers("qwen3", tokenizer) is None


def test_a_long_base_before_many_documents_is_refused() -> None:
    spans = [[10_000 + at, 10_001 + at] for at in range(256)]
    with pytest.raises(ValueError, match="number of documents, got 10000 x 256"):
        documents_of({"documents": spans})
    assert documents_of({"documents": spans[:50]})


def test_spans_may_be_bounds_in_turns() -> None:
    nested = documents_of({"documents": [[4, 12], [12, 20]]})
    assert nested is not None and documents_of({"documents": [4, 12, 12, 20]}) == nested
    with pytest.raises(ValueError, match=r"documents\[0\] must be \[start, end\]"):
        documents_of({"documents": [4, 12, 12, 20]}, flat=False)
    for wrong in ([4, 12, 12], [4, 12, 13, 20], [4, 12, True, 20], [4] * 1026, [12, 4]):
        with pytest.raises(ValueError, match="custom_params: documents"):
            documents_of({"documents": wrong})

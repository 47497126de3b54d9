# SPDX-License-Identifier: Apache-2.0
"""Tests that a scheduler starts although the text of the model's tokens cannot be read."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_reasoncache import compat
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.plugin import server
from sglang_reasoncache.plugin.tokenizer import settle_vocabulary, tokenizer_of
from tests.filter.made_tokenizers import made


class _Unreadable:
    vocab_size = 1000

    def encode(self, _text: str, **_: Any) -> list[int]:
        raise NotImplementedError("no encode")

    def decode(self, _token_ids: list[int]) -> str:
        raise NotImplementedError("no decode")


def _resolved(**settings: Any) -> ResolvedConfig:
    return ResolvedConfig(ReasonCacheConfig.from_mapping(settings), page=1)


def test_a_tokenizer_that_can_be_read_changes_no_settings() -> None:
    resolved = _resolved()
    found, vocabulary = settle_vocabulary(resolved, made("gpt2"))
    assert found is resolved and len(vocabulary.pieces) == len(made("gpt2"))


@pytest.mark.parametrize("tokenizer", [_Unreadable(), None], ids=["unreadable", "none"])
def test_equal_runs_share_by_token_ids(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    resolved = _resolved()
    found, vocabulary = settle_vocabulary(resolved, tokenizer)
    assert found is resolved and not vocabulary.pieces
    (line,) = caplog.messages
    told = "there is no tokenizer" if tokenizer is None else "cannot read the tokens of _Unreadable"
    assert told in line and "--enable-reasoncache finds equal runs by token ids alone" in line
    assert "compares every 128 tokens" in line


@pytest.mark.parametrize(("most", "expected"), [(None, 128), (48, 48)])
def test_the_filter_then_compares_often(
    most: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passage that comes again is found once ``expected`` tokens of it are there."""
    resolved = _resolved(max_step_tokens=most, min_age=0, direction="oldest")
    _, vocabulary = settle_vocabulary(resolved, _Unreadable())
    asked: list[Any] = []
    monkeypatch.setattr(server, "FilterProcess", lambda *args: asked.append(args))
    meter: Any = SimpleNamespace(warm_up=lambda _block: None)
    server._filter(resolved, meter, None, vocabulary)
    settings, known, *_ = asked[0]
    request = RequestFilter(settings, TokenClasses(known), known, 0)
    passage = [*range(expected)]
    (first,) = request.push(passage + passage[:-1])
    (second,) = request.push(passage[-1:])
    assert second.pairs and not first.pairs


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"preset": "reasoncache"}, "match=steps"),
        ({"preset": "memshare"}, "match=steps"),
        ({"preset": "random"}, "random_ratio=0.3"),
    ],
    ids=["reasoncache", "memshare", "random"],
)
def test_what_compares_steps_shares_nothing(
    settings: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, vocabulary = settle_vocabulary(_resolved(**settings), _Unreadable())
    assert not found.config.shares and not vocabulary.pieces and found.learns
    assert found.uncorrected is not None and found.uncorrected in caplog.text
    assert f"--reasoncache-set {named} needs the text of steps" in found.uncorrected
    (line,) = caplog.messages
    assert "nothing is shared, because: " in line and "--reasoncache-preset newest" in line
    caplog.clear()
    assert settle_vocabulary(found, _Unreadable())[0] is found
    assert not caplog.messages


def test_a_tokenizer_that_sglang_does_not_load_may_be_absent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``--skip-tokenizer-init`` SGLang itself needs none."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no such file")

    serving = SimpleNamespace(
        tokenizer_path="/nowhere", tokenizer_mode="auto", tokenizer_backend="huggingface"
    )
    model = SimpleNamespace(trust_remote_code=False, revision=None)
    monkeypatch.setattr(compat, "get_serving", lambda: serving, raising=False)
    monkeypatch.setattr(compat, "get_model", lambda: model, raising=False)
    monkeypatch.setattr(compat, "get_tokenizer", fails, raising=False)
    context: Any = SimpleNamespace(tp_worker=SimpleNamespace(tokenizer=None))
    assert tokenizer_of(context) is None
    (line,) = caplog.messages
    assert "--skip-tokenizer-init" in line and "/nowhere" in line and "no such file" in line

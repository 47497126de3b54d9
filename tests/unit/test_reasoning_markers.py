# SPDX-License-Identifier: Apache-2.0
"""Markers of reasoning as SGLang's own parsers name them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_reasoncache.plugin.step_filter import reasoning_markers

_MODEL = Path(__file__).parents[2] / "eval" / "tiny_reasoner" / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(_MODEL)


@pytest.mark.parametrize(
    ("parser", "force"), [("deepseek-r1", True), ("qwen3", False), ("qwen3-thinking", True)]
)
def test_single_tokens(tokenizer: Any, parser: str, force: bool) -> None:
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert reasoning_markers(parser, tokenizer) == ({start}, {end}, force)


def test_a_tool_call_that_ends_reasoning_is_an_end_marker() -> None:
    tokenizer = AutoTokenizer.from_pretrained(_MODEL)
    tokenizer.add_tokens(["<tool_call>"], special_tokens=True)
    found = reasoning_markers("qwen3", tokenizer)
    assert found is not None
    assert found.end_ids == {
        tokenizer.convert_tokens_to_ids("</think>"),
        tokenizer.convert_tokens_to_ids("<tool_call>"),
    }


def test_without_parser_or_tokenizer_all_is_reasoning(tokenizer: Any) -> None:
    assert reasoning_markers(None, tokenizer) is None
    assert reasoning_markers("", tokenizer) is None
    assert reasoning_markers("qwen3", None) is None


@pytest.mark.parametrize("parser", ["gpt-oss", "mistral", "no-such-parser", "k2_horizon"])
def test_what_cannot_be_followed_is_said(
    tokenizer: Any, parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sglang_reasoncache"):
        assert reasoning_markers(parser, tokenizer) is None
    assert f"--reasoning-parser {parser}" in caplog.text
    assert "the whole response counts as reasoning" in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""Markers of reasoning as SGLang's own parsers name them."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_reasoncache.plugin.reasoning import reasoning_markers

_MODEL = Path(__file__).parents[2] / "eval" / "tiny_reasoner" / "checkpoint"


@pytest.mark.parametrize(
    ("parser", "force"), [("deepseek-r1", True), ("qwen3", False), ("qwen3-thinking", True)]
)
@pytest.mark.parametrize("added", [[], ["<tool_call>"]], ids=["", "tools"])
def test_single_tokens(parser: str, force: bool, added: list[str]) -> None:
    """A tool call that ends reasoning is an end marker."""
    tokenizer: Any = AutoTokenizer.from_pretrained(_MODEL)
    tokenizer.add_tokens(added, special_tokens=True)
    start, *ends = tokenizer.convert_tokens_to_ids(["<think>", "</think>", *added])
    if parser == "deepseek-r1":
        ends = ends[:1]
    assert reasoning_markers(parser, tokenizer) == ({start}, set(ends), force)


@pytest.mark.parametrize("parser", ["gpt-oss", "mistral", "no-such-parser", "k2_horizon"])
def test_what_cannot_be_followed_is_said(parser: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without parser or tokenizer there is nothing to say: all is reasoning."""
    tokenizer = AutoTokenizer.from_pretrained(_MODEL)
    for known in ((None, tokenizer), ("", tokenizer), ("qwen3", None)):
        assert reasoning_markers(*known) is None
    assert not caplog.text
    with caplog.at_level(logging.WARNING, "sglang_reasoncache"):
        assert reasoning_markers(parser, tokenizer) is None
    assert f"--reasoning-parser {parser}" in caplog.text
    assert "the whole response counts as reasoning" in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""A tiny trained model that repeats and corrects itself, small enough for CPU tests."""

from pathlib import Path

from sglang_reasoncache.arguments import arguments_of

#: The shipped model, with tokenizer and chat template.
CHECKPOINT = Path(__file__).parent / "checkpoint"

#: These settings let short repeats share KV, because a reasoning step of the model has at most 30 tokens.
EMBEDDED_SETTINGS = {"block": 8, "min_run": 8}
EMBEDDED_FLAGS = arguments_of(EMBEDDED_SETTINGS)

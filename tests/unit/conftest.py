# SPDX-License-Identifier: Apache-2.0
"""What parts of SGLang read from the process while they run without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def published_config() -> Iterator[None]:
    """SGLang's default configuration for the CPU, published for one test."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(device="cpu", attention_backend="torch_native"):
        yield

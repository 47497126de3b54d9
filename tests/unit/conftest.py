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


@pytest.fixture
def out_of_tree_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's rotary module asks for a CUDA kernel elsewhere than on a platform like ours."""
    from sglang.srt.layers.rotary_embedding import base

    from sglang_reasoncache.cpu_platform import TorchCpuPlatform

    monkeypatch.setattr(base, "current_platform", TorchCpuPlatform())

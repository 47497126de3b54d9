# SPDX-License-Identifier: Apache-2.0
"""Fixture: every backend that reads host memory."""

from __future__ import annotations

import pytest

from sglang_reasoncache import native

BACKENDS = ("native", "torch")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        try:
            native.library()
        except native.NativeUnavailable as error:
            pytest.skip(str(error))
    return str(request.param)

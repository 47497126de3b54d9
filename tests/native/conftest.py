# SPDX-License-Identifier: Apache-2.0
"""The compiled library, or the reason why its tests are skipped."""

from __future__ import annotations

import ctypes

import pytest

from sglang_reasoncache import native


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """``csrc/`` as a loaded library."""
    try:
        return native.library()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))

# SPDX-License-Identifier: Apache-2.0
"""What tests of a server's responses compare them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server import masking


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    """Tokenizer and model of a loop whose attention can be masked."""
    return masking.load(model_path)

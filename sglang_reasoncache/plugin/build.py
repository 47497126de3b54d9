# SPDX-License-Identifier: Apache-2.0
"""Names the build that runs, for operators and for ranks that must agree."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.metadata import version
from pathlib import Path


@functools.cache
def build() -> str:
    """Names what runs here: a digest of this package's Python sources, if they are files, and the versions of
    Python and of the packages that ranks decide by. Ranks with equal builds and settings decide alike."""
    sources = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in sources.rglob("*.py") if path.is_file()):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + text)
    packages = "numpy", "torch", "sglang", "transformers", "tokenizers"
    versions = [f"{name} {version(name)}" for name in packages]
    return (
        f"{digest.hexdigest()[:12]} with Python {platform.python_version()}, {', '.join(versions)}"
    )

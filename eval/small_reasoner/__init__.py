# SPDX-License-Identifier: Apache-2.0
"""A small language model that reasons in English, to measure what sharing KV slots does to answers."""

from pathlib import Path

#: Folders in the working directory. ``make small-model`` makes both.
BASE = Path("build/models/smollm2")
MODEL = Path("build/models/small_reasoner")
#: LoRA weights, which are merged with ``BASE`` to give ``MODEL``.
ADAPTER = Path(__file__).parent / "adapter"

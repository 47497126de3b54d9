# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the parts; each is a program and writes JSON."""

import argparse
from collections.abc import Callable

#: Recorded responses to AIME 2024, of the folder that a benchmark is given.
AIME = "aime24_sky_t1_32b.jsonl"


def at_least(least: int) -> Callable[[str], int]:

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number

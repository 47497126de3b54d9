# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; each is a program and writes JSON."""

#: Recorded responses to AIME 2024, of the folder that a benchmark is given.
AIME = "aime24_sky_t1_32b.jsonl"

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; each is a program and writes what it measured under ``build/bench``."""

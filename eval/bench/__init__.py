# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs, most of which write results under ``build/bench``, and modules that they share."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the parts; each is a program and writes JSON."""

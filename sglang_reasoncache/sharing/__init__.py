# SPDX-License-Identifier: Apache-2.0
"""Measures KV distances of block pairs, and changes rows (block tables) so that accepted pairs share slots."""

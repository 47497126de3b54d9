# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: pure functions over their records."""

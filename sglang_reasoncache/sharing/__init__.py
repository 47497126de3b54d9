# SPDX-License-Identifier: Apache-2.0
"""Measures the KV distance of block pairs, accepts some, and redirects rows (block tables) to shared slots."""

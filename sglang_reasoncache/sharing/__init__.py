# SPDX-License-Identifier: Apache-2.0
"""Measures proposed block pairs, accepts some, redirects rows to shared slots, and counts."""

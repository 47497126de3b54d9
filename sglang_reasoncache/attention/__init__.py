# SPDX-License-Identifier: Apache-2.0
"""Attention over shared slots. Keys are rotated from their cached positions to the positions that read them."""

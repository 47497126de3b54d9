# SPDX-License-Identifier: Apache-2.0
"""Attention over KV slots that several positions name. A key is rotated to each position where it is used."""

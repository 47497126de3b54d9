# SPDX-License-Identifier: Apache-2.0
"""Evicting policies, one in each file: how much each position of a request is worth. See docs/eviction.md."""

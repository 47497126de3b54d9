# SPDX-License-Identifier: Apache-2.0
"""Slots with more than one owner: reference counts, allocators, prefix tree, cached positions."""

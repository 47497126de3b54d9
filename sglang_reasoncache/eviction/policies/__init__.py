# SPDX-License-Identifier: Apache-2.0
"""Evicting policies, one per file. They score how much positions are worth. See docs/eviction.md."""

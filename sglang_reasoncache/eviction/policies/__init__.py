# SPDX-License-Identifier: Apache-2.0
"""Evicting policies, one per file. A policy scores how much positions are worth. See docs/eviction.md."""

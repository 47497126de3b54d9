# SPDX-License-Identifier: Apache-2.0
"""Evicting policies, one per file. A policy scores a request's positions. See docs/eviction.md."""

# SPDX-License-Identifier: Apache-2.0
"""Evicting policies, one a file: what each position of a request is worth. See docs/eviction.md."""
